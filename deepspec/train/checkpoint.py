"""Checkpoints of a run: the drafter as it is served, and beside it the optimiser, as safetensors. No pickle.

A checkpoint is written to a temporary directory and renamed, so one that exists is whole. It holds whole tensors,
however many processes wrote it and however they split them, so any number of processes goes on from it. There is no
random state in it: whatever is random depends on (seed, epoch, row) alone.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..cache import whole_dir, write_text
from ..checked import ConfigError, InputError
from ..config import Config, as_dict
from ..hub.native import write_drafter
from ..modeling.drafter import Drafter
from .distributed import World, like, whole
from .optim import AnyOptimizer

FREE = {
    "out", "train.log_every", "train.save_every", "train.keep_last", "train.device", "train.micro_batch",
    "train.sharding", "train.target_devices", "train.trackers", "train.compile", "train.checkpoint_layers", "validate",
}  # fmt: skip
"""Settings that may change between the parts of a resumed run."""
_LOG = logging.getLogger(__name__)


def folder(out: Path, step: int) -> Path:
    return out / "checkpoints" / f"step-{step:07d}"


def found(out: Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first."""
    return sorted(p for p in (out / "checkpoints").glob("step-*") if (p / "trainer.json").is_file())


# -- choosing one to go on from ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """A checkpoint to go on from, its settings found to be the run's."""

    path: Path
    step: int
    """Finished optimiser steps."""
    drafter: dict[str, Any]
    """The `deepspec` section of its config.json."""

    def check_data(self, identity: dict[str, Any]) -> None:
        """ConfigError where it was trained on other data than these, though the files are called the same."""
        old = {k: v for k, v in self.drafter["data"].items() if k in identity}
        if differences := differ(old, {k: identity[k] for k in old}):
            raise ConfigError(f"{self.path} was trained on other data ({'; '.join(differences)}); choose another `out`")


def choose(out: Path, resume: str, settings: dict[str, Any]) -> Saved | None:
    """What `resume` names: the newest checkpoint in `out` (auto), none (never), or a checkpoint's or run's folder.

    A folder elsewhere begins a run in `out`; once that has a newer checkpoint of its own (the same command was run
    again), that one is meant. InputError where there is none, ConfigError where settings differ, with the differences.
    """
    own = found(out)
    if resume == "never" or (resume == "auto" and not own):
        return None
    path = own[-1] if resume == "auto" else _named(Path(resume).expanduser())
    elsewhere = path.resolve() not in [p.resolve() for p in own]
    if elsewhere and own and own[-1].name > path.name:
        path = own[-1]
    trainer, config = (_read(path / name) for name in ("trainer.json", "config.json"))
    if differences := differ(_complete(trainer["settings"]), settings):
        raise ConfigError(
            f"{path.parent.parent} holds a run with other settings ({'; '.join(differences)}); "
            "go on with those (--set), choose another `out`, or --resume never to start over"
        )
    return Saved(path, int(trainer["step"]), config["deepspec"])


def _named(path: Path) -> Path:
    if (path / "trainer.json").is_file():
        return path
    if inside := found(path):
        return inside[-1]
    raise InputError(f"no checkpoint in {str(path)!r}; one is a folder such as OUT/checkpoints/step-0000500")


