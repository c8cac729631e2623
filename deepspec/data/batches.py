"""From rows to the tensors a drafter trains on. Letters: B sequences, T positions, M rows of N positions together.

A sequence is one row, or several packed side by side: then `document` and `position` keep them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..modeling.cache import Ragged
from ..modeling.drafter import Batch
from .features import FeatureSource
from .rows import Rows

Picked = tuple[int, tuple[int, ...]]
"""A sequence's number and its rows."""


class Batches:
    """Makes micro-batches on a device from rows and the features of a source."""

    def __init__(self, rows: Rows, source: FeatureSource, device: torch.device) -> None:
        self.rows, self.source, self.device = rows, source, device
        self.width: Callable[[int], int] = lambda longest: longest
        """To how many positions sequences of at most `longest` tokens are padded."""

    def batch(self, picked: Sequence[Picked]) -> Batch:
        """Sequences padded on the right, unsupervised, with what the target computed. `sample` is their number.

        A row whose features are not usable keeps its place and supervises nothing.
        """
        flat = [i for _, members in picked for i in members]
        found = self.source(flat)
        counts = self.rows.lengths[flat]
        ragged = Ragged([self.tokens([one]) for one in picked], self.device)
        width = self.width(ragged.width)
        usable = found.usable.repeat_interleave(self._tensor(counts), output_size=len(found.hidden))
        document = position = None
        if any(len(members) > 1 for _, members in picked):
            numbers = np.concatenate([np.arange(1, len(members) + 1) for _, members in picked])
            document = ragged.unpack(self._tensor(numbers.repeat(counts)), width) - 1  # -1 where there is nothing
            position = ragged.unpack(self._tensor(np.concatenate([np.arange(n) for n in counts])), width)
        tokens = np.concatenate([self.rows.tokens_of(i) for i in flat]).astype(np.int64)
        loss_mask = np.concatenate([self.rows.mask_of(i) for i in flat])
        return Batch(
            ragged.unpack(self._tensor(tokens), width),
            ragged.unpack(self._tensor(loss_mask) & usable, width),
            ragged.unpack(found.features, width),
            ragged.unpack(found.hidden, width),
            document=document,
            position=position,
            sample=torch.tensor([number for number, _ in picked], device=self.device),
            log_z=None if found.log_z is None else ragged.unpack(found.log_z, width),
        )

    def tokens(self, picked: Sequence[Picked]) -> int:
        """How many tokens the sequences have, prompts included."""
        return int(sum(self.rows.lengths[list(members)].sum() for _, members in picked))

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)
