"""How long a round takes, by requests in flight and tokens verified: measured on the decoding loop itself, warm.

Letters: R requests in flight, G slots, B tokens in a verification batch, n rounds, k knots.
"""

from __future__ import annotations

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
from .closed_loop import serve
from .cost import Additive, StepsPerSecond
from .rounds import Time
from .throughput import ranked

Array = np.ndarray[Any, Any]

OFF = -1
"""In the plan of a probe: a round without drafting."""
OFTEN = 3
"""How many times as often as a size rounds without drafting are measured: every size is held against them."""
WARMUP = 3
"""Rounds before the first that counts."""


@dataclass(frozen=True)
class Measured:
    """Seconds of a round at R requests in flight, on the average."""

    requests: int
    plain: float
    """Without any drafter."""
    off: float
    """With a drafter that observes and does not draft."""
    step: dict[int, float]
    """Verified tokens B -> seconds of a round that drafts for all rows and verifies B."""


class Probe:
    """A schedule that verifies as many drafts as planned, those most likely to survive: rows get as uneven numbers of
    them as from schedules that choose. Rounds of fewer than `requests` are none of the plan's: they draft, and verify
    nothing."""

    name = "probe"

    def __init__(self, plan: Sequence[int], requests: int, tick: Callable[[], object] = lambda: None) -> None:
        """`tick` is called once a round of the plan's."""
        self.plan, self.requests, self.round, self._now, self._tick = plan, requests, -1, 0, tick

    def wants(self, active: Tensor) -> Tensor:
        self._now = 0
        if int(active.sum()) == self.requests:
            self.round += 1
            self._now = self.plan[min(self.round, len(self.plan) - 1)]
            if self.round < len(self.plan):
                self._tick()
        return active & (self._now != OFF)

    def __call__(self, confidence: Tensor, active: Tensor, room: Tensor) -> Tensor:
        rows, _ = ranked(confidence.double().cpu().numpy(), torch.where(active, room, 0).numpy())
        return torch.from_numpy(np.bincount(rows[: self._now], minlength=len(active)))


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
    drafting off, OFTEN times that, in a random order after a warm-up; in turn with rounds of plain decoding. `tick` is
    called once a round. Prompts are taken in turn, and rounds that read one are left out."""
    plan = planned(drafter.num_slots, requests, repeats, sizes, seed)
    contenders = {"drafted": (drafter, Probe(plan, requests, tick)), "plain": (None, None)}
    seen = serve(
        target, contenders, prompts, requests, rounds=len(plan) - WARMUP, warmup=WARMUP,
        sampling=sampling or Sampling(), seed=seed, clock=clock,
    )  # fmt: skip
    drafted, plain = ([r.seconds for r in seen[name]] for name in contenders)
    return found(requests, plan[WARMUP:], drafted, plain)


def planned(slots: int, requests: int, repeats: int, sizes: int = 8, seed: int = 0, warmup: int = WARMUP) -> list[int]:
    """What a probe of `requests` rows does in turn: after the warm-up each of about `sizes` numbers of drafts `repeats`
    times, and no drafting OFTEN times that, in a random order. `measure` ticks once for each."""
    kinds = [*[OFF] * OFTEN, *np.unique(np.linspace(0, requests * slots, sizes).round().astype(int)).tolist()]
    order: list[int] = np.random.default_rng(seed).permutation(kinds * repeats).tolist()
    return [*[kinds[-1]] * warmup, *order]


def found(
    requests: int,
    plan: Sequence[int],
    drafted: Sequence[float],
    plain: Sequence[float],
    average: Callable[[Sequence[float]], Any] = statistics.median,
) -> Measured:
    """The averages of the seconds that a probe's rounds took, planned so, and of rounds without a drafter."""
    seconds = defaultdict(list)
    for kind, spent in zip(plan, drafted, strict=False):
        seconds[kind].append(spent)
    averages = {kind: float(average(spent)) for kind, spent in seconds.items()}
    off = averages.pop(OFF)
    return Measured(requests, float(average(plain)), off, {requests + k: s for k, s in sorted(averages.items())})


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
