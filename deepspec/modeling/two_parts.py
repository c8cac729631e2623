"""Attention over two parts, one softmax over both: a context that all groups of queries share, of which each sees some
places, and places of a group's own, which it sees whole.

Scores with the context are made slice by slice of groups, and a slice leaves out the places that none of its groups
sees. What the backward pass needs of them is kept, or made again from the largest score and the sum of each query.

Letters: B rows, T places of the context, A groups, G queries of a group (a block's slots), Q heads, K kv heads, R heads
a kv head, M = R * G, H head dim, W own places of a group, C groups of a slice, S places it looks at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .own import Own
from .sizes import rounded

SLICE = 128
"""Fewest queries of a slice, heads that share keys counted."""
SCORES_ALIVE = 1 << 25
"""Most scores of a slice (128 MiB in float32)."""


class _Slice(NamedTuple):
    groups: int
    """C."""
    places: slice
    """Which places of the context they look at; what lies outside none of them sees."""
    hidden: Tensor | None
    """[B, 1, C, 1, 1 or G, S'] what of the last S' places each does not see; they all see what lies before these."""


class TwoParts:
    """Which places of the context each group sees, and attention over these and its own."""

    def __init__(
        self, sees: Callable[[slice], Tensor], sizes: tuple[int, int, int, int], heads: tuple[int, int], kept: int
    ) -> None:
        """sees(cut): [B, C, 1 or G, T] bool, what groups `cut` see. sizes: B, A, G, T; heads: Q, K. kept: most scores
        that the backward pass is spared to make again."""
        (B, A, G, T), (Q, K) = sizes, heads
        self.keep, M = kept >= B * A * G * Q * T, Q // K * G
        width = max(1, min(max(-(-SLICE // M), -(-A // 8)), SCORES_ALIVE // max(1, B * G * Q * T)))
        cuts = [slice(start, min(start + width, A)) for start in range(0, A, width)]
        seen = [sees(cut) for cut in cuts]
        self.slices: list[_Slice] = []
        for cut, mask, (first, whole, end) in zip(cuts, seen, _bounds(seen), strict=True):
            first, whole, end = _widened(first, whole, end, T, mask.device.type)
            hidden = None if whole == end else ~mask[:, None, :, None, :, whole:end]
            self.slices.append(_Slice(cut.stop - cut.start, slice(first, end), hidden))

    def __call__(self, q: Tensor, context: tuple[Tensor, Tensor], own: Own, scale: float) -> Tensor:
        """q [B, A, G, Q, H]; context keys and values as `turned` gives them; what `own` holds by now
        -> [B, A, G, Q, H]. A query that sees no place is NaN."""
        out: Tensor = _Attention.apply(q, *context, self, own, scale, *own.links)
        return out


def turned(x: Tensor) -> Tensor:
    """Keys or values of a context [B, T, K, H] -> [BK, T, H]."""
    return x.transpose(1, 2).contiguous().flatten(0, 1)


def _bounds(seen: list[Tensor]) -> list[list[int]]:
    """For each of seen [B, C, ..., T]: the first place that any query sees, the first from which not all of them see
    everything, the end of what any sees. Without data (a dry run on fake tensors) that is 0, 0 and T."""
    from torch._subclasses.fake_tensor import FakeTensor

    if not seen or isinstance(seen[0], FakeTensor):
        return [[0, 0, x.shape[-1]] for x in seen]
    flat = [x.flatten(0, -2) for x in seen]
    anyone, everyone = torch.stack([x.any(0) for x in flat]), torch.stack([x.all(0) for x in flat])  # [slices, T]
    place = torch.arange(anyone.shape[1] + 1, device=anyone.device)
    end = place[1:].where(anyone, 0).amax(1)
    first = place[:-1].where(anyone, place[-1]).amin(1).minimum(end)
    whole = place[:-1].where(~everyone & (place[:-1] >= first[:, None]), place[-1]).amin(1).minimum(end)
    bounds: list[list[int]] = torch.stack([first, whole, end], 1).tolist()  # one synchronisation for all
    return bounds


def _widened(first: int, whole: int, end: int, T: int, device: str) -> tuple[int, int, int]:
    """Bounds of a slice, a few places more where its size would be a new one for the machine."""
    size = min(T, rounded(end - first, device))
    start = max(0, min(first, T - size))
    return start, start if start < first else whole, start + size


class _Attention(torch.autograd.Function):
    """TwoParts' computation. Both parts share one sum Z of exp(S - top), so with P = exp(S - top) / Z the gradients of
    scores are P * (dP - <out, d out>), whichever part a score is in. 1 / Z scales rows: it is applied to d out.

    Rows and kv heads are one dimension in front, [BK, A * M, ...]; a slice is C * M of the queries there.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, view: TwoParts, own: Own, scale: float, *links: Tensor
    ) -> Tensor:
        (B, A, G, Q, _), K = q.shape, len(k) // len(q)
        M, exact = Q // K * G, torch.promote_types(q.dtype, torch.float32)
        keep, kept = view.keep and any(ctx.needs_input_grad), []
        sizes = [piece.groups * M for piece in view.slices]
        with torch.autocast(q.device.type, enabled=False):
            queries = _front(q, K, scale)
            top = queries.new_full((B * K, A * M, 1), -torch.inf, dtype=exact)
            total = torch.empty_like(top)
            out, near = torch.empty_like(queries, dtype=v.dtype), None
            if own.used:
                near = (_groups(queries, A) @ own.keys.mT).to(exact).view(B * K, A * M, -1)
                near[..., own.used :] = -torch.inf
                torch.amax(near, -1, keepdim=True, out=top)
            parts = (x.split(sizes, 1) for x in (queries, top, total, out))
            for piece, part, best, z, seen in zip(view.slices, *parts, strict=True):
                p = _scores(part, k[:, piece.places], piece.hidden, (B, K, G), exact)
                if p.shape[-1]:
                    torch.maximum(best, p.amax(-1, keepdim=True), out=best)
                torch.sum(p.sub_(best).exp_(), -1, keepdim=True, out=z)
                torch.bmm(p.to(v.dtype), v[:, piece.places], out=seen)
                kept.append(p if keep else None)
            if near is not None:
                near.sub_(top).exp_()
                total += near.sum(-1, keepdim=True)
                out = _groups(out.to(exact), A).add_(_groups(near.to(v.dtype), A) @ own.values)
            share = total.reciprocal_()
            result = _back(out, share, q, K)
        ctx.view, ctx.gradients, ctx.scale, ctx.links = view, own.gradients, scale, len(links)
        added = (own.keys, own.values) if own.used else (None, None)
        ctx.save_for_backward(queries, k, v, *added, result, near, top, share, *kept)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> Any:
        queries, k, v, keys, values, out, near, top, share, *kept = ctx.saved_tensors
        B, A, G, _, _ = out.shape
        K, exact = len(k) // B, top.dtype
        sizes = [piece.groups * top.shape[1] // A for piece in ctx.view.slices]
        with torch.autocast(k.device.type, enabled=False):
            mean = _front((d_out.to(exact) * out).sum(-1, keepdim=True), K, share)
            d = _front(d_out, K, share)
            d_k, d_v = (torch.zeros_like(x, dtype=exact) for x in (k, v))
            d_q = torch.empty_like(queries)
            parts = (x.split(sizes, 1) for x in (queries, d, mean, top, d_q))
            for piece, p, qs, ds, less, best, d_qs in zip(ctx.view.slices, kept, *parts, strict=True):
                at = piece.places
                if p is None:
                    p = _scores(qs, k[:, at], piece.hidden, (B, K, G), exact).sub_(best).exp_()
                d_s = (ds @ v[:, at].mT).to(exact).sub_(less).mul_(p).to(k.dtype)
                _plus(d_v[:, at], p.to(v.dtype).mT, ds)
                _plus(d_k[:, at], d_s.mT, qs)
                torch.bmm(d_s, k[:, at], out=d_qs)
            d_q = d_q.to(exact)
            if near is not None:
                queries, d, near, mean = (_groups(x, A) for x in (queries, d, near, mean))
                d_s = (d @ values.mT).to(exact).sub_(mean).mul_(near).to(k.dtype)
                _plus(_groups(d_q, A), d_s, keys)
                own_k, own_v = ctx.gradients.of(keys, values, exact)
                _plus(own_k, d_s.mT, queries)
                _plus(own_v, near.to(v.dtype).mT, d)
        return _back(d_q, ctx.scale, out, K), d_k.to(k.dtype), d_v.to(k.dtype), *[None] * (3 + ctx.links)


def _scores(q: Tensor, k: Tensor, hidden: Tensor | None, sizes: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """q [BK, C * M, H] (scaled), k [BK, S, H]; sizes: B, K, G -> [BK, C * M, S], -inf where hidden."""
    scores = (q @ k.mT).to(dtype)
    if hidden is not None:
        B, K, G = sizes
        partly = scores.view(B, K, hidden.shape[2], -1, G, scores.shape[-1])[..., -hidden.shape[-1] :]
        partly.masked_fill_(hidden, -torch.inf)
    return scores


def _plus(total: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """total += x @ y, in place. Of a part of a larger tensor baddbmm would be a product for each matrix on a CPU."""
    return total.baddbmm_(x, y) if total.dtype == x.dtype and total.is_contiguous() else total.add_(x @ y)


def _groups(x: Tensor, A: int) -> Tensor:
    """[BK, A * M, ...] -> [BKA, M, ...]."""
    return x.unflatten(1, (A, -1)).flatten(0, 1)


def _front(x: Tensor, K: int, scale: Tensor | float) -> Tensor:
    """[B, A, G, Q, H] -> [BK, A * M, H], times a number or [BK, A * M, 1]; in one pass."""
    x = x.unflatten(3, (K, -1)).permute(0, 3, 1, 4, 2, 5)
    by = scale.view(*x.shape[:-1], 1) if isinstance(scale, Tensor) else scale
    return torch.mul(x, by, out=x.new_empty(x.shape)).flatten(2, 4).flatten(0, 1)


def _back(x: Tensor, scale: Tensor | float, like: Tensor, K: int) -> Tensor:
    """[BK, A * M, H], times a number or [BK, A * M, 1] -> [B, A, G, Q, H] as `like`; in one pass."""
    B, A, G, Q, _ = like.shape

    def turn(y: Tensor) -> Tensor:
        return y.view(B, K, A, Q // K, G, -1).permute(0, 2, 4, 1, 3, 5)

    x, by = turn(x), turn(scale) if isinstance(scale, Tensor) else scale
    return torch.mul(x, by, out=like.new_empty(x.shape)).flatten(3, 4)
