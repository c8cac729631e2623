"""Which rows of a step a process serves, in which passes, and each row's anchor seed.

The rows of a step, their epochs and their seeds depend on the config alone, not on how many processes there are or how
many rows a pass takes: that is what makes a resumed run elastic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.chat import Row
from ..data.loader import Loader
from ..sampling import fold


@dataclass(frozen=True)
class Served:
    """A row in its place."""

    epoch: int
    index: int
    """In the data set."""
    row: Row


def served(loader: Loader, step: int) -> list[Served]:
    """The rows of a step, of all processes, in order."""
    first, n = step * loader.batch_size, len(loader.rows)
    return [Served((first + j) // n, index, row) for j, (index, row) in enumerate(loader.batch(step))]


def passes(rows: Sequence[Served], rank: int, size: int, micro_batch: int) -> list[list[Served]]:
    """One process' share of a step's rows in passes of at most `micro_batch`; never none.

    Every process must take part in a step: one without rows serves a short row that supervises nothing.
    """
    mine = rows[rank::size]
    if not mine:
        r = rows[0].row
        mine = [Served(0, rows[0].index, Row(r.id, r.tokens[:2], [False, False]))]
    return [list(mine[i : i + micro_batch]) for i in range(0, len(mine), micro_batch)]


def seeds(seed: int, rows: Sequence[Served]) -> Tensor:
    """Anchor seeds [B] long: a hash of the run's seed, the epoch and the row."""
    return fold(seed, torch.tensor([r.epoch for r in rows]), torch.tensor([r.index for r in rows]))
