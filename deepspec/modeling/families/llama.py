"""Llama and what is built like it (Mistral, Qwen2, SmolLM2): pre-norm residual, rotary with or without scaling."""

from typing import Any

from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from . import Family, block


def read(config: Any) -> Family:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    own = dict(kv_heads=config.num_key_value_heads, head_dim=head_dim, act=config.hidden_act)
    return Family(block(config, LlamaRotaryEmbedding, attn_scale=head_dim**-0.5, **own))
