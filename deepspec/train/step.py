"""One optimiser step: passes, gradients of sums, one division, clipping, the update.

A step is whole or it is nothing: when a process is told to stop in the middle, or finds a number that is not finite,
the optimiser does not move.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch

from ..checked import RunError
from ..config import Config
from ..data.ahead import Ahead
from ..data.batches import Batches
from ..data.loader import Loader
from ..modeling.drafter import Drafter
from ..modeling.sizes import few
from . import compiling, optim
from .distributed import World, Wrapped, local, whole
from .objective import Metrics
from .precision import products
from .report import StepReport, add
from .share import Served, passes, seeds, served

_LOG = logging.getLogger(__name__)
_NAMED = 8
"""Samples named in a message."""


class Stepper:
    """Takes the optimiser from step to step. What a step does depends on its number and the config only."""

    def __init__(
        self, config: Config, world: World, drafter: Drafter, loader: Loader, source: Batches, total: int,
        stop: Callable[[], bool],
    ) -> None:  # fmt: skip
        """stop: whether this process was told to stop; asked between passes."""
        self.config, self.world, self.drafter = config, world, drafter
        self.loader, self.source, self.total, self.stop = loader, source, total, stop
        self.ahead = Ahead(source)
        self.dtype = products(config.train, world.device)
        """Of the drafter's products."""
        if world.device.type == "cuda":
            if compiling.wanted(config.train.compile, world.device):
                most = config.data.pack_tokens or config.data.max_length
                source.width = functools.partial(compiling.width, most=most)
        elif self.dtype == torch.bfloat16:
            source.width = few
        unused = drafter.has_confidence and not config.loss.confidence
        module = compiling.objective(drafter, config.loss, config.train.compile, world.device)
        self.wrapped = Wrapped(module, world, config.train.sharding, unused=unused)
        self.optimizer = optim.build(drafter, config.train)
        self.micro_batch = config.train.micro_batch
        """Sequences of a pass: the config's, or fewer once memory ran out."""
        self.stopping = False
        """Whether any process was told to stop, as of the last step; all processes agree."""

    def step(self, step: int) -> StepReport | None:
        """Optimiser step `step` (from 0) of `total`; None where it was given up to stop. RunError where loss or
        gradient is not finite, or memory does not suffice; the weights are then those of the step before."""
        train, began, waited = self.config.train, time.perf_counter(), self.ahead.waited
        lr = optim.learning_rate(step, self.total, train)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        whole_step = served(self.loader, step)
        self.drafter.train()
        sums, finished = self._agree(*self._accumulate(step, whole_step))
        if not finished:
            self.optimizer.zero_grad(set_to_none=True)
            return None
        params = [p for p in self.drafter.parameters() if p.grad is not None]
        grads = [p.grad for p in params if p.grad is not None]
        # gradients of sums, averaged over processes; divided once by the weight of the whole step they are exact
        # whatever the passes and processes. Division and clipping are one pass over them.
        weight = sums["loss"][1].clamp(min=1e-8) / self.world.size
        norm = whole(torch.nn.utils.get_total_norm(grads)) / weight
        torch._foreach_mul_([local(g) for g in grads], (train.clip / (norm + 1e-6)).clamp(max=1) / weight)
        if not bool((norm + sums["loss"][0]).isfinite()):
            self._not_finite(step, whole_step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        tokens = self.source.tokens([s.picked for s in whole_step])
        seconds, waited = time.perf_counter() - began, self.ahead.waited - waited
        return StepReport(step + 1, self.total, lr, tokens, seconds, waited, norm, self.drafter, sums)

    def _accumulate(self, step: int, whole_step: list[Served]) -> tuple[Metrics, bool]:
        """All passes of this process: sums, and whether none was left out to stop. Where memory runs out it begins
        again with fewer sequences a pass."""
        while True:
            shares = passes(whole_step, self.world.rank, self.world.size, self.micro_batch)
            sums: Metrics = {}
            finished, n = True, 0
            try:
                for n, share in enumerate(shares):
                    last = n == len(shares) - 1
                    if n and self.stop() and not (last and self.world.size > 1):  # in the last one, others wait
                        finished = False
                    else:
                        add(sums, self._pass(share, last=last, following=self._following(shares, n, step)))
                return sums, finished
            except RuntimeError as error:
                self._shrink(error, step, waited_for=self.world.size > 1 and n == len(shares) - 1)
            self.optimizer.zero_grad(set_to_none=True)
            gc.collect()
            if self.world.device.type == "cuda":
                torch.cuda.empty_cache()

    def _following(self, shares: list[list[Served]], n: int, step: int) -> list[Served]:
        """What this process serves after pass n of a step; none after the last step."""
        if n + 1 < len(shares):
            return shares[n + 1]
        if step + 1 == self.total:
            return []
        return passes(served(self.loader, step + 1), self.world.rank, self.world.size, self.micro_batch)[0]

    def _pass(self, share: list[Served], *, last: bool, following: Sequence[Served] = ()) -> Metrics:
        """Forward and backward of some sequences: gradients of sums, added to what is there."""
        batch = self.ahead.batch([s.picked for s in share])
        if following:
            self.ahead.expect([s.picked for s in following])
        if share[0].idle:
            batch = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
        with self.wrapped.adding(last=last):
            with self._autocast():
                loss, weight, metrics = self.wrapped.module(
                    batch, seeds=seeds(self.config.seed, share).to(self.world.device)
                )
            loss.backward()
        return {**metrics, "loss": (loss.detach(), weight)}

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.world.device.type, dtype=self.dtype)

    def _agree(self, sums: Metrics, finished: bool) -> tuple[Metrics, bool]:
        """Sums over all processes, and whether all of them finished the step; one all-reduce."""
        told = self.stop()
        if self.world.size == 1:
            self.stopping = told
            return sums, finished
        values = [x.double() for pair in sums.values() for x in pair]
        flags = values[0].new_tensor([told, not finished])
        flat = self.world.sum(torch.cat([flags, torch.stack(values)]))
        self.stopping, unfinished = bool(flat[0]), bool(flat[1])
        pairs = flat[2:].float().view(-1, 2).unbind()
        return {name: (pair[0], pair[1]) for name, pair in zip(sums, pairs)}, not unfinished

    def _shrink(self, error: RuntimeError, step: int, *, waited_for: bool) -> None:
        """Half the sequences a pass from now on, where `error` is of memory; raises where that cannot help."""
        from accelerate.utils.memory import should_reduce_batch_size

        if not should_reduce_batch_size(error):
            raise error
        old, new = self.micro_batch, -(-self.micro_batch // 2)
        if old == 1:
            raise RunError(
                f"step {step + 1}: out of memory with one sequence a pass; lower data.max_length, loss.chunk or the "
                "drafter's anchors, or split the target (train.target_devices, train.target_bits)"
            ) from error
        if waited_for:  # the others are in an exchange of gradients that this process cannot join again
            raise RunError(
                f"step {step + 1}: out of memory in process {self.world.rank} with {old} sequences a pass; the same "
                f"command with train.micro_batch={new} goes on, with the same effective batch"
            ) from error
        self.micro_batch = new
        _LOG.warning(
            "step %d: out of memory with %d sequences a pass; %d from now on, the effective batch stays %d",
            step + 1, old, new, self.config.train.batch_size,
        )  # fmt: skip

    def _not_finite(self, step: int, whole_step: list[Served]) -> NoReturn:
        """Find the sequences that alone give a loss or gradient that is not finite, and say so."""
        found: list[str] = []
        for share in passes(whole_step, self.world.rank, self.world.size, 1):
            self.optimizer.zero_grad(set_to_none=True)
            loss, _ = self._pass(share, last=False)["loss"]
            grads = [p.grad for p in self.drafter.parameters() if p.grad is not None]
            if not all(bool(x.isfinite().all()) for x in (loss, *grads)):
                found += [self.source.rows.ids[i] for s in share for i in s.picked[1]]
        self.optimizer.zero_grad(set_to_none=True)
        found = self.world.gather(found)
        who = ", ".join(map(repr, found[:_NAMED])) + (f" and {len(found) - _NAMED} more" if len(found) > _NAMED else "")
        raise RunError(
            f"step {step + 1}: loss or gradient is not finite, "
            + (f"from sample {who}" if found else "from no sample alone")
            + "; the weights were left as they were"
        )
