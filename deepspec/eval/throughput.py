"""Schedules that maximise tokens per second: the hardware-aware prefix scheduler (Algorithm 1) and its production form.

A round of R requests that verifies B tokens in one pass commits R + sum of the survivals of what was admitted, and
takes cost.step(R, B) seconds. Candidates are admitted in descending survival.

Lossless, because what decides on a token is known before the token is: a slot's survival depends on the tokens before
it, and the ranking puts a row's slots in their order, so nothing behind a refused slot is looked at. Budgets come from
earlier rounds alone; what was cut there says nothing about the next draft, whose uniforms are fresh. So does how far
confidences are believed: by what became of drafts that were verified.

Letters: B rows, G slots, R active rows, n candidates, H remembered proposals.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .cost import Cost
from .schedule import Schedule

Array = np.ndarray[Any, Any]

MEMORY, RECENT = 96, 32
"""Proposals of the past that say whether drafting still pays, and those that say whether it pays again: neighbouring
ones are alike, and a few bad ones should not end it."""
START, STOP = 1.04, 1.0
"""How much more than plain decoding drafting must promise to begin, and to go on: forecasts are a few percent off, and
who turns to and fro pays for it."""
KEEP, PRIOR = 0.98, 16.0
"""Of what verified drafts came to: how much still counts a round later; and how many drafts say beforehand that
confidences are right."""
PROBING, PROBE_ROUNDS, PROBE_ROWS = 0.01, 64, 16
"""While drafting does not pay, one row in so many gets a draft now and then, to see whether it does again: as often as
this share of the time allows, and at least once in so many rounds."""


def throughput(cost: Cost) -> Schedule:
    """Algorithm 1: admit while the expected throughput of this round strictly grows, stop at once where it does not."""
    return EarlyStop(cost)


def lagged(cost: Cost) -> Schedule:
    """The production variant: how many drafts are verified is the global optimum for the proposals of two rounds back,
    so a jagged cost does not trap it; which ones, the current ranking says."""
    return Lagged(cost)


def ranked(confidence: Array, room: Array) -> tuple[Array, Array]:
    """confidence [B, G], room [B] -> the rows [n] and survivals [n] of all slots that fit, in descending survival.

    A row's slots come in their order: survival never grows along a row, and equal ones keep it.
    """
    survival = confidence.cumprod(1)
    slots, rows = np.nonzero(np.arange(confidence.shape[1])[:, None] < room)  # slot by slot
    order = np.argsort(-survival[rows, slots], kind="stable")
    return rows[order], survival[rows, slots][order]


def rates(cost: Cost, requests: int, survival: Array, weight: float = 1.0) -> Array:
    """[n + 1] expected tokens a second with the first 0, 1, ..., n candidates verified, each standing for `weight`."""
    admitted = weight * np.arange(len(survival) + 1)
    tokens = requests + weight * np.concatenate([[0.0], survival.cumsum()])
    result: Array = tokens / cost.step(requests, requests + admitted)
    return result


def early_stop(rate: Array) -> int:
    """How far rates [n + 1] strictly grow from the first on."""
    return int((rate[1:] > rate[:-1]).cumprod().sum())


class History:
    """Survivals of earlier proposals and what became of them, and what they say about the next round."""

    def __init__(self, cost: Cost, memory: int, choose: Callable[[Array], int]) -> None:
        """choose: of the rates with 0, 1, ... candidates verified, the place of the one a schedule would take."""
        self.cost, self.memory, self.choose = cost, memory, choose
        self._rounds: deque[Array] = deque()
        self._expected = self._accepted = 0.0
        self._forecasts: dict[tuple[int, int], tuple[int, float]] = {}

    def add(self, survival: Array) -> None:
        """Remember a round's proposals [rows, G]; forget what is older than the last `memory` ones need."""
        self._rounds.append(survival)
        while sum(map(len, self._rounds)) - len(self._rounds[0]) - len(survival) >= self.memory:
            self._rounds.popleft()
        self._forecasts.clear()

    def settle(self, expected: float, accepted: int) -> None:
        """Of drafts that were verified, so many were to be accepted by their survivals, and so many were."""
        self._expected = KEEP * self._expected + expected
        self._accepted = KEEP * self._accepted + accepted
        self._forecasts.clear()

    @property
    def knows(self) -> bool:
        """Whether it holds as many proposals as it should."""
        return len(self._rounds) > 1 and sum(map(len, self._rounds)) >= self.memory

    def believed(self, survival: Array) -> Array:
        """Survivals as they turned out so far: in proportion, in the same order, at most 1."""
        trust = (PRIOR + self._accepted) / (PRIOR + self._expected)
        result: Array = np.minimum(trust * survival, 1.0)
        return result

    def forecast(self, requests: int, memory: int | None = None) -> tuple[int, float] | None:
        """Drafts that would be verified, over all requests, and the tokens a second with them by those of plain
        decoding; None without a history.

        The proposals of two rounds back and, up to the memory (None: all of it), those before stand for what `requests`
        would get.
        """
        past = list(self._rounds)[:-1]
        if not past or not requests:
            return None
        key = requests, self.memory if memory is None else memory
        if key not in self._forecasts:
            pool = np.concatenate(past)[-max(key[1], len(past[-1])) :]
            survival = -np.sort(-self.believed(pool), axis=None)
            weight = requests / len(pool)
            rate = rates(self.cost, requests, survival, weight)
            count = self.choose(rate)
            gain = float(rate[count]) * self.cost.plain(requests) / requests
            self._forecasts[key] = round(count * weight), gain
        return self._forecasts[key]


