"""Watching the decoding loop round by round: how long each took, what it verified and what it committed."""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ..checked import InputError

BUDGET = 64
"""Tokens of an answer where rounds are timed; the next request takes its row."""


@dataclass(frozen=True)
class Round:
    seconds: float
    """Since the round before, but for passes over prompts alone."""
    requests: int
    """Rows that were active. Where prompts joined the round's pass it is fewer than there are users."""
    verified: int
    """Drafts verified, over all rows."""
    committed: int
    """Tokens committed, over all rows."""


class Enough(Exception):
    """Ends the loop from inside; whoever started it expects it."""


Time = Literal["wall", "cpu"]


def supply(prompts: Sequence[Sequence[int]], requests: int, rounds: int) -> list[Sequence[int]]:
    """Prompts in turn, for so many rounds in which all `requests` are active: where answers are short, or end at times
    of their own, most rounds read a prompt."""
    return [prompts[i % len(prompts)] for i in range(requests * max(64, 2 * rounds))]


class RoundLog:
    """The rounds of a run: `stream`'s clock and its `on_round` in one. The loop ends when `enough(self)` says so."""

    def __init__(
        self,
        device: torch.device,
        enough: Callable[["RoundLog"], bool],
        clock: Time = "wall",
        between: Callable[[], object] = lambda: None,
    ) -> None:
        """clock cpu counts this process's own seconds of CPU: with one thread, what the wall would show were no other
        process on the machine. `between` is called after every round, and belongs to none."""
        self.rounds: list[Round] = []
        self.prefill = 0.0
        """Seconds of passes over prompts alone, so far."""
        self._device, self._enough, self._clock, self._between = device, enough, clock, between
        self._mark = self._now()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the body where it is prefill, and leave that out of the round around it."""
        if name != "prefill":
            yield
            return
        began = self._now()
        yield
        spent = self._now() - began
        self.prefill += spent
        self._mark += spent

    def full(self, requests: int) -> list[Round]:
        """The rounds of all `requests`, in which no prompt was read."""
        return [r for r in self.rounds if r.requests == requests]

    def complete(self, requests: int, rounds: int) -> list[Round]:
        """The same; InputError where the prompts came to an end before there were so many."""
        found = self.full(requests)
        if len(found) < rounds:
            raise InputError(
                f"{len(found)} of {rounds} rounds with {requests} requests in flight: answers are too short, or of too "
                "many lengths, for rounds that read no prompt; ask for fewer requests or rounds"
            )
        return found

    def __call__(self, verified: Sequence[int], kept: Sequence[int]) -> None:
        """A round is over. verified, kept [B]: drafts verified, tokens committed of each row; kept 0: it was idle."""
        now = self._now()
        self.rounds.append(Round(now - self._mark, sum(k > 0 for k in kept), sum(verified), sum(kept)))
        if self._enough(self):
            raise Enough
        self._between()
        self._mark = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() if self._clock == "wall" else time.process_time()


class Turns:
    """Lets threads run one at a time, everybody once before anybody again, in an order drawn anew each time; who has
    left is passed over."""

    def __init__(self, number: int, seed: int = 0) -> None:
        self._changed, self._here = threading.Condition(), set(range(number))
        self._random, self._next = random.Random(seed), list[int]()
        self._now = self._draw()

    def take(self, me: int) -> None:
        """Wait until it is my turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._now == me)

    def give(self, me: int, *, leave: bool = False) -> None:
        """It is the next one's turn; with `leave` it is never mine again."""
        with self._changed:
            if leave:
                self._here.discard(me)
            self._now = self._draw()
            self._changed.notify_all()

    def _draw(self) -> int:
        """Whose turn it is; -1 where nobody is left."""
        if not self._next:
            self._next = sorted(self._here)
            self._random.shuffle(self._next)
        return self._next.pop() if self._next else -1
