"""Attention of an unrolled drafter: every row's slot 0 as context, and a row's own earlier slots.

One softmax over both parts. Scores with the context are made slice by slice of queries and made again in the backward
pass, from the log of their sum, so that what is kept grows with A * g and never with A * T. A slice leaves out the
places that none of its rows sees.

Letters: B rows, T positions, A anchors, g earlier slots, Q heads, K kv heads, R heads a kv head, H head dim, C queries
of a slice, S places it looks at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

SLICE = 64
"""Fewest queries of a slice."""
SCORES_ALIVE = 1 << 25
"""Most scores alive at once (128 MiB in float32)."""


def sees(row: Tensor, row_document: Tensor, place: Tensor, document: Tensor) -> Tensor:
    """The rule, for broadcastable tensors: every slot of row `row` sees the slots 0 of rows up to it (itself included)
    in its own document. Of later slots it sees its own alone."""
    return (place <= row) & (document == row_document)


class _Slice(NamedTuple):
    cut: slice
    """Which queries."""
    places: slice
    """Which places of the context they look at; what lies outside none of them sees."""
    hidden: Tensor | None
    """[B, 1, C, 1, S'] what of the last S' places each does not see; they all see what lies before these."""


class Unrolled:
    """What the slots of `rows` [B, A] see, each row in its own document."""

    def __init__(self, rows: Tensor, document: Tensor, scale: float, heads: int) -> None:
        """rows [B, A] long, document [B, T], heads Q."""
        (B, A), T = rows.shape, document.shape[1]
        self.scale = scale
        width = max(1, min(max(SLICE, -(-A // 8)), SCORES_ALIVE // (B * heads * T)))
        cuts = [slice(start, min(start + width, A)) for start in range(0, A, width)]
        own, place = document.gather(1, rows), torch.arange(T, device=rows.device)
        seen = [sees(rows[:, cut, None], own[:, cut, None], place, document[:, None]) for cut in cuts]  # [B, C, T]
        self.slices: list[_Slice] = []
        for cut, mask, (first, whole, end) in zip(cuts, seen, _bounds(seen)):
            hidden = None if whole == end else ~mask[:, None, :, None, whole:end]
            self.slices.append(_Slice(cut, slice(first, end), hidden))

    def __call__(self, q: Tensor, first: tuple[Tensor, Tensor], own: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """q [B, A, Q, H]; keys and values of slot 0 of all rows [B, T, K, H], of own earlier slots g x [B, A, K, H]
        -> [B, A, Q, H]."""
        flat = [x for pair in own for x in pair]
        return _UnrolledAttention.apply(q, *first, self, *flat)


def _bounds(seen: list[Tensor]) -> list[list[int]]:
    """For each of seen [B, C, T]: the first place that any query sees, the first from which not all of them see
    everything, the end of what any sees. Without data (a dry run on fake tensors) that is 0, 0 and T."""
    from torch._subclasses.fake_tensor import FakeTensor

    if not seen or isinstance(seen[0], FakeTensor):
        return [[0, 0, x.shape[-1]] for x in seen]
    T, found = seen[0].shape[-1], []
    place = torch.arange(T, device=seen[0].device)
    for x in seen:
        anyone = x.any(1).any(0)
        first, end = place.where(anyone, T).min(), (place + 1).where(anyone, 0).max()
        partly = ~x.all(1).all(0) & (place >= first)
        found.append(torch.stack([first, place.where(partly, T).min().minimum(end), end]))
    bounds: list[list[int]] = torch.stack(found).tolist()  # one synchronisation for all
    return bounds


class _UnrolledAttention(torch.autograd.Function):
    """Unrolled's computation. Both parts share one log-sum L, so the gradients of scores are P * (dP - <out, d out>)
    with P = exp(S - L), whichever part a score is in."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, view: Unrolled, *own: Tensor) -> Tensor:
        (B, A, Q, _), K = q.shape, k.shape[2]
        exact = torch.promote_types(q.dtype, torch.float32)
        with torch.autocast(q.device.type, enabled=False):
            queries, keys, values = _front(q, k, v, view.scale)
            top = q.new_full((B, K, A, Q // K, 1), -torch.inf, dtype=exact)
            total, out = torch.zeros_like(top), torch.zeros_like(queries, dtype=exact)
            for cut, places, hidden in view.slices:
                scores = _scores(queries[:, :, cut], keys[:, :, places], hidden, exact)
                top[:, :, cut] = best = scores.amax(-1, keepdim=True)
                p = scores.sub_(best).exp_()
                total[:, :, cut] = p.sum(-1, keepdim=True)
                out[:, :, cut] = _product(p.to(v.dtype), values[:, :, places])
            if own:
                own_k, own_v = _stack(own[0::2]), _stack(own[1::2])
                near = (queries @ own_k.mT).to(exact)
                best = torch.maximum(top, near.amax(-1, keepdim=True))
                p, fade = near.sub_(best).exp_(), top.sub(best).exp_()
                total = total.mul_(fade).add_(p.sum(-1, keepdim=True))
                out = out.mul_(fade).add_(p.to(v.dtype) @ own_v)
                top = best
            out = out.div_(total).transpose(1, 2).flatten(2, 3).to(q.dtype)
        ctx.view, ctx.log_sum = view, top.add_(total.log_())
        ctx.save_for_backward(q, k, v, out, *own)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> Any:
        q, k, v, out, *own = ctx.saved_tensors
        view: Unrolled = ctx.view
        (B, T, K, H), exact = k.shape, ctx.log_sum.dtype
        with torch.autocast(q.device.type, enabled=False):
            queries, keys, values = _front(q, k, v, view.scale)
            d = _heads(d_out, K).contiguous()
            mean = (d.to(exact) * _heads(out, K)).sum(-1, keepdim=True)
            d_q = torch.zeros_like(queries, dtype=exact)
            d_k, d_v = (torch.zeros(B, K, T, H, dtype=exact, device=k.device) for _ in "kv")
            for cut, places, hidden in view.slices:
                qs, ds, keys_s = queries[:, :, cut], d[:, :, cut], keys[:, :, places]
                p = _scores(qs, keys_s, hidden, exact).sub_(ctx.log_sum[:, :, cut]).exp_()
                d_s = _product(ds, values[:, :, places].mT).to(exact).sub_(mean[:, :, cut]).mul_(p).to(q.dtype)
                d_v[:, :, places] += p.to(v.dtype).flatten(2, 3).mT @ ds.flatten(2, 3)
                d_k[:, :, places] += d_s.flatten(2, 3).mT @ qs.flatten(2, 3)
                d_q[:, :, cut] = _product(d_s, keys_s)
            d_own: list[Tensor] = []
            if own:
                own_k, own_v = _stack(own[0::2]), _stack(own[1::2])
                p = (queries @ own_k.mT).to(exact).sub_(ctx.log_sum).exp_()
                d_s = (d @ own_v.mT).to(exact).sub_(mean).mul_(p).to(q.dtype)
                d_q += d_s @ own_k
                pairs = (d_s.mT @ queries, p.to(v.dtype).mT @ d)  # [B, K, A, g, H]
                d_own = [x.select(3, i).transpose(1, 2) for i in range(len(own) // 2) for x in pairs]
        d_q = d_q.mul_(view.scale).transpose(1, 2).flatten(2, 3).to(q.dtype)
        return d_q, d_k.transpose(1, 2).to(k.dtype), d_v.transpose(1, 2).to(v.dtype), None, *d_own


def _scores(q: Tensor, k: Tensor, hidden: Tensor | None, dtype: torch.dtype) -> Tensor:
    """q [B, K, C, R, H] (scaled), k [B, K, S, H] -> [B, K, C, R, S], -inf where hidden."""
    scores = _product(q, k.mT).to(dtype)
    if hidden is not None:
        scores[..., scores.shape[-1] - hidden.shape[-1] :].masked_fill_(hidden, -torch.inf)
    return scores


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x [B, K, C, R, M] @ y [B, K, M, N]: one product for the R heads that share keys."""
    return (x.flatten(2, 3) @ y).unflatten(2, x.shape[2:4])


def _front(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Heads in front: q [B, K, A, R, H] scaled; k, v [B, K, T, H]."""
    return (
        (_heads(q, k.shape[2]) * scale).contiguous(), k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    )  # fmt: skip


def _heads(x: Tensor, kv_heads: int) -> Tensor:
    """[B, A, Q, H] -> [B, K, A, R, H]."""
    return x.unflatten(2, (kv_heads, -1)).transpose(1, 2)


def _stack(own: Sequence[Tensor]) -> Tensor:
    """g x [B, A, K, H] -> [B, K, A, g, H]."""
    return torch.stack(list(own), 2).permute(0, 3, 1, 2, 4)
