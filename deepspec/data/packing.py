"""Short rows side by side in one training sequence, so that a batch is not mostly padding."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

OPEN = 64
"""Packs that still take rows; with 64 little room is left over, and a pack's rows stay near each other in the order."""


def pack(lengths: Sequence[int], order: Iterable[int], budget: int) -> list[tuple[int, ...]]:
    """Rows of `lengths` tokens, taken in `order`, as packs of at most `budget` tokens each; every row in one of them.

    Best fit: a row goes to the open pack that it fills most. A row longer than the budget is a pack of its own.
    """
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, pack), ascending
    for row in order:
        length = int(lengths[row])
        at = bisect.bisect_left(room, (length, -1))
        if at < len(room):
            left, number = room.pop(at)
        else:
            left, number = budget, len(packs)
            packs.append([])
        packs[number].append(row)
        if left > length:
            bisect.insort(room, (left - length, number))
        if len(room) > OPEN:
            room.pop(0)  # the fullest
    return [tuple(members) for members in packs]
