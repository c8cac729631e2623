"""DFlash on Qwen3-8B: qwen3_4b.py with another target."""

from dataclasses import replace
from pathlib import Path

import deepspec

base = deepspec.load_config(Path(__file__).parent / "qwen3_4b.py")
config = replace(
    base,
    target="Qwen/Qwen3-8B",
    data=replace(base.data, path=("data/qwen3_8b.jsonl",)),
    out=Path("runs/qwen3_8b/dflash"),
)
