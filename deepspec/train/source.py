"""Where a micro-batch's features come from. Letters: B rows, T positions."""

from __future__ import annotations

from collections.abc import Sequence

from ..data.chat import Row
from ..data.loader import collate
from ..modeling.drafter import Batch
from ..modeling.target import Target


class Live:
    """Features computed by the target when they are needed; nothing is stored."""

    def __init__(self, target: Target, target_layer_ids: Sequence[int]) -> None:
        self.target, self.layer_ids = target, tuple(target_layer_ids)

    def batch(self, rows: Sequence[tuple[int, Row]]) -> Batch:
        """Rows, each with its index in the data set, as one Batch [B, T] on the target's device."""
        device = self.target.device
        tokens, loss_mask, lengths, index = collate(rows)
        tokens, loss_mask = tokens.to(device), loss_mask.to(device)
        features, hidden = self.target.features(tokens, lengths, self.layer_ids)
        return Batch(tokens, loss_mask, features, hidden, sample=index.to(device))
