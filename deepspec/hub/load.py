"""A drafter from a directory, whichever of this field's formats it is in, checked against its target."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checked import InputError
from ..modeling import draft_vocab
from ..modeling.dflash import DFlashConfig
from ..modeling.drafter import Drafter, DrafterConfig
from ..modeling.dspark import DSparkConfig
from ..modeling.eagle3 import Eagle3Config
from ..modeling.families import read_family
from ..modeling.spec import BlockSpec
from . import block, eagle3
from .files import find_drafter, read_config, read_tensors

COPIES = {"embed_tokens.weight": "embedding", "lm_head.weight": "head"}
"""Copies of the target's tensors that other trainers save, and what they are called in Vocab."""


def load_drafter(path: str | Path, target: Any, *, dtype: str | torch.dtype = "target") -> Drafter:
    """A drafter from a directory or hub id, on the target's device, in its dtype (or in `dtype`).

    Reads DeepSpec's format, z-lab's DFlash and the formats of Eagle3. InputError where it is none, is broken, or
    belongs to another target.
    """
    folder = find_drafter(path)
    raw, tensors = eagle3.flat(read_config(folder)), read_tensors(folder)
    try:
        tensors = eagle3.rename(tensors)
        config = from_json(raw, set(tensors), target.num_layers)
        _check_target(str(path), raw, config, target)
        if isinstance(config, Eagle3Config):
            eagle3.check_target(raw, target.vocab)
        _check_copies(str(path), tensors, target, head=isinstance(config, Eagle3Config) or "d2t" in tensors)
        drafter = config.build(_spec_of(str(path), raw), draft_vocab.from_tensors(target.vocab, tensors))
    except InputError as error:
        named = str(error).startswith(f"drafter {str(path)!r}")
        raise error if named else InputError(f"drafter {str(path)!r}: {error}") from None
    expected = {name: tuple(value.shape) for name, value in drafter.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in tensors.items()}
    if expected != found:
        raise InputError(f"drafter {str(path)!r}: {_difference(expected, found)}")
    drafter.load_state_dict(tensors)
    kind = target.dtype if dtype == "target" else dtype
    return drafter.to(device=target.device, dtype=getattr(torch, kind) if isinstance(kind, str) else kind).eval()


def from_json(raw: dict[str, Any], keys: set[str], num_layers: int | None = None) -> DrafterConfig:
    """The drafter's settings from its config.json; `keys` are the names of its tensors, num_layers the target's."""
    kinds = {"dflash": DFlashConfig, "dspark": DSparkConfig, "eagle3": Eagle3Config}
    section = raw.get("deepspec")
    own = section.get("drafter") if isinstance(section, dict) else None
    if isinstance(own, dict):
        kind, settings = own.get("kind"), {k: v for k, v in own.items() if k != "kind"}
        if kind not in kinds:
            raise InputError(f"drafter kind {kind!r} is unknown; this version reads {', '.join(kinds)}")
        try:
            return kinds[kind](**settings)
        except TypeError as error:  # a setting of another version
            raise InputError(f"config.json, deepspec.drafter: {error}") from None
    if eagle3.is_eagle3(raw, keys):
        return eagle3.from_json(raw, keys, num_layers)
    return block.from_json(raw, keys)


def read_spec(raw: dict[str, Any]) -> BlockSpec:
    """The drafter's own block, from its config.json: its family, widths and rotary may differ from the target's."""
    from transformers import AutoConfig

    kind = str(raw.get("model_type"))
    kind = kind if kind.startswith("gemma") or kind == "llama" else "qwen3"
    skip = {"deepspec", "dflash_config", "architectures", "model_type", "auto_map", "torch_dtype", *eagle3.SECTIONS}
    fields = {k: v for k, v in raw.items() if k not in skip}
    if kind.startswith("gemma"):  # of a Gemma, the rotary of full attention is read, whatever the window
        rope = {k: v for k, v in (raw.get("rope_parameters") or {}).items() if isinstance(v, dict)}
        full = ["full_attention"] * raw["num_hidden_layers"]
        fields |= {"layer_types": full, "sliding_window": 512, "rope_parameters": rope or None}
    if fields.get("rope_parameters"):
        fields.pop("rope_scaling", None)
        fields.pop("rope_theta", None)
    block = read_family(AutoConfig.for_model(kind, **fields)).block
    return dataclasses.replace(block, target_layers=raw.get("num_target_layers") or 0)


def _spec_of(path: str, raw: dict[str, Any]) -> BlockSpec:
    from huggingface_hub.errors import StrictDataclassError

    try:
        return read_spec(raw)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise InputError(f"drafter {path!r}: config.json describes no block: {' '.join(str(error).split())}") from None


def _check_target(path: str, raw: dict[str, Any], config: DrafterConfig, target: Any) -> None:
    hidden = raw.get("target_hidden_size") or raw.get("hidden_size")
    if hidden != target.spec.dim:
        raise InputError(
            f"drafter {path!r} is for a target of hidden size {hidden}; {target.name!r} has {target.spec.dim}"
        )
    if raw.get("vocab_size") != target.vocab.size:
        raise InputError(
            f"drafter {path!r} is for a vocabulary of {raw.get('vocab_size')}; {target.name!r} has {target.vocab.size}"
        )
    config.check_target(num_layers=target.num_layers, vocab_size=target.vocab.size, special_ids={})


def _check_copies(path: str, tensors: dict[str, Tensor], target: Any, *, head: bool) -> None:
    """Take copies of the target's tensors out of `tensors`; warn where they are not the target's own. head: whether the
    drafter may have one of its own, which is left for draft_vocab."""
    for name, attribute in COPIES.items():
        if head and attribute == "head":
            continue
        copy = tensors.pop(name, None)
        if copy is None:
            continue
        own = getattr(target.vocab, attribute)
        if copy.shape != own.shape or not torch.equal(copy.to(own), own):
            warnings.warn(
                f"drafter {path!r} carries {name} that differs from the target's; the target's is used", stacklevel=3
            )


def _difference(expected: dict[str, Any], found: dict[str, Any]) -> str:
    parts = []
    if missing := sorted(expected.keys() - found.keys()):
        parts.append(
            f"missing {', '.join(missing[:3])}" + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        )
    if extra := sorted(found.keys() - expected.keys()):
        parts.append(f"unexpected {', '.join(extra[:3])}" + (f" and {len(extra) - 3} more" if len(extra) > 3 else ""))
    for name in sorted(expected.keys() & found.keys()):
        if expected[name] != found[name]:
            parts.append(f"{name} is {list(found[name])}, should be {list(expected[name])}")
            break
    return "tensors do not fit its config: " + "; ".join(parts)
