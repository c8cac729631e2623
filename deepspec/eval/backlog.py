"""Verified context that the drafter has not read yet: while nothing is drafted, reading it would be for nothing.

Letters: B rows, S positions, L tapped layers, D hidden, N positions kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..modeling.cache import Ragged, on_device

MOST = 256
"""Positions a row that wait, on the average of all rows, before they are read after all."""


class Backlog:
    """For each row, features and following tokens in order, until they are taken or the row is dropped."""

    def __init__(self, rows: int, most: int = MOST) -> None:
        self._most = most * rows
        self._features: list[Tensor] = []
        self._tokens: list[Tensor] = []
        self._places: list[list[int]] = [[] for _ in range(rows)]
        """Where in all that is kept the positions of each row are."""
        self._kept = 0

    def add(self, features: Tensor, next_tokens: Tensor, counts: Sequence[int]) -> None:
        """What a drafter's `observe` would be given: [B, S, L * D], [B, S], and counts[b] <= S of each row."""
        ragged = Ragged(list(counts), features.device)
        self._features.append(ragged.pack(features))
        self._tokens.append(ragged.pack(next_tokens))
        for row, (end, count) in enumerate(zip(itertools.accumulate(counts), counts)):
            self._places[row] += range(self._kept + end - count, self._kept + end)
        self._kept += ragged.total
        if self._kept > 2 * self._most:
            self._tidy()

    @property
    def full(self) -> bool:
        """Whether too much waits."""
        return sum(map(len, self._places)) > self._most

    def take(self, rows: Sequence[int]) -> tuple[Tensor, Tensor, list[int]] | None:
        """All that waits for these rows, as `add` was given it; None where nothing does."""
        counts = [len(places) if row in rows else 0 for row, places in enumerate(self._places)]
        if not (width := max(counts)):
            return None
        at = [[*self._places[row], *[0] * (width - n)] if n else [0] * width for row, n in enumerate(counts)]
        features, tokens = torch.cat(self._features), torch.cat(self._tokens)
        index = on_device([place for row in at for place in row], features.device).view(-1, width)
        self.drop(rows)
        return features[index], tokens[index], counts

    def drop(self, rows: Sequence[int]) -> None:
        """Forget what waits for these rows."""
        for row in rows:
            self._places[row] = []
        if not any(self._places):
            self._features, self._tokens, self._kept = [], [], 0

    def _tidy(self) -> None:
        """Let go of what was taken or dropped."""
        index = on_device([place for places in self._places for place in places], self._features[0].device)
        self._features, self._tokens = [torch.cat(self._features)[index]], [torch.cat(self._tokens)[index]]
        ends = list(itertools.accumulate(map(len, self._places), initial=0))
        self._places = [list(range(a, b)) for a, b in itertools.pairwise(ends)]
        self._kept = ends[-1]
