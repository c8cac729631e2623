"""DFlash on SmolLM2-135M-Instruct: the target and data of dspark/smollm2_135m.py, the settings of tiny.py."""

from dataclasses import replace
from pathlib import Path

import deepspec

here = Path(__file__).parent
size, kind = (deepspec.load_config(f) for f in (here.parent / "dspark" / "smollm2_135m.py", here / "tiny.py"))
config = replace(
    size,
    drafter=replace(
        kind.drafter,
        block_size=size.drafter.block_size,
        draft_vocab_size=size.drafter.draft_vocab_size,
        target_layer_ids=size.drafter.target_layer_ids,
        mask_token_id=size.drafter.mask_token_id,
        num_anchors=size.drafter.num_anchors,
    ),
    loss=kind.loss,
    out=Path("runs/smollm2_135m/dflash"),
)
