"""DFlash on Gemma 4 12B: the target and data of dspark/gemma4_12b.py, the settings of qwen3_4b.py."""

from dataclasses import replace
from pathlib import Path

import deepspec

here = Path(__file__).parent
size, kind = (deepspec.load_config(f) for f in (here.parent / "dspark" / "gemma4_12b.py", here / "qwen3_4b.py"))
config = replace(
    size,
    drafter=replace(
        kind.drafter, target_layer_ids=size.drafter.target_layer_ids, mask_token_id=size.drafter.mask_token_id
    ),
    loss=kind.loss,
    out=Path("runs/gemma4_12b/dflash"),
)
