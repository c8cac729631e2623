"""Checkpoints of a run: the drafter as it is served, and beside it the optimiser, as safetensors. No pickle.

A checkpoint is written to a temporary directory and renamed, so one that exists is whole.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ..cache import whole_dir
from ..checked import ConfigError, InputError
from ..hub.files import read_tensors
from ..hub.native import write_drafter
from ..modeling.drafter import Drafter
from .optim import AnyOptimizer

FREE = {"out", "train.log_every", "train.save_every", "train.keep_last", "train.device"}
"""Settings that may change between the parts of a resumed run."""


def folder(out: Path, step: int) -> Path:
    return out / "checkpoints" / f"step-{step:07d}"


def found(out: Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first."""
    return sorted(p for p in (out / "checkpoints").glob("step-*") if (p / "trainer.json").is_file())


def save(
    out: Path,
    step: int,
    drafter: Drafter,
    optimizer: AnyOptimizer,
    settings: dict[str, Any],
    keep: int,
    provenance: dict[str, Any],
) -> Path:
    """Write the checkpoint of `step` finished optimiser steps, then drop all but the newest `keep`."""
    from safetensors.torch import save_file

    with whole_dir(folder(out, step)) as temporary:
        write_drafter(drafter, temporary, {**provenance, "step": step})
        tensors = {
            f"{name}|{key}": value
            for name, p in drafter.named_parameters()
            if p in optimizer.state
            for key, value in optimizer.state[p].items()
        }
        save_file(tensors, temporary / "optimizer.state")
        (temporary / "trainer.json").write_text(json.dumps({"step": step, "settings": settings}, indent=2) + "\n")
    for old in found(out)[:-keep]:
        shutil.rmtree(old)
    return folder(out, step)


def load(path: Path, drafter: Drafter, optimizer: AnyOptimizer, settings: dict[str, Any]) -> int:
    """Restore drafter and optimiser in place; the number of finished steps. ConfigError where `settings` differ."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        trainer = json.loads((path / "trainer.json").read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path / 'trainer.json'} is truncated or damaged: {error}") from None
    if differences := differ(_complete(trainer["settings"]), settings):
        raise ConfigError(
            f"{path.parent.parent} holds a run with other settings ({'; '.join(differences)}); "
            "choose another `out`, or --resume never to start over"
        )
    drafter.load_state_dict(read_tensors(path))
    try:
        tensors = load_file(path / "optimizer.state")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path / 'optimizer.state'} is truncated or damaged: {error}") from None
    for name, p in drafter.named_parameters():
        state = {key.split("|")[1]: value for key, value in tensors.items() if key.split("|")[0] == name}
        if state:
            # the step counter stays float32 on the CPU or the device, as the optimiser made it
            optimizer.state[p] = {k: v.to(p.device) if k != "step" or p.is_cuda else v for k, v in state.items()}
    return int(trainer["step"])


def _complete(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a run that began before some of them existed."""
    return settings | {
        "train": {"init": "random", "optimizer": "adamw"} | settings["train"],
        "data": {"pack_tokens": None, "features": "live", "max_refused": 0.01, "malformed": "error"} | settings["data"],
    }


def differ(old: Any, new: Any, key: str = "") -> list[str]:
    """What changed between two settings trees, as 'a.b: 1 -> 2', save for keys that may change."""
    if key in FREE or old == new:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(k for k in new if k not in old)]
        return [d for k in keys for d in differ(old.get(k), new.get(k), f"{key}.{k}" if key else k)]
    return [f"{key}: {old!r} -> {new!r}"]