class _Scheduler:
    """What both have in common: the history, and drafting only where it says that it pays."""

    def __init__(self, cost: Cost, memory: int = MEMORY) -> None:
        self.cost, self.history = cost, History(cost, memory, self._choose)
        self._on, self._since, self._turn, self._expected = True, 0, 0, 0.0
        self._pauses: dict[int, float] = {}

    def wants(self, active: Tensor) -> Tensor:
        """Everybody while drafting pays; else, now and then, a few rows in turn (see `Choosy`)."""
        requests = int(active.sum())
        forecast = self.history.forecast(requests, None if self._on else RECENT)
        self._since += 1
        if forecast is None or not self.history.knows or forecast[1] > (STOP if self._on else START):
            self._on, self._since = True, 0
            return active
        self._on = False
        if requests not in self._pauses:
            self._pauses[requests] = self._pause(requests)
        if self._since < self._pauses[requests]:
            return torch.zeros_like(active)
        self._since, self._turn = 0, self._turn + 1
        return active & (torch.arange(len(active)) % PROBE_ROWS == self._turn % min(PROBE_ROWS, len(active)))

    def _pause(self, requests: int) -> float:
        """Rounds from one probe to the next. It costs about as much as a draft for everybody: what its rows have not
        read yet has to be, and what is drafted is verified."""
        plain = self.cost.plain(requests)
        draft = float(self.cost.step(requests, np.array([requests]))[0]) - plain
        return min(max(draft / plain / PROBING, 2.0), PROBE_ROUNDS)

    def __call__(self, confidence: Tensor, active: Tensor, room: Tensor) -> Tensor:
        values = confidence.double().cpu().numpy()
        here = active.cpu().numpy()
        drafted = here & (values > 0).any(1)
        rows, survival = ranked(values, np.where(drafted, room.cpu().numpy(), 0))
        count = self._admitted(int(here.sum()), self.history.believed(survival))
        self._expected = float(survival[:count].sum())
        if drafted.any():
            self.history.add(values[drafted].cumprod(1))
        return torch.from_numpy(np.bincount(rows[:count], minlength=len(values)))

    def settle(self, accepted: Sequence[int]) -> None:
        """What became of the round (see `Learning`)."""
        self.history.settle(self._expected, sum(accepted))

    def _admitted(self, requests: int, survival: Array) -> int:
        """How many of the ranked candidates are verified."""
        return early_stop(rates(self.cost, requests, survival))

    def _choose(self, rate: Array) -> int:
        raise NotImplementedError


class EarlyStop(_Scheduler):
    name = "throughput"

    def _choose(self, rate: Array) -> int:
        return early_stop(rate)


class Lagged(_Scheduler):
    name = "lagged"

    def _admitted(self, requests: int, survival: Array) -> int:
        forecast = self.history.forecast(requests)
        return super()._admitted(requests, survival) if forecast is None else min(forecast[0], len(survival))

    def _choose(self, rate: Array) -> int:
        return int(rate.argmax())
