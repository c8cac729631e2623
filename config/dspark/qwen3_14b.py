"""DSpark on Qwen3-14B: qwen3_4b.py with another target of 40 layers."""

from dataclasses import replace
from pathlib import Path

import deepspec

base = deepspec.load_config(Path(__file__).parent / "qwen3_4b.py")
config = replace(
    base,
    target="Qwen/Qwen3-14B",
    drafter=replace(base.drafter, target_layer_ids=(1, 10, 19, 28, 37)),
    data=replace(base.data, path=("data/qwen3_14b.jsonl",)),
    out=Path("runs/qwen3_14b/dspark"),
)
