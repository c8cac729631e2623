"""DSpark on SmolLM2-135M-Instruct, a real target that fits two cores. `scripts/get_smollm2.sh` puts it in its place.

Answers come first: python -m deepspec.data answers --target (config.target) --prompts FILE --out (config.data.path)
"""

from math import exp
from pathlib import Path

import deepspec
from deepspec.cache import cache_dir

config = deepspec.Config(
    target=str(cache_dir("smollm2-135m-instruct")),
    drafter=deepspec.DSparkConfig(
        block_size=7,
        target_layer_ids=(1, 8, 15, 22, 28),
        num_draft_layers=2,
        mask_token_id=4,  # <reponame>: a special token of its pre-training that chats never hold
        num_anchors=32,
        markov_head_type="vanilla",
        markov_rank=64,
        confidence_stop_gradient=True,
    ),
    # The paper's loss: kl, which served the embedded target best, did not help here (CHANGELOG.md).
    loss=deepspec.LossConfig(ce=0.1, tv=0.9, confidence=1.0, slot_decay=exp(-1 / 4), chunk=512),
    data=deepspec.DataConfig(path=(str(cache_dir("smollm2-135m-answers.jsonl")),), max_length=512),
    train=deepspec.TrainConfig(
        lr=1.5e-3, epochs=4, batch_size=8, micro_batch=4, init="target", target_dtype="bfloat16", save_every=50
    ),
    out=Path("runs/smollm2_135m/dspark"),
)
