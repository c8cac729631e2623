"""Gemma 3: sandwich norms around (1 + w), query-key norms, its own attention scale, scaled embeddings.

A draft block copies the full-attention layers: their rotary, no window.
"""

from typing import Any

from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

from . import Family, block, refuse_bidirectional


def read(config: Any) -> Family:
    refuse_bidirectional(config)
    own = block(
        config,
        Gemma3RotaryEmbedding,
        "full_attention",
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        act=config.hidden_activation,
        norm_offset=1.0,
        attn_scale=config.query_pre_attn_scalar**-0.5,
        sandwich=True,
    )
    return Family(own, softcap=config.final_logit_softcapping, embed_scale=config.hidden_size**0.5)
