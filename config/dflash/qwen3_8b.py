"""DFlash on Qwen3-8B: the target and data of dspark/qwen3_8b.py, the settings of qwen3_4b.py."""

from dataclasses import replace
from pathlib import Path

import deepspec

here = Path(__file__).parent
size, kind = (deepspec.load_config(f) for f in (here.parent / "dspark" / "qwen3_8b.py", here / "qwen3_4b.py"))
config = replace(
    size,
    drafter=kind.drafter,
    loss=kind.loss,
    out=Path("runs/qwen3_8b/dflash"),
)
