"""Gemma 3: sandwich norms around (1 + w), query-key norms, its own attention scale, scaled embeddings.

A draft block copies the full-attention layers: their rotary, no window.
"""

from typing import Any

from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

from ..spec import BlockSpec
from . import Family, refuse_bidirectional, rope_items, rotary


def read(config: Any) -> Family:
    refuse_bidirectional(config)
    inv_freq, factor = rotary(config, Gemma3RotaryEmbedding, "full_attention")
    return Family(
        BlockSpec(
            dim=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            mlp_dim=config.intermediate_size,
            act=config.hidden_activation,
            norm_eps=config.rms_norm_eps,
            norm_offset=1.0,
            inv_freq=inv_freq,
            rope_factor=factor,
            attn_scale=config.query_pre_attn_scalar**-0.5,
            sandwich=True,
            max_positions=config.max_position_embeddings,
            rope=rope_items(config),
        ),
        softcap=config.final_logit_softcapping,
        embed_scale=config.hidden_size**0.5,
    )
