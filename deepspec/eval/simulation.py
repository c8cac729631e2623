"""Closed-loop load, simulated: what a server would do by a profile of its machine and recorded rounds.

Letters: R users, that is requests in flight, B tokens in a verification batch, G slots, n rounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..checked import InputError
from .calibration import survival
from .closed_loop import Load, budget_of
from .cost import Profile
from .rounds import BUDGET
from .schedule import Choosy, Learning, Schedule
from .traces import Trace

Array = np.ndarray[Any, Any]


def simulate(
    traces: Sequence[Trace],
    temperatures: Sequence[float],
    profile: Profile,
    schedule: Schedule | None,
    users: int,
    *,
    rounds: int = 1000,
    warmup: int = 50,
) -> Load:
    """What `serve` would measure where a round costs what the profile says and users ask for the answers of `traces` in
    turn, so many tokens of each as there. temperatures [G] scale the recorded logits. schedule None is no speculation.

    The rounds of an answer are the recorded ones in their order, whatever was verified; where fewer drafts are, and it
    takes more of them, they begin again. As when serving, an answer begins with a round that reads its prompt, and
    rounds that read one are not counted. InputError where answers are too short for any other.
    """
    cost, slots = profile.cost, traces[0].logits.shape[1]
    answers = [trace.within(BUDGET) for trace in traces]
    confidence = [_conditional(trace.logits, temperatures) for trace in answers]
    turn = itertools.cycle(range(len(answers)))
    which = [next(turn) for _ in range(users)]
    budgets = [budget_of(i, users) for i in range(users)]
    place, left = [0] * users, [0] * users
    plain = cost.plain(users) if schedule is not None else profile.without_drafter(users)
    choosy = schedule if isinstance(schedule, Choosy) else None
    full = tokens = verified = 0
    seconds = 0.0
    for _ in range(64 * (warmup + rounds)):
        if full == warmup + rounds:
            return Load(users, tokens, seconds, rounds, verified)
        active = torch.tensor([n > 0 for n in left])
        lengths, spent = np.zeros(users, dtype=np.int64), plain
        wanted = active & (schedule is not None) & (True if choosy is None else choosy.wants(active))
        if schedule is not None and wanted.any():
            now = torch.from_numpy(np.stack([confidence[w][p] for w, p in zip(which, place)])) * wanted[:, None]
            lengths = schedule(now, active, torch.where(wanted, slots, 0)).numpy()
            few, more = int(wanted.sum()), profile.step(users, users + int(lengths.sum())) - profile.step(users, users)
            spent += profile.step(few, few) - cost.plain(few) + more
        accepted = np.minimum(lengths, [answers[w].survived[p] for w, p in zip(which, place)])
        if isinstance(schedule, Learning) and wanted.any():
            schedule.settle(accepted.tolist())
        if all(left):
            full += 1
            if full > warmup:
                tokens += users + int(accepted.sum())
                verified += int(lengths.sum())
                seconds += spent
        for i, kept in enumerate(accepted + 1):
            if not left[i]:  # its prompt was read, and brought the answer's first token
                left[i] = min(answers[which[i]].tokens, budgets[i]) - 1
                continue
            left[i], place[i] = max(left[i] - int(kept), 0), (place[i] + 1) % len(answers[which[i]].survived)
            if not left[i]:
                which[i], place[i], budgets[i] = next(turn), 0, BUDGET
    raise InputError(f"recorded answers are too short for rounds in which {users} users read no prompt")


def _conditional(logits: Array, temperatures: Sequence[float]) -> Array:
    """[n, G] conditional confidences."""
    return np.stack([survival(logits[:, g : g + 1], [t])[:, 0] for g, t in enumerate(temperatures)], 1)
