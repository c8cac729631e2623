"""One optimiser step: micro-batches, gradients of sums, one division, clipping, the update."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
from torch import Tensor

from ..config import Config
from ..data.batches import Batches, Picked
from ..data.loader import Loader
from ..modeling.drafter import Drafter
from . import optim
from .objective import Metrics, Objective
from .report import StepReport, add


class Stepper:
    """Takes the optimiser from step to step. What a step does depends on its number and the config only."""

    def __init__(
        self,
        config: Config,
        drafter: Drafter,
        optimizer: optim.AnyOptimizer,
        loader: Loader,
        source: Batches,
        total: int,
    ) -> None:
        self.config, self.drafter, self.optimizer = config, drafter, optimizer
        self.loader, self.source, self.total = loader, source, total
        self.objective = Objective(drafter, config.loss)

    def step(self, step: int) -> StepReport:
        """Optimiser step `step` (from 0) of `total`."""
        train, began = self.config.train, time.perf_counter()
        lr = optim.learning_rate(step, self.total, train)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        picked = self.loader.batch(step)
        self.drafter.train()
        sums: Metrics = {}
        for i in range(0, len(picked), train.micro_batch):
            part = picked[i : i + train.micro_batch]
            batch = self.source.batch(part)
            seeds = self._seeds(part, step * train.batch_size + i)
            with self._autocast(seeds.device):
                loss, weight, metrics = self.objective(batch, seeds=seeds)
            loss.backward()
            add(sums, {**metrics, "loss": (loss.detach(), weight)})
        params = [p for p in self.drafter.parameters() if p.grad is not None]
        # gradients of sums, divided once by the weight of the whole step: exact whatever the micro-batches
        torch._foreach_div_([p.grad for p in params if p.grad is not None], sums["loss"][1].clamp(min=1e-8))
        norm = torch.nn.utils.clip_grad_norm_(params, train.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        tokens = self.source.tokens(picked)
        return StepReport(step + 1, self.total, lr, tokens, time.perf_counter() - began, norm, self.drafter, sums)

    def _seeds(self, part: list[Picked], first: int) -> Tensor:
        """Anchor seeds [B] of sequences; `first`: sequences served before them."""
        device = self.source.device
        index = torch.tensor([i for i, _ in part], device=device)
        epoch = torch.tensor([(first + j) // len(self.loader.sequences) for j in range(len(part))], device=device)
        return (epoch << 40) + (index << 8) + (self.config.seed & 0xFF)

    def _autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        if self.config.train.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=torch.bfloat16)
