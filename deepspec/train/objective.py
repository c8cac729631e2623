"""One training objective for every drafter: four weighted terms over the supervised slots of every block.

Nothing of size [slots, V] outlives a chunk (divergence.py). Slots are sorted by the position whose successor they
predict, so that the target's distribution is formed once per position, and where its log Z is known on the kept tokens
alone. Loss and gradient of a chunk are formed together in the forward pass, and what is kept for backward is
[slots, D], [slots, R] and the gradient of the head's own matrix.

A drafter that keeps Vd of the target's V tokens is scored against the whole of V: a label it cannot draft has no ce
term, kl sums over Vd, L1 counts the target's mass on the rest in full.

Letters: B rows, T positions, A anchors, G slots, N supervised slots, P distinct positions of them, D hidden, R rank,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import LossConfig
from ..modeling.drafter import Batch, Drafter, gather_slots
from .divergence import Divergence, block_terms

Metrics = dict[str, tuple[Tensor, Tensor]]
"""{name: (sum, count)}: divided once, after every sum is complete."""


class Objective(nn.Module):
    """Batch -> (summed loss, its weight, metrics); the mean loss is loss / weight. The module a trainer wraps."""

    def __init__(self, drafter: Drafter, config: LossConfig, terms: Callable[..., Any] = block_terms) -> None:
        """terms: `block_terms`, compiled or not."""
        super().__init__()
        if config.confidence and not drafter.has_confidence:
            raise ValueError("loss.confidence > 0 needs a drafter with a confidence head")
        self.drafter, self.config, self._terms = drafter, config, terms

    def forward(
        self, batch: Batch, anchors: tuple[Tensor, Tensor] | None = None, seeds: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Metrics]:
        """anchors: positions [B, A] and which are real [B, A]; None draws them with seeds [B] (default: 0, 1, ...).

        loss, weight: scalars, float32. Metrics: `ce`, `kl`, `l1`, `confidence` (per supervised slot), `accept@g` (rate
        1 - L1 / 2 of slot g given the data's prefix), `tau` (expected tokens a round, of fully supervised blocks).
        """
        d, c = self.drafter, self.config
        if anchors is None:
            seeds = torch.arange(len(batch.tokens), device=batch.tokens.device) if seeds is None else seeds
            anchors = d.anchors(batch, seeds)
        slots = _Slots.of(batch, *anchors, d.num_slots)
        hidden = d.hidden(batch, anchors[0])
        rows = d.rows(hidden, slots.prev)
        index = slots.index
        h, r = (x.flatten(0, 2).index_select(0, index) for x in (hidden, rows))
        weight_N, weight = self._weights(batch, slots)
        head = r.new_empty(0, 0) if d.rows_out is None else d.rows_out
        loss, ce, kl, l1 = Divergence.apply(
            h,
            r,
            head,
            d.vocab,
            batch.hidden.flatten(0, 1),
            slots.place,
            slots.label,
            weight_N,
            c,
            torch.is_grad_enabled(),
            self._terms,
            None if batch.log_z is None else batch.log_z.flatten(),
        )
        accept = (1 - l1 / 2).clamp(0, 1)
        bce = torch.zeros_like(accept)
        if c.confidence:
            guess = d.confidence(hidden, slots.prev).flatten().index_select(0, index).float()
            bce = F.binary_cross_entropy_with_logits(guess, accept, reduction="none")
            loss = loss + c.confidence * (bce * weight_N).sum()
        return loss, weight, self._metrics(slots, ce, kl, l1, bce.detach(), accept)

    def _weights(self, batch: Batch, slots: _Slots) -> tuple[Tensor, Tensor]:
        """Each supervised slot's weight [N] and what their sum is divided by."""
        decay = self.config.slot_decay ** slots.slot.float()
        if self.config.reduce == "slot":
            return decay, decay.sum()
        # each document's weights sum to one
        document = batch.documents
        span = document.max() - document.min() + 1
        number = torch.arange(len(document), device=document.device)[:, None] * span + document
        _, group = torch.unique(number.flatten()[slots.place], return_inverse=True)
        documents = int(group.max()) + 1 if len(group) else 0
        total = decay.new_zeros(documents).index_add(0, group, decay)
        return decay / total[group], total.new_tensor(float(documents))

    @torch.no_grad()
    def _metrics(self, slots: _Slots, ce: Tensor, kl: Tensor, l1: Tensor, bce: Tensor, accept: Tensor) -> Metrics:
        count, G = accept.new_tensor(float(len(accept))), slots.mask.shape[-1]
        known = self.drafter.vocab.to_draft(slots.label)[1]
        metrics = {"ce": (ce.sum(), count if known is None else known.sum().to(accept)), "l1": (l1.sum(), count)}
        if self.config.kl:
            metrics["kl"] = (kl.sum(), count)
        if self.config.confidence:
            metrics["confidence"] = (bce.sum(), count)
        grid = accept.new_zeros(slots.mask.numel()).index_copy(0, slots.index, accept).view(-1, G)
        per_slot, counts = grid.sum(0), slots.mask.flatten(0, 1).sum(0).float()
        metrics |= {f"accept@{g}": (per_slot[g], counts[g]) for g in range(G)}
        whole = slots.mask.flatten(0, 1).all(-1)
        # of a block's own slots, not a product of averages
        metrics["tau"] = ((whole * (1 + grid.cumprod(-1).sum(-1))).sum(), whole.sum().float())
        return metrics


@dataclass(frozen=True)
class _Slots:
    """The slots of a batch; what is [N] is of the supervised ones, sorted by position."""

    prev: Tensor
    """[B, A, G] the token before each slot."""
    mask: Tensor
    """[B, A, G] supervised: a slot counts only while every slot before it in its block does."""
    index: Tensor
    """[N] flat place in [B, A, G]."""
    slot: Tensor
    """[N] g."""
    place: Tensor
    """[N] flat position in [B, T] whose successor the slot predicts; ascending."""
    label: Tensor
    """[N] the token there."""

    @staticmethod
    def of(batch: Batch, anchors: Tensor, real: Tensor, G: int) -> _Slots:
        B, T = batch.tokens.shape
        at = anchors[..., None] + torch.arange(G, device=anchors.device)
        document = batch.documents
        same = gather_slots(document, at + 1) == document.gather(1, anchors)[..., None]
        mask = real[..., None] & (at + 1 < T) & same & gather_slots(batch.loss_mask, at + 1)
        mask = mask.cumprod(-1).bool()
        index = mask.flatten().nonzero()[:, 0]
        row = torch.arange(B, device=at.device)[:, None, None] * T
        place, order = (row + at).flatten()[index].sort(stable=True)
        index = index[order]
        label = gather_slots(batch.tokens, at + 1).flatten()[index]
        return _Slots(gather_slots(batch.tokens, at), mask, index, index % G, place, label)
