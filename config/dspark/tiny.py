"""DSpark on the embedded target: minutes on two cores. `scripts/quickstart.sh` runs it from nothing."""

from math import exp
from pathlib import Path

import deepspec
from deepspec import tiny

config = deepspec.Config(
    target=tiny.NAME,
    drafter=deepspec.DSparkConfig(
        block_size=7,
        target_layer_ids=(0, 2, 4),
        num_draft_layers=2,
        mask_token_id=tiny.MASK_ID,
        num_anchors=24,
        markov_head_type="vanilla",
        markov_rank=64,
    ),
    loss=deepspec.LossConfig(ce=0.1, tv=0.9, confidence=1.0, slot_decay=exp(-1 / 4)),
    # python -m deepspec.data answers --target deepspec/tiny --prompts .../prompts_train.jsonl --out .../answers.jsonl
    data=deepspec.DataConfig(path=(str(tiny.target_dir() / "answers.jsonl"),), max_length=256),
    train=deepspec.TrainConfig(
        lr=2e-3, max_steps=560, batch_size=8, micro_batch=8, target_dtype="bfloat16", save_every=140
    ),
    out=Path("runs/tiny/dspark"),
)
