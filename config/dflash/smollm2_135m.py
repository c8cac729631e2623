"""DFlash on SmolLM2-135M-Instruct, with the data, steps and seed of DSpark's recipe: the two can be compared."""

from dataclasses import replace
from pathlib import Path

import deepspec

dspark = deepspec.load_config(Path(__file__).parents[1] / "dspark" / "smollm2_135m.py")
config = replace(
    dspark,
    drafter=deepspec.DFlashConfig(
        block_size=dspark.drafter.block_size,
        target_layer_ids=dspark.drafter.target_layer_ids,
        num_draft_layers=dspark.drafter.num_draft_layers,
        mask_token_id=dspark.drafter.mask_token_id,
        num_anchors=dspark.drafter.num_anchors,
    ),
    loss=replace(dspark.loss, ce=1.0, kl=0.0, tv=0.0, confidence=0.0),
    out=Path("runs/smollm2_135m/dflash"),
)
