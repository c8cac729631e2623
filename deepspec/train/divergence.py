"""ce, kl and tv between a drafter's slots and the target, with their gradients formed on the way.

Two sizes of work. A *chunk* is what the products with the vocabulary see: large, so that they are fast; of it only
logits in the matrices' own dtype are alive. A *block* of a chunk is what softmaxes and differences see, in float32:
small, so that it stays in a cache.

Letters: B rows, T positions, N supervised slots, P distinct positions of them, D hidden, R rank, V vocabulary (Vd of
the drafter), C slots of a chunk or block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import LossConfig
from ..modeling.vocab import Vocab

_BLOCK_BYTES = {"cpu": 400 << 10, "cuda": 64 << 20}
"""Of one float32 tensor [C, V] of a block."""

Span = tuple[int, int, int, int]
"""Positions p0 to p1 and their slots s0 to s1."""


class Divergence(torch.autograd.Function):
    """Weighted sum of ce, kl and tv over slots."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, r: Tensor, w2: Tensor, vocab: Vocab, teacher: Tensor, place: Tensor, label: Tensor,
        weight: Tensor, config: LossConfig, grad: bool, terms: Callable[..., Any],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """h [N, D], r [N, R], w2 [Vd, R], teacher [B * T, D]; place, label, weight [N] -> loss; ce, kl, L1 [N].

        place is ascending. `terms` is `block_terms`, compiled or not.
        """
        device = h.device.type
        fast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else h.dtype
        exact = torch.promote_types(h.dtype, torch.float32)
        with torch.autocast(device, enabled=False):
            positions, which, sizes = torch.unique_consecutive(place, return_inverse=True, return_counts=True)
            out = _Results.make(h, r, w2, exact, grad)
            label, known = vocab.to_draft(label)
            work = _Work(config, vocab, vocab.draft_head.to(fast), w2.to(fast), label, known, which, exact, terms)
            rows = max(1, _BLOCK_BYTES.get(device, 64 << 20) // (4 * vocab.size))
            for blocks in _chunks(_blocks(sizes.tolist(), min(rows, config.chunk)), config.chunk):
                p0, p1, s0, s1 = blocks[0][0], blocks[-1][1], blocks[0][2], blocks[-1][3]
                seen = vocab.target_logits(teacher[positions[p0:p1]])
                work.chunk(out, blocks, h[s0:s1].to(fast), r[s0:s1].to(fast), seen, weight[s0:s1])
        ctx.grads = out.gradients(w2.shape)
        loss = ((config.ce * out.ce + config.kl * out.kl + config.tv * out.l1) * weight).sum()
        ctx.mark_non_differentiable(out.ce, out.kl, out.l1)
        return loss, out.ce, out.kl, out.l1

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor, *unused: Tensor) -> Any:
        if ctx.grads is None:
            raise RuntimeError("the objective's gradients are formed once; run it again for a second backward")
        h, r, w2 = ctx.grads
        ctx.grads = None  # so that autograd may take the buffers over instead of copying them
        return h.mul_(scale), r.mul_(scale), w2.mul_(scale) if w2.numel() else None, *[None] * 8


