"""The dtype of the drafter's products in training."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..config import Config, TrainConfig
from ..modeling.devices import quick_dtype


def products(train: TrainConfig, device: torch.device) -> torch.dtype:
    """bfloat16 (under autocast) or float32; 'auto' is what the device computes quickly in."""
    if train.precision == "auto":
        return quick_dtype(device)
    return torch.bfloat16 if train.precision == "bf16" else torch.float32


def settled(config: Config, device: torch.device) -> Config:
    """With 'auto' said: a run that goes on elsewhere goes on in the same precision, or is told that it cannot."""
    half = products(config.train, device) == torch.bfloat16
    return replace(config, train=replace(config.train, precision="bf16" if half else "fp32"))
