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
        block_size=5,  # slots 6 and 7 are seldom reached, and cost as much to train and to verify
        target_layer_ids=(1, 8, 15, 22, 28),
        num_draft_layers=2,
        mask_token_id=4,  # <reponame>: a special token of its pre-training that chats never hold
        num_anchors=40,
        draft_vocab_size=8192,  # of 49,152: what answers use; the head is most of a step and of a draft
        markov_head_type="vanilla",
        markov_rank=64,
        confidence_stop_gradient=True,
    ),
    # The paper's loss: kl, which served the embedded target best, did not help here (CHANGELOG.md).
    loss=deepspec.LossConfig(ce=0.1, tv=0.9, confidence=1.0, slot_decay=exp(-1 / 4), chunk=512),
    data=deepspec.DataConfig(path=(str(cache_dir("smollm2-135m-answers.jsonl")),), max_length=512),
    # Few sequences are all that two cores can afford, and small steps make the most of them (CHANGELOG.md).
    train=deepspec.TrainConfig(lr=1.5e-3, epochs=4, batch_size=2, micro_batch=2, init="target", save_every=200),
    out=Path("runs/smollm2_135m/dspark"),
)
