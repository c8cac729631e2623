"""DeepSpec's own drafter format, which vLLM and SGLang read: config.json + model.safetensors.

config.json is a Qwen3-style config (block drafters have q/k norms on every family; Gemma blocks have a Gemma config)
plus the drafter's keys, plus a `deepspec` section with our own provenance. The target's embedding and head are never
written; where a checkpoint of another trainer carries copies of them, the target's own are used. A head of a drafter's
own (rows of a reduced vocabulary, Eagle3's trained ones) is kept. The keys of block drafters are in block.py, Eagle3's
in eagle3.py; load.py reads all of it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cache import whole_dir
from ..checked import InputError
from ..modeling import draft_vocab
from ..modeling.block import BlockConfig
from ..modeling.devices import dtype_name
from ..modeling.drafter import Drafter, DrafterConfig
from ..modeling.eagle3 import Eagle3Config
from ..modeling.spec import BlockSpec
from ..modeling.vocab import Vocab
from . import block, eagle3
from .files import read_config


def save_drafter(drafter: Drafter, path: Path, provenance: dict[str, Any]) -> None:
    """Write a drafter directory, all of it or nothing. InputError where anything but a drafter of ours is there."""
    if path.exists() and not _replaceable(path):
        raise InputError(f"{str(path)!r} exists and is no drafter directory; nothing of it will be overwritten")
    with whole_dir(path) as temporary:
        write_drafter(drafter, temporary, provenance)


def _replaceable(path: Path) -> bool:
    """Whether nothing would be lost: an empty directory, or one that holds a drafter we wrote and nothing else."""
    if not path.is_dir():
        return False
    names = {p.name for p in path.iterdir()}
    return not names or (names <= {"config.json", "model.safetensors"} and "deepspec" in read_config(path))


def write_drafter(
    drafter: Drafter, folder: Path, provenance: dict[str, Any], weights: dict[str, Tensor] | None = None
) -> None:
    """Write config.json and model.safetensors into an existing folder. `weights`: the drafter's own tensors where it
    holds only a part of them. InputError where `provenance` has a key that we use."""
    from safetensors.torch import save_file

    weights = drafter.state_dict() if weights is None else weights
    tensors = {name: value.detach().contiguous() for name, value in weights.items()}
    dtype = next(iter(tensors.values())).dtype
    tensors |= {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in draft_vocab.to_tensors(drafter.vocab).items()
    }
    config = to_json(drafter.config, drafter.spec, drafter.vocab, dtype=dtype)
    if taken := sorted(config["deepspec"].keys() & provenance.keys()):
        raise InputError(f"provenance may not be called {' or '.join(taken)}: that describes the drafter itself")
    config["deepspec"] |= provenance
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def to_json(config: DrafterConfig, spec: BlockSpec, vocab: Vocab, *, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of a drafter: its block, its kind's own keys, and ours."""
    model_type, style = _style(spec, vocab)
    if isinstance(config, Eagle3Config):
        window, own = None, eagle3.to_json(config, model_type, vocab)
    elif isinstance(config, BlockConfig):
        window, own = config.sliding_window, block.to_json(config, model_type, vocab)
    else:
        raise TypeError(f"no format for {type(config).__name__} yet")
    rope = {key: json.loads(value) for key, value in spec.rope}
    if window is not None and "full_attention" in rope:
        rope["sliding_attention"] = rope["full_attention"]  # layer types choose the mask here, not the rotary
    name = dtype_name(dtype)
    return {
        "dtype": name,
        "torch_dtype": name,
        "hidden_size": spec.dim,
        "target_hidden_size": vocab.dim,
        "num_target_layers": spec.target_layers or None,
        "num_hidden_layers": config.num_draft_layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.mlp_dim,
        "hidden_act": spec.act,
        "rms_norm_eps": spec.norm_eps,
        "vocab_size": vocab.size,
        "max_position_embeddings": spec.max_positions,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": ["sliding_attention" if window else "full_attention"] * config.num_draft_layers,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "tie_word_embeddings": False,
        **style,
        "rope_parameters": rope,
        "rope_theta": rope.get("rope_theta"),
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        **own,
        "deepspec": {"format": 1, "drafter": config_to_json(config)},
    }


def _style(spec: BlockSpec, vocab: Vocab) -> tuple[str, dict[str, Any]]:
    """The model_type that describes this block, and the keys it has beyond Qwen3's."""
    if not spec.sandwich:
        return "qwen3", {}
    gemma = {
        "hidden_activation": spec.act,
        "final_logit_softcapping": vocab.softcap,
        "use_bidirectional_attention": None,
    }
    if not spec.layer_scalar:
        return "gemma3_text", gemma | {"query_pre_attn_scalar": round(spec.attn_scale**-2)}
    return "gemma4_text", gemma | {
        "global_head_dim": spec.head_dim,
        "num_global_key_value_heads": spec.kv_heads,
        "attention_k_eq_v": spec.share_kv,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": False,
    }


def config_to_json(config: DrafterConfig) -> dict[str, Any]:
    return {"kind": type(config).__name__.removesuffix("Config").lower(), **dataclasses.asdict(config)}
