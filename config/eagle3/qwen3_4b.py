"""Eagle3 for Qwen3-4B with the paper's settings: seven unrolled steps, kl, the same target layers as the others.

Without q/k norms, unlike DeepSpec's own checkpoints: SGLang and most of vLLM load no others; qk_norm=True is the
paper's. Answers come first: python -m deepspec.data answers --target Qwen/Qwen3-4B --prompts FILE --out (data.path)
"""

from pathlib import Path

import deepspec

config = deepspec.Config(
    target="Qwen/Qwen3-4B",
    drafter=deepspec.Eagle3Config(block_size=7, target_layer_ids=(1, 9, 17, 25, 33)),
    loss=deepspec.LossConfig(kl=1.0, slot_decay=0.8, reduce="document"),
    data=deepspec.DataConfig(path=("data/qwen3_4b/answers.jsonl",), max_length=4096, thinking="off"),
    train=deepspec.TrainConfig(lr=6e-4, epochs=10, batch_size=512, micro_batch=1, warmup=0.04, precision="bf16"),
    out=Path("runs/qwen3_4b/eagle3"),
    seed=0,
)
