"""Eagle3 on the embedded target: minutes on two cores."""

from pathlib import Path

import deepspec
from deepspec import tiny

config = deepspec.Config(
    target=tiny.NAME,
    drafter=deepspec.Eagle3Config(block_size=7, target_layer_ids=(0, 2, 4)),
    loss=deepspec.LossConfig(kl=1.0, slot_decay=0.8, reduce="document"),
    # python -m deepspec.data answers --target deepspec/tiny --prompts .../prompts_train.jsonl --out .../answers.jsonl
    data=deepspec.DataConfig(path=(str(tiny.target_dir() / "answers.jsonl"),), max_length=256),
    train=deepspec.TrainConfig(
        lr=2e-3, max_steps=560, batch_size=8, micro_batch=8, target_dtype="bfloat16", save_every=140
    ),
    out=Path("runs/tiny/eagle3"),
)
