"""Attention of an unrolled drafter: every row's slot 0 as context, and a row's own earlier slots.

Letters: B rows, T positions, A anchors, G slots, Q heads, K kv heads, H head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .own import Own
from .two_parts import TwoParts, turned

SCORES_KEPT = 1 << 25
"""Most scores with the context that all slots together keep for backward (128 MiB in float32); more are made again."""


def sees(row: Tensor, row_document: Tensor, place: Tensor, document: Tensor) -> Tensor:
    """The rule, for broadcastable tensors: every slot of row `row` sees the slots 0 of rows up to it (itself included)
    in its own document. Of later slots it sees its own alone."""
    return (place <= row) & (document == row_document)


class Unrolled:
    """What the G slots of `rows` [B, A] see, each row in its own document. What is kept for backward grows with A * G,
    never with A * T beyond SCORES_KEPT."""

    def __init__(self, rows: Tensor, document: Tensor, scale: float, heads: tuple[int, int], slots: int) -> None:
        """rows [B, A] long, document [B, T], heads Q and K, slots G."""
        own, place = document.gather(1, rows), torch.arange(document.shape[1], device=rows.device)

        def seen(cut: slice) -> Tensor:
            return sees(rows[:, cut, None], own[:, cut, None], place, document[:, None])[:, :, None]

        self.scale, self.own = scale, Own(slots - 1)
        self.parts = TwoParts(seen, (*rows.shape, 1, document.shape[1]), heads, kept=SCORES_KEPT // slots)

    def start(self, k: Tensor, v: Tensor) -> None:
        """Keys and values [B, T, K, H] of slot 0 of all rows."""
        self.first = turned(k), turned(v)

    def add(self, k: Tensor, v: Tensor) -> None:
        """Keys and values [B, A, K, H] of the next slot after it."""
        self.own.add(k[:, :, None], v[:, :, None])

    def __call__(self, q: Tensor) -> Tensor:
        """q [B, A, Q, H], over slot 0 and the slots added by now -> [B, A, Q, H]."""
        return self.parts(q[:, :, None], self.first, self.own, self.scale)[:, :, 0]
