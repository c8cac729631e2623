"""DFlash on Gemma 3 270M: the DSpark recipe with neither sequential nor confidence head, and cross-entropy only."""

from dataclasses import replace
from pathlib import Path

import deepspec

base = deepspec.load_config(Path(__file__).parents[1] / "dspark" / "gemma3_270m.py")
config = replace(
    base,
    drafter=deepspec.DFlashConfig(
        block_size=7, target_layer_ids=(1, 5, 8, 11, 15), num_draft_layers=2, mask_token_id=4, num_anchors=32
    ),
    loss=replace(base.loss, ce=1.0, tv=0.0, confidence=0.0),
    out=Path("runs/gemma3_270m/dflash"),
)
