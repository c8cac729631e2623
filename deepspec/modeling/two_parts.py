"""Attention over two parts, one softmax over both: a context that all groups of queries share, of which each sees some
places, and places of a group's own, which it sees whole.

Scores with the context are made slice by slice of groups, and a slice leaves out the places that none of its groups
sees. What the backward pass needs of them is kept, or made again from the largest score and the sum of each query.

Letters: B rows, T places of the context, A groups, G queries of a group (a block's slots), Q heads, K kv heads, R heads
a kv head, M = R * G, H head dim, W own places of a group, C groups of a slice, S places it looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

SLICE = 128
"""Fewest queries of a slice, heads that share keys counted."""
SCORES_ALIVE = 1 << 25
"""Most scores of a slice (128 MiB in float32)."""


class _Slice(NamedTuple):
    cut: slice
    """Which groups."""
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
            hidden = None if whole == end else ~mask[:, None, :, None, :, whole:end]
            self.slices.append(_Slice(cut, slice(first, end), hidden))

    @torch.compiler.disable  # slices are of another size in every batch
    def __call__(
        self, q: Tensor, context: tuple[Tensor, Tensor], own: Sequence[tuple[Tensor, Tensor]], scale: float
    ) -> Tensor:
        """q [B, A, G, Q, H]; context keys and values [B, T, K, H], own ones in parts [B, A, w, K, H] whose w add up to
        W -> [B, A, G, Q, H]. A query that sees no place is NaN."""
        out: Tensor = _Attention.apply(q, *context, self, scale, *(x for pair in own for x in pair))
        return out


def _bounds(seen: list[Tensor]) -> list[list[int]]:
    """For each of seen [B, C, ..., T]: the first place that any query sees, the first from which not all of them see
    everything, the end of what any sees. Without data (a dry run on fake tensors) that is 0, 0 and T."""
    from torch._subclasses.fake_tensor import FakeTensor

    if not seen or isinstance(seen[0], FakeTensor):
        return [[0, 0, x.shape[-1]] for x in seen]
    T, found = seen[0].shape[-1], []
    place = torch.arange(T, device=seen[0].device)
    for x in seen:
        flat = x.flatten(0, -2)
        anyone = flat.any(0)
        first, end = place.where(anyone, T).amin(), (place + 1).where(anyone, 0).amax()
        partly = ~flat.all(0) & (place >= first)
        found.append(torch.stack([first.minimum(end), place.where(partly, T).amin().minimum(end), end]))
    bounds: list[list[int]] = torch.stack(found).tolist()  # one synchronisation for all
    return bounds


class _Attention(torch.autograd.Function):
    """TwoParts' computation. Both parts share one sum Z of exp(S - top), so with P = exp(S - top) / Z the gradients of
    scores are P * (dP - <out, d out>), whichever part a score is in. 1 / Z scales rows: it is applied to d out."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, view: TwoParts, scale: float, *own: Tensor) -> Tensor:
        (B, A, G, Q, _), K = q.shape, k.shape[2]
        exact, keep = torch.promote_types(q.dtype, torch.float32), view.keep and any(ctx.needs_input_grad)
        kept: list[Tensor | None] = []
        with torch.autocast(q.device.type, enabled=False):
            queries, keys, values = _front(q, K, scale), _turned(k), _turned(v)
            top = queries.new_full((B, K, A, Q // K * G, 1), -torch.inf, dtype=exact)
            total, out = torch.zeros_like(top), torch.zeros_like(queries, dtype=exact)
            near = None
            if own:
                near = (queries @ _gathered(own[0::2]).mT).to(exact)
                top = near.amax(-1, keepdim=True)
            for cut, places, hidden in view.slices:
                p, best = _scores(queries[:, :, cut], keys[:, :, places], hidden, G, exact), top[:, :, cut]
                if p.numel():
                    torch.maximum(best, p.amax(-1, keepdim=True), out=best)
                    p.sub_(best).exp_()
                    total[:, :, cut] = p.sum(-1, keepdim=True)
                    out[:, :, cut] = _product(p.to(v.dtype), values[:, :, places])
                kept.append(p if keep else None)
            if near is not None:
                near.sub_(top).exp_()
                total += near.sum(-1, keepdim=True)
                out += near.to(v.dtype) @ _gathered(own[1::2])
            share = total.reciprocal_()
            result = _back(out, share, q)
        ctx.view, ctx.scale, ctx.made = view, scale, (kept, near, top, share)
        ctx.save_for_backward(q, k, v, result, *own)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> Any:
        q, k, v, out, *own = ctx.saved_tensors
        kept, near, top, share = ctx.made
        (B, T, K, H), G, exact = k.shape, q.shape[2], top.dtype
        with torch.autocast(q.device.type, enabled=False):
            queries, keys, values = _front(q, K, ctx.scale), _turned(k), _turned(v)
            mean = _front((d_out.to(exact) * out).sum(-1, keepdim=True), K, share)
            d = _front(d_out, K, share)
            d_q = torch.zeros_like(queries, dtype=exact)
            d_k, d_v = (torch.zeros(B, K, T, H, dtype=exact, device=k.device) for _ in "kv")
            for (cut, places, hidden), p in zip(ctx.view.slices, kept, strict=True):
                qs, ds, keys_s = queries[:, :, cut], d[:, :, cut], keys[:, :, places]
                if p is None:
                    p = _scores(qs, keys_s, hidden, G, exact).sub_(top[:, :, cut]).exp_()
                d_s = _product(ds, values[:, :, places].mT).to(exact).sub_(mean[:, :, cut]).mul_(p).to(q.dtype)
                d_v[:, :, places] += p.to(v.dtype).flatten(2, 3).mT @ ds.flatten(2, 3)
                d_k[:, :, places] += d_s.flatten(2, 3).mT @ qs.flatten(2, 3)
                d_q[:, :, cut] = _product(d_s, keys_s)
            d_own: list[Tensor] = []
            if own:
                own_k, own_v = _gathered(own[0::2]), _gathered(own[1::2])
                d_s = (d @ own_v.mT).to(exact).sub_(mean).mul_(near).to(q.dtype)
                d_q += d_s @ own_k
                widths = [x.shape[2] for x in own[0::2]]
                # [B, K, A, W, H] of keys and of values
                parts = (x.split(widths, 3) for x in (d_s.mT @ queries, near.to(v.dtype).mT @ d))
                d_own = [x.permute(0, 2, 3, 1, 4) for pair in zip(*parts, strict=True) for x in pair]
        return _back(d_q, ctx.scale, q), d_k.transpose(1, 2).to(k), d_v.transpose(1, 2).to(v), None, None, *d_own


def _scores(q: Tensor, k: Tensor, hidden: Tensor | None, G: int, dtype: torch.dtype) -> Tensor:
    """q [B, K, C, M, H] (scaled), k [B, K, S, H] -> [B, K, C, M, S], -inf where hidden."""
    scores = _product(q, k.mT).to(dtype)
    if hidden is not None:
        partly = scores.unflatten(3, (-1, G))[..., scores.shape[-1] - hidden.shape[-1] :]
        partly.masked_fill_(hidden, -torch.inf)
    return scores


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x [B, K, C, M, N] @ y [B, K, N, S]: one product for all queries of a slice that share keys."""
    return (x.flatten(2, 3) @ y).unflatten(2, x.shape[2:4])


def _front(x: Tensor, K: int, scale: Tensor | float) -> Tensor:
    """[B, A, G, Q, H] -> [B, K, A, M, H], times a number or [B, K, A, M, 1]; in one pass."""
    x = x.unflatten(3, (K, -1)).permute(0, 3, 1, 4, 2, 5)
    by = scale.unflatten(3, x.shape[3:5]) if isinstance(scale, Tensor) else scale
    return torch.mul(x, by, out=x.new_empty(x.shape)).flatten(3, 4)


def _back(x: Tensor, scale: Tensor | float, like: Tensor) -> Tensor:
    """[B, K, A, M, H], times a number or [B, K, A, M, 1] -> [B, A, G, Q, H] as `like`; in one pass."""

    def turn(y: Tensor) -> Tensor:
        return y.unflatten(3, (-1, like.shape[2])).permute(0, 2, 4, 1, 3, 5)

    turned, by = turn(x), turn(scale) if isinstance(scale, Tensor) else scale
    return torch.mul(turned, by, out=like.new_empty(turned.shape)).flatten(3, 4)


def _turned(x: Tensor) -> Tensor:
    """[B, T, K, H] -> [B, K, T, H]."""
    return x.transpose(1, 2).contiguous()


def _gathered(parts: Sequence[Tensor]) -> Tensor:
    """[B, A, w, K, H] of each part -> [B, K, A, W, H]."""
    whole = torch.cat(list(parts), 2) if len(parts) > 1 else parts[0]
    return whole.permute(0, 3, 1, 2, 4).contiguous()
