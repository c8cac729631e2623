"""DSpark on Gemma 4 12B: qwen3_4b.py with the paper's layers and mask token for this target."""

from dataclasses import replace
from pathlib import Path

import deepspec

base = deepspec.load_config(Path(__file__).parent / "qwen3_4b.py")
config = replace(
    base,
    target="google/gemma-4-12B-it",
    drafter=replace(base.drafter, target_layer_ids=(5, 17, 29, 41, 46), mask_token_id=4),
    data=replace(base.data, path=("data/gemma4_12b.jsonl",)),
    out=Path("runs/gemma4_12b/dspark"),
)
