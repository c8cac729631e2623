"""How many drafted tokens of each request are worth verifying.

Lossless only if the length never depends on tokens it would cut off: slot g may be admitted on confidence[:, : g + 1]
alone. All schedules here stop at the first slot they refuse.

Letters: B rows, G slots.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..checked import InputError


class Schedule(Protocol):
    """One fresh object a run: a schedule may remember earlier rounds."""

    name: str

    def __call__(self, confidence: Tensor, active: Tensor, room: Tensor) -> Tensor:
        """confidence [B, G] in (0, 1] (0 for a row without a draft), active [B] bool (not a row that is idle or whose
        prompt is read in this pass), room [B]: the most a row can hold -> lengths [B] long, 0 for inactive rows."""
        ...


@runtime_checkable
class Choosy(Protocol):
    """A schedule may also know, before anything is drafted, that it will admit nothing of some rows."""

    def wants(self, active: Tensor) -> Tensor:
        """active [B] bool -> [B] bool on the host, the rows to draft for, by history alone. Asked once a round.

        Rows it does not want have confidence 0 and room 0 in this round's call; where it wants none, the drafter does
        not run and there is no call. The drafter reads what was committed meanwhile before it drafts again.
        """
        ...


@runtime_checkable
class Learning(Protocol):
    """A schedule may also learn how its lengths turned out."""

    def settle(self, accepted: Sequence[int]) -> None:
        """accepted [B]: drafts of each row that were accepted in the round of its last call. After each such round."""
        ...


class VerifyAll:
    name = "verify_all"

    def __call__(self, confidence: Tensor, active: Tensor, room: Tensor) -> Tensor:
        return room.clamp(max=confidence.shape[1]) * active  # on the host: no synchronisation


class Threshold:
    def __init__(self, minimum: float) -> None:
        if not 0 <= minimum <= 1:
            raise InputError(f"threshold must be in [0, 1], got {minimum}")
        self.minimum = minimum
        self.name = f"threshold:{minimum:g}"

    def __call__(self, confidence: Tensor, active: Tensor, room: Tensor) -> Tensor:
        lengths = (confidence >= self.minimum).cumprod(-1).sum(-1)
        return torch.minimum(lengths, room.to(lengths.device)) * active.to(lengths.device)


def verify_all() -> Schedule:
    """Verify every drafted token."""
    return VerifyAll()


def threshold(minimum: float) -> Schedule:
    """Verify up to the first slot whose conditional confidence is below `minimum`."""
    return Threshold(minimum)
