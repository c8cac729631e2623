"""Llama and what is built like it (Mistral, Qwen2, SmolLM2): pre-norm residual, rotary with or without scaling."""

from typing import Any

from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..spec import BlockSpec
from . import Family, rope_items, rotary


def read(config: Any) -> Family:
    inv_freq, factor = rotary(config, LlamaRotaryEmbedding)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Family(
        BlockSpec(
            dim=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            mlp_dim=config.intermediate_size,
            act=config.hidden_act,
            norm_eps=config.rms_norm_eps,
            inv_freq=inv_freq,
            rope_factor=factor,
            attn_scale=head_dim**-0.5,
            max_positions=config.max_position_embeddings,
            rope=rope_items(config),
        )
    )
