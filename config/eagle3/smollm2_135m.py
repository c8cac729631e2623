"""Eagle3 on SmolLM2-135M-Instruct: the target and data of dspark/smollm2_135m.py, the settings of tiny.py."""

from dataclasses import replace
from pathlib import Path

import deepspec

here = Path(__file__).parent
size, kind = (deepspec.load_config(f) for f in (here.parent / "dspark" / "smollm2_135m.py", here / "tiny.py"))
config = replace(
    size,
    drafter=replace(kind.drafter, target_layer_ids=size.drafter.target_layer_ids),
    loss=kind.loss,
    out=Path("runs/smollm2_135m/eagle3"),
)
