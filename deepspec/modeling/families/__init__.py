"""Target families: one small file each, which turns a Hugging Face config into plain numbers.

To add a family, write `families/<model_type>.py` with one function:

    def read(config) -> Family:
        return Family(block=BlockSpec(dim=config.hidden_size, ...), softcap=None, embed_scale=None)

`config` is the text config of the model. `rotary(config, RotaryClass)` gives the rotary frequencies in the form every
supported transformers release computes them. The law tests in tests/test_target.py then run over it.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from typing import Any

from ...checked import InputError
from ..spec import BlockSpec

ALIASES = {"qwen2": "llama", "mistral": "llama"}
"""model_type -> family file, for architectures whose draft block another family already describes."""


@dataclass(frozen=True)
class Family:
    """What a target contributes to a drafter."""

    block: BlockSpec
    softcap: float | None = None
    """Logits are softcap * tanh(logits / softcap)."""
    embed_scale: float | None = None
    """Input embeddings are multiplied by this."""


def read_family(config: Any) -> Family:
    """The family of a Hugging Face config, found by its model_type. InputError names the file to add."""
    config = config.get_text_config()
    name = ALIASES.get(config.model_type, config.model_type)
    module = f"{__package__}.{name}"
    try:
        family = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise InputError(
            f"target family {config.model_type!r} is unknown; add deepspec/modeling/families/{name}.py "
            "(see deepspec/modeling/families/__init__.py)"
        ) from None
    return family.read(config)


def rotary(config: Any, cls: type) -> tuple[tuple[float, ...], float]:
    """Inverse frequencies and the factor on cos and sin, from transformers' own module, so every scaling is right."""
    if rope_parameters(config).get("rope_type") == "dynamic":
        raise InputError("a target with dynamic rope scaling has no fixed frequencies to build a drafter from")
    module = cls(config)
    return tuple(module.inv_freq.tolist()), float(module.attention_scaling)


def rope_parameters(config: Any) -> dict[str, Any]:
    """transformers 5 keeps theta and scaling together here."""
    return dict(config.rope_parameters)


def rope_items(config: Any) -> tuple[tuple[str, str], ...]:
    """rope_parameters in a hashable form: (key, JSON value), sorted."""
    return tuple(sorted((key, json.dumps(value)) for key, value in rope_parameters(config).items()))
