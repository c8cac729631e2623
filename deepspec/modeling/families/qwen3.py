"""Qwen3: pre-norm residual, plain rotary, a head_dim of its own."""

from typing import Any

from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from ..spec import BlockSpec
from . import Family, rope_items, rotary


def read(config: Any) -> Family:
    inv_freq, factor = rotary(config, Qwen3RotaryEmbedding)
    return Family(
        BlockSpec(
            dim=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            mlp_dim=config.intermediate_size,
            act=config.hidden_act,
            norm_eps=config.rms_norm_eps,
            inv_freq=inv_freq,
            rope_factor=factor,
            attn_scale=config.head_dim**-0.5,
            max_positions=config.max_position_embeddings,
            rope=rope_items(config),
        )
    )
