"""From rows to the tensors a drafter trains on. Letters: B sequences, T positions, M rows of N positions together.

A sequence is one row, or several packed side by side: then `document` and `position` keep them apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..modeling.cache import Ragged
from ..modeling.drafter import Batch
from .features import FeatureSource
from .rows import Rows

Picked = tuple[int, tuple[int, ...]]
"""A sequence's number and its rows."""


def make_batch(rows: Rows, picked: Sequence[Picked], source: FeatureSource, device: torch.device) -> Batch:
    """Sequences padded on the right, unsupervised, with what the target computed. `sample` is the sequence's number.

    A row whose features are not usable keeps its place and supervises nothing.
    """
    flat = [i for _, members in picked for i in members]
    found = source(flat)
    counts = rows.lengths[flat]
    ragged = Ragged([int(rows.lengths[list(members)].sum()) for _, members in picked], device)

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    usable = found.usable.repeat_interleave(tensor(counts), output_size=len(found.hidden))
    document = position = None
    if any(len(members) > 1 for _, members in picked):
        numbers = np.concatenate([np.arange(1, len(members) + 1) for _, members in picked])
        document = ragged.unpack(tensor(numbers.repeat(counts))) - 1  # -1 where there is nothing
        position = ragged.unpack(tensor(np.concatenate([np.arange(n) for n in counts])))
    return Batch(
        ragged.unpack(tensor(np.concatenate([rows.tokens_of(i) for i in flat]).astype(np.int64))),
        ragged.unpack(tensor(np.concatenate([rows.mask_of(i) for i in flat])) & usable),
        ragged.unpack(found.features),
        ragged.unpack(found.hidden),
        document=document,
        position=position,
        sample=torch.tensor([number for number, _ in picked], device=device),
    )