def block_terms(
    logits: Tensor, p: Tensor, which: Tensor, label: Tensor, known: Tensor | None, share: Tensor | None,
    weights: tuple[float, float, float], grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """logits [C, Vd], teacher p [P, Vd] in float32, which [C] row of p, label [C] and where it is `known` [C],
    target's mass on what can be drafted `share` [C], (ce, kl, tv) -> ce, kl, L1, scale, each [C]. The logits are
    overwritten: with `grad`, scale times what they then hold is their gradient. All between is in p's dtype.

    d ce = q - onehot; d kl = share q - p; d L1 = q (s - <q, s>) with s = sign(q - p). Passes over [C, Vd] are what
    this costs: so q stays e = Z q, gradients are divided by one of the weights, and `scale` makes up for both.
    """
    ce_weight, kl_weight, tv_weight = weights
    unit = tv_weight or ce_weight or kl_weight
    x, at = logits.to(p.dtype), label[:, None]
    x = x.sub_(x.amax(-1, keepdim=True))
    ce = -x.gather(-1, at)[:, 0]
    d = p.index_select(0, which)
    kl = -(d * x).sum(-1) if kl_weight else torch.zeros_like(ce)
    e = x.exp_()
    z = e.sum(-1, keepdim=True)
    d = torch.addcmul(e, d, -z, out=d)  # Z (q - p)
    l1 = d.abs().sum(-1)  # vector_norm sums in sequence: 1e-5 off at V = 150,000
    if grad:
        # the gradient's factor of e, but for tv's sign
        pull = torch.full_like(ce, ce_weight) if known is None else ce_weight * known
        push = pull * -z[:, 0] / unit
        pull = pull if share is None else pull + kl_weight * (share - 1)
        if tv_weight:
            signed = d.sign().mul_(e)
            pull = pull[:, None] / unit - signed.sum(-1, keepdim=True) / z
            g = torch.addcmul(signed, e, pull, out=e)
        elif known is None and share is None:
            g = e if ce_weight else d  # of which `unit` is the weight
        else:
            g = e.mul_(pull[:, None] / unit)
        if kl_weight and g is not d:
            g.add_(d, alpha=kl_weight / unit)  # -p = (q - p) - q; the q is in `pull`
        g.scatter_add_(-1, at, push[:, None])
        if g is not logits:
            logits.copy_(g)
    z = z[:, 0]
    log_z = z.log()
    ce = ce + log_z
    kl = kl + (log_z if share is None else log_z * share) if kl_weight else kl
    l1 = l1 / z
    if known is not None:
        ce = ce * known
    if share is not None:
        l1 = l1 + (1 - share).clamp(min=0)
    return ce, kl, l1, unit / z


def law(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """softmax(logits) [P, V] in `dtype`; may overwrite the logits. Apart, its steps take half of softmax's time."""
    e = logits.to(dtype)
    e = e.sub_(e.amax(-1, keepdim=True)).exp_()
    return e.mul_(1 / e.sum(-1, keepdim=True))


@dataclass(frozen=True)
class _Work:
    """What every chunk needs."""

    config: LossConfig
    vocab: Vocab
    head: Tensor
    w2: Tensor
    label: Tensor
    known: Tensor | None
    which: Tensor
    exact: torch.dtype
    terms: Callable[..., Any]

    def chunk(self, out: _Results, blocks: list[Span], h: Tensor, r: Tensor, seen: Tensor, weight: Tensor) -> None:
        """h [C, D], r [C, R], the target's logits at its positions `seen` [P, V], weight [C]."""
        c, cap = self.config, self.vocab.softcap
        logits = F.linear(h, self.head)
        base = logits.clone() if cap is not None and self.w2.numel() else logits  # the cap is on the base logits only
        if cap is None and self.w2.numel():
            logits.addmm_(r, self.w2.T)
        p0, s0 = blocks[0][0], blocks[0][2]
        scale = torch.empty_like(weight)
        for pa, pb, sa, sb in blocks:
            p, mass = self.vocab.keep(law(seen[pa - p0 : pb - p0], self.exact))
            cut, here = slice(sa, sb), slice(sa - s0, sb - s0)
            which, label = self.which[cut] - pa, self.label[cut]
            known = None if self.known is None else self.known[cut]
            x, tanh = logits[here], None
            if cap is not None:
                tanh = (x.to(self.exact) / cap).tanh_()
                x = tanh * cap
                if self.w2.numel():
                    x = x.addmm_(r[here].to(x.dtype), self.w2.T.to(x.dtype))
            share = None if mass is None else mass[which]
            # a size of 1 would be a graph of its own
            terms = self.terms if sb - sa > 1 and pb - pa > 1 else block_terms
            out.ce[cut], out.kl[cut], out.l1[cut], scale[here] = terms(
                x, p, which, label, known, share, (c.ce, c.kl, c.tv), out.wanted
            )
            if tanh is not None and out.wanted:
                logits[here].copy_(x)
                base[here].copy_(x.mul_(1 - tanh.square_()))
        if out.wanted:
            out.add(slice(s0, blocks[-1][3]), logits, base, r, self.head, self.w2, weight * scale)


@dataclass
class _Results:
    """What outlives a chunk: per-slot losses, and gradients of h, r and w2 where they are wanted."""

    ce: Tensor
    kl: Tensor
    l1: Tensor
    d_h: Tensor
    d_r: Tensor
    d_w2: Tensor
    """[R, Vd]: transposed, so that a chunk's product is added to it in the order it lies in."""
    wanted: bool

    @staticmethod
    def make(h: Tensor, r: Tensor, w2: Tensor, exact: torch.dtype, grad: bool) -> _Results:
        ce, kl, l1 = (h.new_zeros(len(h), dtype=exact) for _ in range(3))
        shapes = (h.shape, r.shape, w2.shape[::-1]) if grad else ((0,),) * 3
        d_h, d_r, d_w2 = (x.new_zeros(shape) for x, shape in zip((h, r, w2), shapes))
        return _Results(ce, kl, l1, d_h, d_r, d_w2, grad)

    def add(self, cut: slice, g: Tensor, g_base: Tensor, r: Tensor, head: Tensor, w2: Tensor, weight: Tensor) -> None:
        """g [C, Vd]: the gradient by a slot's logits, to be scaled by `weight` [C]; g_base: by those before the cap."""
        self.d_h[cut] = (g_base @ head).to(self.d_h.dtype).mul_(weight[:, None])
        if w2.numel():
            self.d_r[cut] = (g @ w2).to(self.d_r.dtype).mul_(weight[:, None])
            self.d_w2 += (r * weight[:, None]).to(g.dtype).T @ g

    def gradients(self, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor] | None:
        return (self.d_h, self.d_r, self.d_w2.T.reshape(shape)) if self.wanted else None


def _blocks(sizes: list[int], limit: int) -> Iterator[Span]:
    """Cut positions of sizes[p] slots into blocks of at most `limit` slots (or one position)."""
    p0, s0, s1 = 0, 0, 0
    for p, size in enumerate(sizes):
        if s1 > s0 and s1 + size - s0 > limit:
            yield p0, p, s0, s1
            p0, s0 = p, s1
        s1 += size
    if s1 > s0:
        yield p0, len(sizes), s0, s1


def _chunks(blocks: Iterator[Span], limit: int) -> Iterator[list[Span]]:
    """Blocks in a row that hold at most `limit` slots together (or one block)."""
    group: list[Span] = []
    for block in blocks:
        if group and block[3] - group[0][2] > limit:
            yield group
            group = []
        group.append(block)
    if group:
        yield group
