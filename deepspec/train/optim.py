"""The optimiser and its learning rate."""

import math

import torch
from torch import nn

from ..config import TrainConfig


def build(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; norms, biases and other vectors are not decayed."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), fused=True)


def learning_rate(step: int, total: int, config: TrainConfig) -> float:
    """Of step 0 <= step < total: linear from 0 over the warm-up, then a cosine to 0."""
    warmup = round(config.warmup * total)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    return config.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
