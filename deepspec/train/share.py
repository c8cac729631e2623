"""Which sequences of a step a process serves, in which passes, and the anchor seed of each.

The sequences of a step, their epochs and their seeds depend on the config alone, not on how many processes there are or
how many sequences a pass takes: that is what makes a resumed run elastic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..data.batches import Picked
from ..data.loader import Loader
from ..sampling import fold


@dataclass(frozen=True)
class Served:
    """A sequence in its place."""

    epoch: int
    picked: Picked
    idle: bool = False
    """Supervises nothing: a process must take part in every step, also one with fewer sequences than processes."""


def served(loader: Loader, step: int) -> list[Served]:
    """The sequences of a step, of all processes, in order."""
    first, n = step * loader.batch_size, len(loader.sequences)
    return [Served((first + j) // n, picked) for j, picked in enumerate(loader.batch(step))]


def passes(whole: Sequence[Served], rank: int, size: int, micro_batch: int) -> list[list[Served]]:
    """One process' share of a step's sequences in passes of at most `micro_batch`; never none."""
    mine = whole[rank::size] or [replace(whole[0], idle=True)]
    return [list(mine[i : i + micro_batch]) for i in range(0, len(mine), micro_batch)]


def seeds(seed: int, part: Sequence[Served]) -> Tensor:
    """Anchor seeds [B] long: a hash of the run's seed, the epoch and the sequence."""
    return fold(seed, torch.tensor([s.epoch for s in part]), torch.tensor([s.picked[0] for s in part]))
