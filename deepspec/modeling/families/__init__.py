"""Target families: one small file each, which turns a Hugging Face config into plain numbers.

To add a family, write `families/<model_type>.py` with one function:

    def read(config) -> Family:
        return Family(block(config, RotaryEmbedding, kv_heads=..., head_dim=..., act=..., ...), softcap=None)

`config` is the text config of the model, RotaryEmbedding transformers' own class for it; `block` reads what all configs
call the same, and takes what is special about the family by name (see BlockSpec). Add a tiny config to TEXT in
tests/test_families.py: its laws then run over the new family.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, replace
from typing import Any

from ...checked import InputError
from ..spec import BlockSpec

ALIASES = {
    "qwen2": "llama",
    "mistral": "llama",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4",
}
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
    found: Family = family.read(config)
    return replace(found, block=replace(found.block, target_layers=config.num_hidden_layers))


def block(config: Any, rotary_class: type, layer_type: str | None = None, **own: Any) -> BlockSpec:
    """The block of a text config: sizes under their usual names, rotary frequencies (of layers of `layer_type`, where
    kinds of layers differ), and what is the family's own."""
    inv_freq, factor = rotary(config, rotary_class, layer_type)
    usual = dict(
        dim=config.hidden_size,
        heads=config.num_attention_heads,
        mlp_dim=config.intermediate_size,
        norm_eps=config.rms_norm_eps,
        inv_freq=inv_freq,
        rope_factor=factor,
        max_positions=config.max_position_embeddings,
        rope=rope_items(config),
    )
    return BlockSpec(**{**usual, **own})


def rotary(config: Any, cls: type, layer_type: str | None = None) -> tuple[tuple[float, ...], float]:
    """Inverse frequencies and the factor on cos and sin, from transformers' own module, so every scaling is right.
    `layer_type`: of these layers, where kinds of layers differ."""
    parameters = rope_parameters(config)
    if (parameters if layer_type is None else parameters[layer_type]).get("rope_type") == "dynamic":
        raise InputError("a target with dynamic rope scaling has no fixed frequencies to build a drafter from")
    module, prefix = cls(config), "" if layer_type is None else f"{layer_type}_"
    inv_freq, factor = getattr(module, f"{prefix}inv_freq"), getattr(module, f"{prefix}attention_scaling")
    return tuple(inv_freq.tolist()), float(factor)


def refuse_bidirectional(config: Any) -> None:
    """InputError for embedding models, whose text tokens look ahead; 'vision' leaves text causal."""
    if config.use_bidirectional_attention not in (None, False, "vision"):
        raise InputError(
            f"a {config.model_type} with use_bidirectional_attention writes no text; it cannot be a target"
        )


def rope_parameters(config: Any) -> dict[str, Any]:
    """transformers 5 keeps theta and scaling together here."""
    return dict(config.rope_parameters)


def rope_items(config: Any) -> tuple[tuple[str, str], ...]:
    """rope_parameters in a hashable form: (key, JSON value), sorted."""
    return tuple(sorted((key, json.dumps(value, sort_keys=True)) for key, value in rope_parameters(config).items()))
