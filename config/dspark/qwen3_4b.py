"""DSpark on Qwen3-4B, as in Table 1 of the paper (arXiv 2607.05147).

Answers come first, by the target itself with Qwen3's recommended sampling:

    python -m deepspec.data answers --target Qwen/Qwen3-4B --prompts prompts.jsonl --out data/qwen3_4b.jsonl \
        --temperature 0.7 --top-p 0.8 --top-k 20 --max-new-tokens 4096 --thinking off
"""

from math import exp
from pathlib import Path

import deepspec

config = deepspec.Config(
    target="Qwen/Qwen3-4B",
    drafter=deepspec.DSparkConfig(
        block_size=7,
        target_layer_ids=(1, 9, 17, 25, 33),
        num_draft_layers=5,
        mask_token_id=151669,  # an embedding row that Qwen3's tokenizer does not use
        markov_head_type="vanilla",
        markov_rank=256,
    ),
    loss=deepspec.LossConfig(ce=0.1, tv=0.9, confidence=1.0, slot_decay=exp(-1 / 4), chunk=1024),
    data=deepspec.DataConfig(path=("data/qwen3_4b.jsonl",), max_length=4096, thinking="off"),
    train=deepspec.TrainConfig(lr=6e-4, epochs=10, batch_size=512, micro_batch=1, warmup=0.04, precision="bf16"),
    out=Path("runs/qwen3_4b/dspark"),
)
