"""What the embedded target is called, depends on, and where it is kept."""

import dataclasses
import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..cache import cache_dir
from ..checked import Checked

NAME = "deepspec/tiny"
SPECIAL_TOKENS = ("<|endoftext|>", "<|pad|>", "<|mask|>", "<|user|>", "<|assistant|>", "<|end|>")
ENDOFTEXT_ID, PAD_ID, MASK_ID, USER_ID, ASSISTANT_ID, END_ID = range(6)
"""Their ids, at the start of the vocabulary. The mask is for drafters: the target never reads or writes it."""
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ ('<|assistant|>' if message['role'] == 'assistant' else '<|user|>') + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Recipe(Checked):
    """Everything the target depends on, beside the Python that provides the text."""

    version: int = 2
    """Raised when this file changes what a recipe means."""
    seed: int = 42
    vocab_size: int = 2048
    layers: int = 6
    hidden_size: int = 256
    intermediate_size: int = 768
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    source_chars: int = 4_000_000
    """Characters of standard-library source, beside the language reference."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Muon makes the better model (560 steps: held-out loss 3.30 against 4.13), which small drafters trained for two
    minutes cannot follow: DSpark's tau at temperature 0 was 2.2 on it."""
    steps: int = 560
    batch_size: int = 12
    length: int = 128
    """Tokens of a training sequence."""
    lr: float = 3e-3
    warmup_steps: int = 30
    prompt_tokens: int = 32
    train_prompts: int = 768
    held_out_prompts: int = 192
    measure_prompts: int = 64
    measure_tokens: int = 64
    """The greedy continuations whose distinct 4-gram rate is stored: held-out prompts, and new tokens of each."""


RECIPE = Recipe()


def target_dir(recipe: Recipe = RECIPE) -> Path:
    """Where the target of `recipe` is kept. Pure: neither builds nor looks.

    The name covers the recipe and the Python version, patch release and all, since the text differs between them: the
    same name is the same target, up to rounding.
    """
    text = json.dumps([dataclasses.asdict(recipe), sys.version_info[:3]])
    return cache_dir("tiny", f"v{recipe.version}-{hashlib.sha256(text.encode()).hexdigest()[:10]}")
