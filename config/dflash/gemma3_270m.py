"""DFlash on Gemma 3 270M: the target and data of dspark/gemma3_270m.py, the settings of smollm2_135m.py."""

from dataclasses import replace
from pathlib import Path

import deepspec

here = Path(__file__).parent
size, kind = (deepspec.load_config(f) for f in (here.parent / "dspark" / "gemma3_270m.py", here / "smollm2_135m.py"))
config = replace(
    size,
    drafter=replace(
        kind.drafter,
        draft_vocab_size=size.drafter.draft_vocab_size,
        target_layer_ids=size.drafter.target_layer_ids,
        mask_token_id=size.drafter.mask_token_id,
    ),
    loss=kind.loss,
    out=Path("runs/gemma3_270m/dflash"),
)
