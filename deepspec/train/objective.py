"""One training objective for every drafter: four weighted terms over the supervised slots of every block.

Nothing of size [slots, V] outlives a chunk. Slots are sorted by the position whose successor they predict, so that the
target's distribution is formed once per position; loss and gradient of a chunk are formed together in the forward pass,
and what is kept for backward is [slots, D], [slots, R] and the gradient of the head's own matrix.

A drafter that keeps Vd of the target's V tokens is scored against the whole of V: a label it cannot draft has no ce
term, kl sums over Vd, L1 counts the target's mass on the rest in full.

Letters: B rows, T positions, A anchors, G slots, N supervised slots, P distinct positions of them, D hidden, R rank,
V vocabulary (Vd of the drafter), C slots of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import LossConfig
from ..modeling.drafter import Batch, Drafter, gather_slots
from ..modeling.vocab import Vocab

Metrics = dict[str, tuple[Tensor, Tensor]]
"""{name: (sum, count)}: divided once, after every sum is complete."""


class Objective(nn.Module):
    """Batch -> (summed loss, its weight, metrics); the mean loss is loss / weight. The module a trainer wraps."""

    def __init__(self, drafter: Drafter, config: LossConfig) -> None:
        super().__init__()
        if config.confidence and not drafter.has_confidence:
            raise ValueError("loss.confidence > 0 needs a drafter with a confidence head")
        self.drafter, self.config = drafter, config

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
        h, r = hidden.flatten(0, 2)[index], rows.flatten(0, 2)[index]
        weight_N, weight = self._weights(batch, slots)
        head = r.new_empty(0, 0) if d.rows_out is None else d.rows_out
        loss, ce, kl, l1 = _Divergence.apply(
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
        )
        accept = (1 - l1 / 2).clamp(0, 1)
        bce = torch.zeros_like(accept)
        if c.confidence:
            guess = d.confidence(hidden, slots.prev).flatten()[index].float()
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


class _Divergence(torch.autograd.Function):
    """Weighted sum of ce, kl and tv over slots, with its gradient formed chunk by chunk on the way."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, r: Tensor, w2: Tensor, vocab: Vocab, teacher: Tensor, place: Tensor, label: Tensor,
        weight: Tensor, config: LossConfig, grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """h [N, D], r [N, R], w2 [Vd, R], teacher [B * T, D]; place, label, weight [N] -> loss; ce, kl, L1 [N]."""
        device = h.device.type
        fast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else h.dtype
        exact = torch.promote_types(h.dtype, torch.float32)
        with torch.autocast(device, enabled=False):
            positions, which, sizes = torch.unique_consecutive(place, return_inverse=True, return_counts=True)
            ends = [0, *sizes.cumsum(0).tolist()]
            label, known = vocab.to_draft(label)
            C = min(config.chunk, len(h))
            out = _Buffers.make(h, r, w2, exact, grad)
            buffers = tuple(h.new_empty(C, vocab.draft_size, dtype=exact) for _ in range(3))
            work = _Work(vocab.draft_head.to(fast), w2.to(fast), vocab.softcap, buffers)
            for p0 in range(0, len(positions), C):
                p1 = min(p0 + C, len(positions))
                p, mass = vocab.keep(_softmax_(vocab.target_logits(teacher[positions[p0:p1]]).to(exact)))
                for s0 in range(ends[p0], ends[p1], C):
                    cut = slice(s0, min(s0 + C, ends[p1]))
                    out.add(
                        cut, h[cut].to(fast), r[cut].to(fast), work, p, mass, which[cut] - p0, label[cut],
                        None if known is None else known[cut], weight[cut], config,
                    )  # fmt: skip
        ctx.grads = out.gradients()
        loss = (out.loss * weight).sum()
        ctx.mark_non_differentiable(out.ce, out.kl, out.l1)
        return loss, out.ce, out.kl, out.l1

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor, *unused: Tensor) -> Any:
        if ctx.grads is None:
            raise RuntimeError("the objective's gradients are formed once; run it again for a second backward")
        h, r, w2 = ctx.grads
        ctx.grads = None  # so that autograd may take the buffers over instead of copying them
        return h.mul_(scale), r.mul_(scale), w2.mul_(scale) if w2.numel() else None, *[None] * 7


@dataclass
class _Work:
    """What every chunk multiplies with, and its memory, which the next one takes over."""

    head: Tensor
    """[Vd, D]."""
    w2: Tensor
    """[Vd, R]."""
    softcap: float | None
    buffers: tuple[Tensor, ...]
    """Three of [chunk, Vd]."""

    def logits(self, h: Tensor, r: Tensor, out: Tensor) -> Tensor | None:
        """Logits [C, Vd] of h [C, D], r [C, R] into `out`; returns the cap's slope where there is one."""
        slope = None
        if h.dtype == out.dtype:
            torch.mm(h, self.head.T, out=out)
        else:
            out.copy_(h @ self.head.T)
        if self.softcap is not None:
            tanh = torch.div(out, self.softcap).tanh_()
            torch.mul(tanh, self.softcap, out=out)
            slope = tanh.square_().neg_().add_(1)
        if self.w2.numel():
            out.addmm_(r, self.w2.T) if r.dtype == out.dtype else out.add_(r @ self.w2.T)
        return slope


