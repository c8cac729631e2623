"""The optimiser and its learning rate."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..config import TrainConfig


class Joint:
    """Several optimisers over different parameters that look like one: their groups in a row and one state."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        self.param_groups: list[dict[str, Any]] = [group for part in parts for group in part.param_groups]
        self.state = parts[0].state
        for part in parts:
            part.state = self.state  # keyed by parameter, so the parts cannot meet in it

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)


AnyOptimizer = torch.optim.Optimizer | Joint


def build(model: nn.Module, config: TrainConfig) -> AnyOptimizer:
    """AdamW over the trainable parameters (norms, biases and other vectors are not decayed); with 'muon', Muon over
    the matrices of the layers and AdamW over the rest."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if config.optimizer == "adamw":
        return _adamw([p for _, p in named], config)
    inner = {name for name, p in named if name.startswith("layers.") and p.dim() == 2}
    # match_rms_adamw: an update's size is AdamW's, so one learning rate serves both
    muon = torch.optim.Muon(
        [p for name, p in named if name in inner],
        lr=config.lr,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return Joint(_adamw([p for name, p in named if name not in inner], config), muon)


def _adamw(parameters: list[Tensor], config: TrainConfig) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), fused=True)


def learning_rate(step: int, total: int, config: TrainConfig) -> float:
    """Of step 0 <= step < total: linear from 0 over the warm-up, then a cosine to 0."""
    warmup = round(config.warmup * total)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    return config.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
