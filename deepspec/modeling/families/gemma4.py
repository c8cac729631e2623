"""Gemma 4 (text, multimodal and unified): sandwich norms, attention scale 1, normed values that may be the keys' own
projection, proportional rotary, a stored number per layer, scaled embeddings, soft-capped logits.

A draft block copies the dense part of the full-attention layers; sliding ones have other head sizes.
"""

from typing import Any

from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

from ..spec import BlockSpec
from . import Family, refuse_bidirectional, rope_items, rotary

FULL = "full_attention"


def read(config: Any) -> Family:
    refuse_bidirectional(config)
    inv_freq, factor = rotary(config, Gemma4TextRotaryEmbedding, FULL)
    full = config.per_layer_config[FULL]
    return Family(
        BlockSpec(
            dim=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=full.num_key_value_heads,
            head_dim=full.head_dim,
            mlp_dim=config.intermediate_size,
            act=config.hidden_activation,
            norm_eps=config.rms_norm_eps,
            inv_freq=inv_freq,
            rope_factor=factor,
            attn_scale=1.0,
            sandwich=True,
            share_kv=config.attention_k_eq_v,
            norm_values=True,
            layer_scalar=True,
            max_positions=config.max_position_embeddings,
            rope=rope_items(config),
        ),
        softcap=config.final_logit_softcapping,
        embed_scale=config.hidden_size**0.5,
    )
