"""How long a round takes, by requests in flight and tokens verified: measured on the decoding loop itself, warm.

Letters: R requests in flight, G slots, B tokens in a verification batch, n rounds, k knots.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..modeling.drafter import Drafter
from ..modeling.target import Target
from ..sampling import Sampling
from .cost import Additive, StepsPerSecond
from .generate import stream
from .rounds import BUDGET, Enough, RoundLog, Time, supply

Array = np.ndarray[Any, Any]

OFF = -1
"""In the plan of a probe: a round without drafting."""
OFTEN = 3
"""How many times as often as a size rounds without drafting are measured: every size is held against them."""
WARMUP = 3
"""Rounds before the first that counts."""


@dataclass(frozen=True)
class Measured:
    """Median seconds of a round at R requests in flight."""

    requests: int
    plain: float
    """Without any drafter."""
    off: float
    """With a drafter that observes and does not draft."""
    step: dict[int, float]
    """Verified tokens B -> seconds of a round that drafts for all rows and verifies B."""


class Probe:
    """A schedule that verifies as many drafts as planned, spread over the rows as evenly as can be. Rounds of fewer
    than `requests` are none of the plan's: they draft, and verify nothing."""

    name = "probe"

    def __init__(self, plan: Sequence[int], requests: int) -> None:
        self.plan, self.requests, self.round, self._now = plan, requests, -1, 0

    def wants(self, active: Tensor) -> Tensor:
        self._now = 0
        if int(active.sum()) == self.requests:
            self.round += 1
            self._now = self.plan[min(self.round, len(self.plan) - 1)]
        return active & (self._now != OFF)

    def __call__(self, confidence: Tensor, active: Tensor, room: Tensor) -> Tensor:
        each, more = divmod(self._now, int(active.sum()))
        return torch.minimum(each + (active.cumsum(0) <= more).long(), room) * active


def measure(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    requests: int,
    *,
    repeats: int = 7,
    sizes: int = 8,
    sampling: Sampling | None = None,
    seed: int = 0,
    clock: Time = "wall",
    tick: Callable[[], object] = lambda: None,
) -> Measured:
    """Rounds of `requests` rows, with about `sizes` numbers of drafts from 0 to R * G, each `repeats` times, and with
    drafting off, OFTEN times that, in a random order after a warm-up. `tick` is called once a round. Prompts are taken
    in turn, and rounds that read one are left out."""
    slots = drafter.num_slots
    plan = planned(slots, requests, repeats, sizes, seed)

    def rounds(drafter: Drafter | None, schedule: Any, number: int) -> list[float]:
        ticked = 0

        def enough(log: RoundLog) -> bool:
            nonlocal ticked
            done = len(log.full(requests))
            if done > ticked:
                ticked = done
                tick()
            return done >= number

        log, asked = RoundLog(target.device, enough, clock), supply(prompts, requests, number)
        with contextlib.suppress(Enough):
            for _ in stream(
                target, drafter, asked, max_new_tokens=BUDGET, sampling=sampling, schedule=schedule,
                concurrency=requests, clock=log, on_round=log,
            ):  # fmt: skip
                pass
        return [r.seconds for r in log.complete(requests, number)]

    drafted = rounds(drafter, Probe(plan, requests), len(plan))
    plain = rounds(None, None, WARMUP + OFTEN * repeats)
    return found(requests, plan[WARMUP:], drafted[WARMUP:], plain[WARMUP:])


def planned(slots: int, requests: int, repeats: int, sizes: int = 8, seed: int = 0, warmup: int = WARMUP) -> list[int]:
    """What a probe of `requests` rows does in turn: after the warm-up each of about `sizes` numbers of drafts `repeats`
    times, and no drafting OFTEN times that, in a random order."""
    kinds = [*[OFF] * OFTEN, *np.unique(np.linspace(0, requests * slots, sizes).round().astype(int)).tolist()]
    order: list[int] = np.random.default_rng(seed).permutation(kinds * repeats).tolist()
    return [*[kinds[-1]] * warmup, *order]


def found(requests: int, plan: Sequence[int], drafted: Sequence[float], plain: Sequence[float]) -> Measured:
    """The medians of the seconds that a probe's rounds took, planned so, and of rounds without a drafter."""
    seconds = defaultdict(list)
    for kind, spent in zip(plan, drafted, strict=False):
        seconds[kind].append(spent)
    medians = {kind: float(np.median(spent)) for kind, spent in seconds.items()}
    off = medians.pop(OFF)
    return Measured(requests, float(np.median(plain)), off, {requests + k: s for k, s in sorted(medians.items())})


