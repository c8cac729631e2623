"""Schedules that maximise tokens per second: the hardware-aware prefix scheduler (Algorithm 1) and its production form.

A round of R requests that verifies B tokens in one pass commits R + sum of the survivals of what was admitted, and
takes cost.step(R, B) seconds. Candidates are admitted in descending survival.

Lossless, because what decides on a token is known before the token is: a slot's survival depends on the tokens before
it, and the ranking puts a row's slots in their order, so nothing behind a refused slot is looked at. Budgets come from
earlier rounds alone; what was cut there says nothing about the next draft, whose uniforms are fresh.

Letters: B rows, G slots, R active rows, n candidates, H remembered proposals.
"""

from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .cost import Cost
from .schedule import Schedule

Array = np.ndarray[Any, Any]

MEMORY = 32
"""Proposals that the history holds at least: a single request's last one would be a poor forecast."""
MARGIN = 1.05
"""How much more than plain decoding drafting must promise: profiles and forecasts are a few percent off."""
PROBE_ROUNDS, PROBE_ROWS = 32, 16
"""While drafting does not pay, once in so many rounds one row in so many gets a draft, to see whether it does again."""


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


class History:
    """Survivals of earlier proposals, and what they say about the next round."""

    def __init__(self, cost: Cost, memory: int) -> None:
        self.cost, self.memory = cost, memory
        self._rounds: deque[Array] = deque()

    def add(self, survival: Array) -> None:
        """Remember a round's proposals [rows, G]; forget what is older than the last `memory` ones need."""
        self._rounds.append(survival)
        while sum(map(len, self._rounds)) - len(self._rounds[0]) - len(survival) >= self.memory:
            self._rounds.popleft()

    def budget(self, requests: int) -> int | None:
        """Drafts worth verifying, over all requests; 0 where drafting does not pay, None without a history.

        The proposals of two rounds back and, up to the memory, those before stand for what `requests` would get.
        """
        past = list(self._rounds)[:-1]
        if not past or not requests:
            return None
        pool = np.concatenate(past)[-max(self.memory, len(past[-1])) :]
        survival = -np.sort(-pool, axis=None)
        weight = requests / len(pool)
        rate = rates(self.cost, requests, survival, weight)
        best = int(rate.argmax())
        return round(best * weight) if rate[best] * self.cost.plain(requests) > MARGIN * requests else 0


class _Scheduler:
    """What both have in common: the history, and drafting only where it says that it pays."""

    def __init__(self, cost: Cost, memory: int = MEMORY) -> None:
        self.cost, self.history = cost, History(cost, memory)
        self._round = 0

    def wants(self, active: Tensor) -> Tensor:
        """Everybody while drafting pays; else, now and then, a few rows in turn (see `Choosy`)."""
        self._round += 1
        if self.history.budget(int(active.sum())) != 0:
            return active
        turn, rest = divmod(self._round, PROBE_ROUNDS)
        places = torch.arange(len(active))
        return active & (places % PROBE_ROWS == turn % min(PROBE_ROWS, len(active))) & (rest == 0)

    def __call__(self, confidence: Tensor, active: Tensor, room: Tensor) -> Tensor:
        values = confidence.double().cpu().numpy()
        here = active.cpu().numpy()
        drafted = here & (values > 0).any(1)
        rows, survival = ranked(values, np.where(drafted, room.cpu().numpy(), 0))
        count = self._admitted(int(here.sum()), survival)
        if drafted.any():
            self.history.add(values[drafted].cumprod(1))
        return torch.from_numpy(np.bincount(rows[:count], minlength=len(values)))

    def _admitted(self, requests: int, survival: Array) -> int:
        """How many of the ranked candidates are verified."""
        raise NotImplementedError

    def _early_stop(self, requests: int, survival: Array) -> int:
        rate = rates(self.cost, requests, survival)
        return int((rate[1:] > rate[:-1]).cumprod().sum())


class EarlyStop(_Scheduler):
    name = "throughput"

    def _admitted(self, requests: int, survival: Array) -> int:
        return self._early_stop(requests, survival)


class Lagged(_Scheduler):
    name = "lagged"

    def _admitted(self, requests: int, survival: Array) -> int:
        budget = self.history.budget(requests)
        return self._early_stop(requests, survival) if budget is None else min(budget, len(survival))
