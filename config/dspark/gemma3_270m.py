"""DSpark on Gemma 3 270M, a real target that fits two cores. `scripts/get_gemma3_270m.sh` puts it in its place.

Not in the paper: small, as for SmolLM2; five layers would be over a quarter of the target's 18.
"""

from dataclasses import replace
from pathlib import Path

import deepspec
from deepspec.cache import cache_dir

base = deepspec.load_config(Path(__file__).parent / "qwen3_4b.py")
config = replace(
    base,
    target=str(cache_dir("gemma3-270m")),
    drafter=replace(
        base.drafter,
        block_size=5,
        target_layer_ids=(1, 5, 8, 11, 15),
        num_draft_layers=2,
        mask_token_id=4,  # <mask>: in Gemma's vocabulary, in none of its texts
        num_anchors=40,
        draft_vocab_size=16384,  # of 262,144
        markov_rank=64,
    ),
    loss=replace(base.loss, chunk=64),
    data=replace(base.data, path=(str(cache_dir("gemma3-270m-answers.jsonl")),), max_length=512, thinking="auto"),
    train=replace(
        base.train, lr=1.5e-3, epochs=4, batch_size=2, micro_batch=2, init="target", precision="auto", save_every=200
    ),
    out=Path("runs/gemma3_270m/dspark"),
)
