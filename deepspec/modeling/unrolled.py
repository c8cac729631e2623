"""Attention of an unrolled drafter: every row's slot 0 as context, and a row's own earlier slots.

Letters: B rows, T positions, A anchors, g earlier slots, Q heads, K kv heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .two_parts import TwoParts


def sees(row: Tensor, row_document: Tensor, place: Tensor, document: Tensor) -> Tensor:
    """The rule, for broadcastable tensors: every slot of row `row` sees the slots 0 of rows up to it (itself included)
    in its own document. Of later slots it sees its own alone."""
    return (place <= row) & (document == row_document)


class Unrolled:
    """What the slots of `rows` [B, A] see, each row in its own document. What is kept for backward grows with A * g and
    never with A * T: scores with the context are made again."""

    def __init__(self, rows: Tensor, document: Tensor, scale: float, heads: tuple[int, int]) -> None:
        """rows [B, A] long, document [B, T], heads Q and K."""
        own, place = document.gather(1, rows), torch.arange(document.shape[1], device=rows.device)

        def seen(cut: slice) -> Tensor:
            return sees(rows[:, cut, None], own[:, cut, None], place, document[:, None])[:, :, None]

        self.scale = scale
        self.parts = TwoParts(seen, (*rows.shape, 1, document.shape[1]), heads, kept=0)

    def __call__(self, q: Tensor, first: tuple[Tensor, Tensor], own: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """q [B, A, Q, H]; keys and values of slot 0 of all rows [B, T, K, H], of own earlier slots g x [B, A, K, H]
        -> [B, A, Q, H]."""
        pairs = [(k[:, :, None], v[:, :, None]) for k, v in own]
        return self.parts(q[:, :, None], first, pairs, self.scale)[:, :, 0]
