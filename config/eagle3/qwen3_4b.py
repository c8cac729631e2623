"""Eagle3 on Qwen3-4B with the paper's settings: seven unrolled steps, kl, target, layers and data of DSpark's recipe.

Without q/k norms, unlike DeepSpec's own checkpoints: SGLang and most of vLLM load no others; qk_norm=True is the
paper's.
"""

from dataclasses import replace
from pathlib import Path

import deepspec

base = deepspec.load_config(Path(__file__).parents[1] / "dspark" / "qwen3_4b.py")
config = replace(
    base,
    drafter=deepspec.Eagle3Config(block_size=7, target_layer_ids=base.drafter.target_layer_ids),
    loss=replace(base.loss, ce=0.0, kl=1.0, tv=0.0, confidence=0.0, slot_decay=0.8, reduce="document"),
    out=Path("runs/qwen3_4b/eagle3"),
)
