"""Gemma 4 (text, multimodal and unified): sandwich norms, attention scale 1, normed values that may be the keys' own
projection, proportional rotary, a stored number per layer, scaled embeddings, soft-capped logits.

A draft block copies the dense part of the full-attention layers; sliding ones have other head sizes.
"""

from typing import Any

from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

from . import Family, block, refuse_bidirectional

FULL = "full_attention"


def read(config: Any) -> Family:
    refuse_bidirectional(config)
    full = config.per_layer_config[FULL]
    own = block(
        config,
        Gemma4TextRotaryEmbedding,
        FULL,
        kv_heads=full.num_key_value_heads,
        head_dim=full.head_dim,
        act=config.hidden_activation,
        attn_scale=1.0,
        sandwich=True,
        share_kv=config.attention_k_eq_v,
        norm_values=True,
        layer_scalar=True,
    )
    return Family(own, softcap=config.final_logit_softcapping, embed_scale=config.hidden_size**0.5)
