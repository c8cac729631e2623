"""Eagle3 on the embedded target, with the data, steps and seed of DSpark's recipe: the two can be compared."""

from dataclasses import replace
from pathlib import Path

import deepspec

dspark = deepspec.load_config(Path(__file__).parents[1] / "dspark" / "tiny.py")
config = replace(
    dspark,
    drafter=deepspec.Eagle3Config(block_size=7, target_layer_ids=dspark.drafter.target_layer_ids),
    loss=replace(dspark.loss, ce=0.0, kl=1.0, tv=0.0, confidence=0.0, slot_decay=0.8, reduce="document"),
    train=replace(dspark.train, lr=2e-3),
    out=Path("runs/tiny/eagle3"),
)