@dataclass
class _Buffers:
    """What outlives a chunk: per-slot losses, and gradients of h, r and w2 (None where none are wanted)."""

    loss: Tensor
    ce: Tensor
    kl: Tensor
    l1: Tensor
    d_h: Tensor | None
    d_r: Tensor | None
    d_w2: Tensor | None

    @staticmethod
    def make(h: Tensor, r: Tensor, w2: Tensor, exact: torch.dtype, grad: bool) -> _Buffers:
        values = [h.new_zeros(len(h), dtype=exact) for _ in range(4)]
        grads = [torch.zeros_like(x) for x in (h, r, w2)] if grad else [None] * 3
        return _Buffers(*values, *grads)

    def gradients(self) -> tuple[Tensor, Tensor, Tensor] | None:
        if self.d_h is None or self.d_r is None or self.d_w2 is None:
            return None
        return self.d_h, self.d_r, self.d_w2

    def add(
        self, cut: slice, h: Tensor, r: Tensor, work: _Work, p: Tensor, mass: Tensor | None, which: Tensor,
        label: Tensor, known: Tensor | None, weight: Tensor, config: LossConfig,
    ) -> None:  # fmt: skip
        """One chunk: h [C, D], r [C, R], teacher p [P, Vd], its sum [P] where below 1, which [C] names each slot's row
        of p; label, known [C]. Everything [C, Vd] is in `work`."""
        c = config
        logits, d, spare = (x[: len(h)] for x in work.buffers)
        slope = work.logits(h, r, logits)
        logits.sub_(logits.amax(-1, keepdim=True))
        at_label = logits.gather(-1, label[:, None])[:, 0]
        torch.index_select(p, 0, which, out=d)
        cross = torch.mul(d, logits, out=spare).sum(-1) if c.kl else None
        q = logits.exp_()
        total = q.sum(-1, keepdim=True)
        q.div_(total)
        log_total = total[:, 0].log_()
        ce = log_total - at_label
        self.ce[cut] = ce if known is None else ce * known
        share = None if mass is None else mass[which]  # the target's mass on what can be drafted
        if cross is not None:
            self.kl[cut] = (log_total if share is None else log_total * share) - cross
        torch.sub(q, d, out=d)  # q - p
        l1 = torch.abs(d, out=spare).sum(-1)  # vector_norm sums in sequence: 1e-5 off at V = 150,000
        self.l1[cut] = l1 if share is None else l1.add_((1 - share).clamp_(min=0))
        self.loss[cut] = c.ce * self.ce[cut] + c.kl * self.kl[cut] + c.tv * self.l1[cut]
        if self.d_h is None or self.d_r is None or self.d_w2 is None:
            return
        # d ce = q - onehot; d kl = (q - p) - q (1 - sum(p)); d L1 = q (s - <q, s>) with s = sign(q - p)
        pull: float | Tensor = c.ce
        if known is not None and share is not None:
            pull = (c.ce * known - c.kl * (1 - share))[:, None]
        if c.tv:
            g = torch.sign(d, out=spare)
            mean = torch.mul(q, g, out=None if c.kl else d).sum(-1, keepdim=True)
            g.sub_(mean).mul_(c.tv).add_(pull).mul_(q)
            if c.kl:
                g.add_(d, alpha=c.kl)
        elif c.kl:
            g = d.mul_(c.kl)
            if isinstance(pull, Tensor) or pull:
                g.add_(q.mul_(pull))
        else:
            g = q.mul_(pull)
        if c.ce:
            push = g.new_full((len(label), 1), -c.ce)
            g.scatter_add_(-1, label[:, None], push if known is None else push.mul_(known[:, None]))
        # a slot's weight multiplies what its row of g becomes, which is narrower than the row
        weight = weight[:, None]
        if work.w2.numel():
            g_fast = g.to(r.dtype)
            self.d_r[cut] = (g_fast @ work.w2).mul_(weight)
            weighted = (r * weight).to(r.dtype)
            if self.d_w2.dtype == g_fast.dtype:
                self.d_w2.addmm_(g_fast.T, weighted)
            else:
                self.d_w2.add_(g_fast.T @ weighted)
        if slope is not None:
            g.mul_(slope)  # the cap is on the base logits only
        self.d_h[cut] = (g.to(h.dtype) @ work.head).mul_(weight)


def _softmax_(logits: Tensor) -> Tensor:
    """Softmax in place over the last dimension."""
    logits.sub_(logits.amax(-1, keepdim=True)).exp_()
    return logits.div_(logits.sum(-1, keepdim=True))
