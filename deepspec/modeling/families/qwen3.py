"""Qwen3: pre-norm residual, plain rotary, a head_dim of its own."""

from typing import Any

from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from . import Family, block


def read(config: Any) -> Family:
    own = dict(kv_heads=config.num_key_value_heads, head_dim=config.head_dim, act=config.hidden_act)
    return Family(block(config, Qwen3RotaryEmbedding, attn_scale=config.head_dim**-0.5, **own))