def number_of_rounds(slots: int, requests: int, repeats: int, sizes: int = 8) -> int:
    """How often `measure` ticks."""
    return 2 * WARMUP + repeats * (2 * OFTEN + min(sizes, requests * slots + 1))


def merged(measured: Sequence[Measured]) -> list[Measured]:
    """One for each number of requests: the medians of those measured at different times, in the same sizes."""
    medians = []
    for requests in sorted({m.requests for m in measured}):
        same = [m for m in measured if m.requests == requests]
        plain, off = (statistics.median(getattr(m, name) for m in same) for name in ("plain", "off"))
        step = {b: statistics.median(m.step[b] for m in same) for b in same[0].step}
        medians.append(Measured(requests, plain, off, step))
    return medians


def additive(measured: Sequence[Measured]) -> tuple[Additive, float]:
    """The additive cost that fits the measurements best in relative terms, and its largest relative error.

    theta is convex, linear between knots, one for each power of two in between the smallest and the largest batch:
    as smooth as few measurements justify, and what bends the other way would trap a schedule that stops early.
    """
    measured = sorted(measured, key=lambda m: m.requests)
    points = [(i, b, s) for i, m in enumerate(measured) for b, s in m.step.items()]
    tokens = np.array([b for _, b, _ in points], dtype=np.float64)
    seconds = np.array([s for _, _, s in points])
    low, high = tokens.min(), tokens.max()
    knots = np.unique([low, *2.0 ** np.arange(np.ceil(np.log2(low)), np.log2(high)), high])
    # more requests or more tokens are never quicker, nor is the next token ever cheaper: what says so is noise
    level = np.array([[float(i >= j) for j in range(len(measured))] for i, _, _ in points])  # [n, R]
    bends = (tokens[:, None] - knots[:-1]).clip(0)  # [n, k - 1]
    solved = nonnegative(np.hstack([level, bends]) / seconds[:, None], np.ones(len(points)))
    jumps, slopes = solved[: len(measured)], solved[len(measured) :]
    alpha = np.concatenate([[0.0], jumps[1:].cumsum()])
    theta = max(jumps[0], 1e-9) + (knots[:, None] - knots[:-1]).clip(0) @ slopes
    bias = float(theta[0]) / 2
    cost = Additive(
        bias_seconds=bias,
        bs_probes=tuple(m.requests for m in measured),
        alpha_seconds=tuple(alpha.tolist()),
        m_probes=tuple(int(k) for k in knots),
        theta_seconds=tuple((theta - bias).tolist()),
    )
    # so that a round without drafting costs what was measured
    draft = [max(float(cost.step(m.requests, np.array([m.requests]))[0]) - m.off, 0.0) for m in measured]
    cost = dataclasses.replace(cost, draft_seconds=tuple(draft))
    fitted = np.array([cost.step(measured[i].requests, np.array([b]))[0] for i, b, _ in points])
    return cost, float(np.abs(fitted / seconds - 1).max())


def nonnegative(a: Array, b: Array) -> Array:
    """The x >= 0 [k] of the least |a x - b|, a [n, k], b [n] (Lawson and Hanson's active set)."""
    x, free = np.zeros(a.shape[1]), np.zeros(a.shape[1], dtype=bool)
    least = 1e-10 * np.abs(a.T @ b).max()
    while True:
        pull = np.where(free, -np.inf, a.T @ (b - a @ x))
        if not pull.max() > least:
            return x
        free[pull.argmax()] = True
        while True:
            best = np.zeros_like(x)
            best[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            below = free & (best <= 0)
            if not below.any():
                break
            # as far towards it as all stay above 0; who gets there is held
            x = x + (x[below] / (x[below] - best[below])).min() * (best - x)
            free &= x > 1e-12 * np.abs(x).max()
            x[~free] = 0.0
        x = best


def table(cost: Additive) -> StepsPerSecond:
    """The same as steps per second by batch tokens alone, at the most requests profiled that such a batch can hold."""
    tokens = sorted({*cost.m_probes, *cost.bs_probes})
    most = [max((r for r in cost.bs_probes if r <= b), default=cost.bs_probes[0]) for b in tokens]
    return StepsPerSecond(
        sample_batch_tokens=tuple(tokens),
        sample_steps_per_sec=tuple(float(1 / cost.step(r, np.array([b]))[0]) for r, b in zip(most, tokens)),
        max_batch_tokens=tokens[-1],
    )
