"""Closed-loop load: so many users, each of whom asks again as soon as an answer is there."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..modeling.drafter import Drafter
from ..modeling.target import Target
from ..sampling import Sampling
from .generate import stream
from .rounds import BUDGET, Enough, Round, RoundLog, Time, Turns, supply
from .schedule import Schedule
from .throughput import MEMORY


@dataclass(frozen=True)
class Load:
    """What a server did under R users, in rounds without prompts: reading them is the same whatever is verified."""

    users: int
    tokens: int
    seconds: float
    rounds: int
    verified: int

    @staticmethod
    def of(users: int, rounds: Sequence[Round]) -> Load:
        return Load(
            users,
            sum(r.committed for r in rounds),
            sum(r.seconds for r in rounds),
            len(rounds),
            sum(r.verified for r in rounds),
        )

    @staticmethod
    def total(loads: Sequence[Load]) -> Load:
        """Of several servings of as many users."""
        tokens, seconds, rounds, verified = (
            sum(getattr(one, name) for one in loads) for name in ("tokens", "seconds", "rounds", "verified")
        )
        return Load(loads[0].users, tokens, seconds, rounds, verified)

    @property
    def throughput(self) -> float:
        """Tokens per second of all users."""
        return self.tokens / self.seconds

    @property
    def speed(self) -> float:
        """Tokens per second of one user."""
        return self.throughput / self.users

    @property
    def verification_length(self) -> float:
        """Drafts verified a request and round."""
        return self.verified / (self.rounds * self.users)


Contender = tuple[Drafter | None, Schedule | None]
"""Without a drafter: no speculation."""


def warmup_of(users: int) -> int:
    """Rounds that need not count: 8, or as many as a schedule needs to have a history."""
    return max(8, 2 + MEMORY // users)


def budget_of(request: int, users: int) -> int:
    """Tokens of its answer: BUDGET, but spread from few to BUDGET for the users' first. Users who begin together and
    get a token a round each would go on in step, as a server's do not; rows of one length are cheap to decode."""
    return 1 + max(1, round((BUDGET - 1) * min(request + 1, users) / users))


def serve(
    target: Target,
    contenders: Mapping[str, Contender],
    prompts: Sequence[Sequence[int]],
    users: int,
    *,
    rounds: int,
    warmup: int,
    sampling: Sampling,
    seed: int = 0,
    clock: Time = "wall",
) -> dict[str, list[Round]]:
    """Serve `users` with every contender, each for `rounds` rounds after `warmup` ones that are not counted, nor those
    in which a prompt is read. Users take the prompts in turn; their first answers are cut (see `budget_of`). InputError
    where answers are too short for that.

    Contenders are servers of their own that take turns round by round, in an order drawn anew each time: a machine that
    slows down slows all alike, and none always finds the caches as the same other one leaves them.
    """
    turns, logs, failures = Turns(len(contenders), seed), [], []
    endless = supply(prompts, users, warmup + rounds)
    budgets = [budget_of(i, users) for i in range(len(endless))]

    def run(me: int, log: RoundLog, drafter: Drafter | None, schedule: Schedule | None) -> None:
        turns.take(me)
        try:
            for _ in stream(
                target, drafter, endless, max_new_tokens=budgets, sampling=sampling, schedule=schedule,
                stop_ids=target.stop_ids, seed=seed, concurrency=users, clock=log, on_round=log,
            ):  # fmt: skip
                pass
        except Enough:
            pass
        except BaseException as error:  # for whoever called
            failures.append(error)
        turns.give(me, leave=True)

    threads = []
    for me, (drafter, schedule) in enumerate(contenders.values()):

        def between(me: int = me) -> None:
            turns.give(me)
            turns.take(me)

        logs.append(RoundLog(target.device, lambda log: len(log.full(users)) >= warmup + rounds, clock, between))
        threads.append(threading.Thread(target=run, args=(me, logs[-1], drafter, schedule), daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return {name: log.complete(users, warmup + rounds)[warmup:] for name, log in zip(contenders, logs)}