def _read(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{file} is truncated or damaged: {error}") from None


def _complete(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a run that began before some of them existed: those had their defaults."""
    for name, kind in typing.get_type_hints(Config).items():
        if dataclasses.is_dataclass(kind):
            with_default = [f for f in dataclasses.fields(kind) if f.default is not dataclasses.MISSING]
            settings = settings | {name: {f.name: as_dict(f.default) for f in with_default} | settings.get(name, {})}
    return settings


def differ(old: Any, new: Any, key: str = "") -> list[str]:
    """What changed between two settings trees, as 'a.b: 1 -> 2', save for keys that may change."""
    if key in FREE or old == new:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(k for k in new if k not in old)]
        return [d for k in keys for d in differ(old.get(k), new.get(k), f"{key}.{k}" if key else k)]
    return [f"{key}: {old!r} -> {new!r}"]


# -- writing and reading -----------------------------------------------------------------------------------------------


def save(
    out: Path, step: int, drafter: Drafter, optimizer: AnyOptimizer, settings: dict[str, Any], keep: int,
    provenance: dict[str, Any], world: World,
) -> None:  # fmt: skip
    """Write the checkpoint of `step` finished optimiser steps, then drop all but the newest `keep` and the best. All
    processes take part, the first one writes."""
    from safetensors.torch import save_file

    weights = collect(drafter.state_dict().items(), world)
    states = (
        (f"{name}|{key}", value)
        for name, p in drafter.named_parameters()
        if p in optimizer.state
        for key, value in optimizer.state[p].items()
    )
    tensors = collect(states, world)
    if not world.main:
        return
    with whole_dir(folder(out, step)) as temporary:
        write_drafter(drafter, temporary, {**provenance, "step": step}, weights)
        save_file(tensors, temporary / "optimizer.state")
        (temporary / "trainer.json").write_text(json.dumps({"step": step, "settings": settings}, indent=2) + "\n")
    prune(out, keep)


def collect(named: Iterable[tuple[str, Tensor]], world: World) -> dict[str, Tensor]:
    """Tensors that may be split, whole, in main memory of the first process; the others get none. All take part. One at
    a time, for what is split may not fit whole into a device."""
    found = {}
    for name, value in named:
        together = whole(value)
        if world.main:
            found[name] = together.cpu()
    return found


def load_optimizer(path: Path, drafter: Drafter, optimizer: AnyOptimizer) -> None:
    """Restore the optimiser in place, split as the drafter's parameters are."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path / "optimizer.state")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path / 'optimizer.state'} is truncated or damaged: {error}") from None
    states: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, what = key.split("|")
        states.setdefault(name, {})[what] = value
    for name, p in drafter.named_parameters():
        if name in states:
            # the step counter stays float32 on the CPU or the device, as the optimiser made it
            optimizer.state[p] = {
                k: like(v, p) if k != "step" else v.to(p.device) if p.is_cuda else v for k, v in states[name].items()
            }


# -- which ones stay ---------------------------------------------------------------------------------------------------


def best(out: Path) -> tuple[int, float] | None:
    """Step and score of the best checkpoint so far; None: none was marked."""
    file = out / "checkpoints" / "best.json"
    if not file.is_file():
        return None
    raw = _read(file)
    return int(raw["step"]), float(raw["score"])


def mark_best(out: Path, step: int, score: float) -> None:
    """Keep the checkpoint of `step`, whatever comes after it, until a better one is marked."""
    write_text(out / "checkpoints" / "best.json", json.dumps({"step": step, "score": score}) + "\n")


def prune(out: Path, keep: int) -> None:
    """Drop all checkpoints but the newest `keep` and the best."""
    marked = best(out)
    kept = folder(out, marked[0]) if marked else None
    for old in found(out)[:-keep]:
        if old != kept:
            drop(old)


def drop(path: Path) -> None:
    """Remove a checkpoint: first from sight, so that a kill leaves no part of one that looks whole."""
    hidden = path.with_name(f".{path.name}-dropped")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden)


def tidy(out: Path, start: int) -> None:
    """Before a run begins at `start` finished steps: remove what a kill left half written, and set aside checkpoints of
    later steps, which belong to another course of the run."""
    for half in (out / "checkpoints").glob(".step-*"):
        shutil.rmtree(half, ignore_errors=True)
    for later in found(out):
        if int(later.name.removeprefix("step-")) > start:
            aside = later.with_name(f"aside-{later.name}")
            shutil.rmtree(aside, ignore_errors=True)
            later.rename(aside)
            _LOG.info("set aside: %s", aside)
    marked = best(out)
    if marked and marked[0] > start:
        (out / "checkpoints" / "best.json").unlink()
