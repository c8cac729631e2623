"""Closed-loop load: so many users, each of whom asks again as soon as an answer is there. For real, and simulated.

Letters: R users, that is requests in flight, B tokens in a verification batch, G slots.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..modeling.drafter import Drafter
from ..modeling.target import Target
from ..sampling import Sampling
from .calibration import survival
from .cost import Profile
from .generate import stream
from .rounds import BUDGET, Enough, Round, RoundLog, Time, Turns, supply
from .schedule import Choosy, Learning, Schedule
from .throughput import MEMORY
from .traces import Trace

Array = np.ndarray[Any, Any]


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
    in which a prompt is read. Users take the prompts in turn. InputError where answers are too short for that.

    Contenders are servers of their own that take turns round by round, so a machine that slows down slows all alike.
    """
    turns, logs, failures = Turns(len(contenders)), [], []
    endless = supply(prompts, users, warmup + rounds)

    def run(me: int, log: RoundLog, drafter: Drafter | None, schedule: Schedule | None) -> None:
        turns.take(me)
        try:
            for _ in stream(
                target, drafter, endless, max_new_tokens=BUDGET, sampling=sampling, schedule=schedule,
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


def simulate(
    traces: Sequence[Trace],
    temperatures: Sequence[float],
    profile: Profile,
    schedule: Schedule | None,
    users: int,
    *,
    rounds: int = 1000,
    warmup: int = 50,
    seed: int = 0,
) -> Load:
    """What `serve` would measure where a round costs what the profile says and proposals are like the recorded ones.

    Each user takes a random trace, from a random round on, then the next; a round moves one step on in it, whatever was
    verified. temperatures [G] scale the recorded logits. schedule None is no speculation.
    """
    rng = np.random.default_rng(seed)
    cost = profile.cost
    confidence = [_conditional(t.logits, temperatures) for t in traces]
    which = rng.integers(len(traces), size=users)
    place = np.array([rng.integers(len(traces[w].survived)) for w in which])
    active, slots = torch.ones(users, dtype=torch.bool), traces[0].logits.shape[1]
    plain = cost.plain(users) if schedule is not None else profile.without_drafter(users)
    drafting = float(cost.step(users, np.array([users]))[0]) - plain
    choosy = schedule if isinstance(schedule, Choosy) else None
    tokens = verified = 0
    seconds = 0.0
    for n in range(warmup + rounds):
        lengths = np.zeros(users, dtype=np.int64)
        spent = plain
        wanted = active & (choosy.wants(active) if choosy is not None else schedule is not None)
        if schedule is not None and wanted.any():
            now = torch.from_numpy(np.stack([confidence[w][p] for w, p in zip(which, place)])) * wanted[:, None]
            lengths = schedule(now, active, torch.where(wanted, slots, 0)).numpy()
            more = cost.step(users, np.array([users, users + int(lengths.sum())]))
            # a draft for a few costs its share, and so does what is verified
            spent += drafting * float(wanted.double().mean()) + float(more[1] - more[0])
        accepted = np.minimum(lengths, [traces[w].survived[p] for w, p in zip(which, place)])
        if isinstance(schedule, Learning) and wanted.any():
            schedule.settle(accepted.tolist())
        if n >= warmup:
            tokens += users + int(accepted.sum())
            verified += int(lengths.sum())
            seconds += spent
        place += 1
        for i in np.flatnonzero(place >= [len(traces[w].survived) for w in which]):
            which[i], place[i] = rng.integers(len(traces)), 0
    return Load(users, tokens, seconds, rounds, verified)


def _conditional(logits: Array, temperatures: Sequence[float]) -> Array:
    """[n, G] conditional confidences."""
    return np.stack([survival(logits[:, g : g + 1], [t])[:, 0] for g, t in enumerate(temperatures)], 1)
