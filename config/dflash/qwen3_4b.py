"""DFlash on Qwen3-4B: the DSpark recipe with neither sequential nor confidence head, and cross-entropy only."""

from dataclasses import replace
from pathlib import Path

import deepspec

base = deepspec.load_config(Path(__file__).parents[1] / "dspark" / "qwen3_4b.py")
config = replace(
    base,
    drafter=deepspec.DFlashConfig(
        block_size=7, target_layer_ids=(1, 9, 17, 25, 33), num_draft_layers=5, mask_token_id=151669
    ),
    loss=replace(base.loss, ce=1.0, tv=0.0, confidence=0.0),
    out=Path("runs/qwen3_4b/dflash"),
)
