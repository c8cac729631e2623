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
        confidence_stop_gradient=True,
    ),
    # In two minutes of training the target's whole distribution (kl) teaches more than the paper's 0.1 ce + 0.9 tv:
    # CHANGELOG.md has the figures.
    loss=deepspec.LossConfig(ce=0.1, kl=1.0, tv=0.5, confidence=1.0, slot_decay=exp(-1 / 4)),
    # The target's answers at the temperatures it will be served with: mostly 1, some 0 (scripts/quickstart.sh).
    data=deepspec.DataConfig(
        path=(str(tiny.target_dir() / "answers.jsonl"), str(tiny.target_dir() / "answers_greedy.jsonl")), max_length=256
    ),
    train=deepspec.TrainConfig(lr=4e-3, max_steps=560, batch_size=8, micro_batch=8, save_every=140),
    out=Path("runs/tiny/dspark"),
)
