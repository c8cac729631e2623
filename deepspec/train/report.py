"""What an optimiser step tells: the report a caller gets, and its row in metrics.jsonl."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..modeling.drafter import Drafter
from .objective import Metrics


@dataclass(frozen=True)
class StepReport:
    """What one optimiser step did."""

    step: int
    """Finished optimiser steps."""
    total_steps: int
    lr: float
    tokens: int
    """Tokens of the step's rows, prompts included."""
    seconds: float
    waited: float
    """Of these, seconds without a batch to work on; the target's passes are work."""
    grad_norm: Tensor = field(repr=False)
    drafter: Drafter = field(repr=False)
    sums: Metrics = field(repr=False)

    @functools.cached_property
    def metrics(self) -> dict[str, float]:
        """Averages: `loss`, the objective's metrics, `grad_norm`. One transfer from the device, at first use."""
        names = [n for n, (_, count) in self.sums.items()]
        stacked = torch.stack([x.float() for n in names for x in self.sums[n]] + [self.grad_norm.float()]).tolist()
        pairs = zip(names, stacked[0::2], stacked[1::2])
        return {n: s / c for n, s, c in pairs if c} | {"grad_norm": stacked[-1]}

    def row(self) -> dict[str, Any]:
        """Its line in metrics.jsonl."""
        return {
            "step": self.step,
            "lr": self.lr,
            **self.metrics,
            "tokens_per_second": self.tokens / self.seconds,
            "seconds": self.seconds,
            "data_seconds": self.waited,
        }


def add(sums: Metrics, more: Metrics) -> None:
    """Add (sum, count) pairs to `sums`, in place."""
    for name, (s, c) in more.items():
        before = sums.get(name)
        sums[name] = (s, c) if before is None else (before[0] + s, before[1] + c)
