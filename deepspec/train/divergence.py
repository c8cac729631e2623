"""ce, kl and tv between a drafter's slots and the target, with their gradients formed on the way.

Two sizes of work. A *chunk* is what the products with the vocabulary see: large, so that they are fast; of it only
logits in the matrices' own dtype are alive. A *block* of a chunk is what softmaxes and differences see, in float32:
small, so that it stays in a cache.

Letters: B rows, T positions, N supervised slots, P distinct positions of them, D hidden, R rank, V vocabulary (Vd of
the drafter), C slots of a chunk or block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import LossConfig
from ..modeling.sizes import rounded
from ..modeling.vocab import Vocab

_BLOCK_BYTES = {"cpu": (512 << 10, 3 << 20)}
"""Of one float32 tensor of a block, of which there are three, and of the target's law, for each thread. So small on a
CPU that the three stay in a core's own cache."""
_MOST_BYTES = (64 << 20, 64 << 20)

Span = tuple[int, int, int, int]
"""Positions p0 to p1 and their slots s0 to s1."""


class Divergence(torch.autograd.Function):
    """Weighted sum of ce, kl and tv over slots."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, r: Tensor, w2: Tensor, vocab: Vocab, teacher: Tensor, place: Tensor, label: Tensor,
        weight: Tensor, config: LossConfig, grad: bool, terms: Callable[..., Any], log_z: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """h [N, D], r [N, R], w2 [Vd, R], teacher [B * T, D]; place, label, weight [N] -> loss; ce, kl, L1 [N].

        place is ascending. `terms` is `block_terms`, compiled or not. With log_z [B * T], that of the teacher's logits,
        only those that a drafter keeps are formed.
        """
        device = h.device.type
        fast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else h.dtype
        exact = torch.promote_types(h.dtype, torch.float32)
        with torch.autocast(device, enabled=False):
            positions, which, sizes = torch.unique_consecutive(place, return_inverse=True, return_counts=True)
            out = _Results.make(h, r, w2, exact, grad)
            label, known = vocab.to_draft(label)
            work = _Work(config, vocab, vocab.draft_head.to(fast), w2.to(fast), label, known, which, exact, terms)
            scores, seen = (vocab.target_logits, vocab.size) if log_z is None else (vocab.kept_logits, vocab.draft_size)
            rows = _block_rows(device, vocab.draft_size, seen)
            most = config.slots(vocab.draft_size * fast.itemsize)
            for blocks in _chunks(_blocks(sizes.tolist(), min(rows, most)), most):
                p0, p1, s0, s1 = blocks[0][0], blocks[-1][1], blocks[0][2], blocks[-1][3]
                at = positions[p0:p1]
                of_target = scores(teacher[at]), None if log_z is None else log_z[at]
                work.chunk(out, blocks, h[s0:s1].to(fast), r[s0:s1].to(fast), *of_target, weight[s0:s1])
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
        return h.mul_(scale), r.mul_(scale), w2.mul_(scale) if w2.numel() else None, *[None] * 9


def _block_rows(device: str, *sizes: int) -> int:
    """Most rows of a block whose tensors, and the target's law, are so many tokens wide."""
    least = _BLOCK_BYTES.get(device, _MOST_BYTES)
    limits = (min(b * torch.get_num_threads(), most) for b, most in zip(least, _MOST_BYTES, strict=True))
    return max(1, min(limit // (4 * size) for limit, size in zip(limits, sizes, strict=True)))


def block_terms(
    logits: Tensor, p: Tensor, which: Tensor, label: Tensor, known: Tensor | None, share: Tensor | None,
    weights: tuple[float, float, float], grad: bool, room: Sequence[Tensor | None] = (None, None, None),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """logits [C, Vd], teacher p [P, Vd] in float32, which [C] row of p, label [C, 1], where it is `known` [C, 1] (None:
    everywhere), target's mass on what can be drafted `share` [C, 1] (None: 1), weights of ce, kl and tv -> four
    [C, 1]: Z = sum of e, e = exp(logits - largest); logit of the label and p's mean one, less the largest; Z L1.
    The logits are overwritten: with `grad`, unit(weights) / Z times what they then hold is their gradient. room: three
    [C, Vd] in p's dtype to work in.

    d ce = q - onehot; d kl = share q - p; d L1 = q (s - <q, s>) with s = sign(q - p). Passes over [C, Vd] are what
    this costs: so q = e / Z stays e, and gradients stay divided by one of the weights. All between is in p's dtype.
    """
    ce_weight, kl_weight, tv_weight = (w / _unit(weights) for w in weights)
    x, d, spare = _into(room[0], logits, p.dtype), room[1], room[2]
    x = x.sub_(x.amax(-1, keepdim=True))
    at_label, d = x.gather(-1, label), torch.index_select(p, 0, which, out=d)
    mean = torch.mul(d, x, out=spare).sum(-1, keepdim=True) if kl_weight else at_label
    e = x.exp_()
    z = e.sum(-1, keepdim=True)
    plain = known is None and share is None
    only = plain and not (ce_weight or tv_weight)  # then d is the gradient, and nothing needs e
    d = torch.addcmul(e, d, z.neg(), out=e if only else d)  # Z (q - p)
    l1 = torch.abs(d, out=spare).sum(-1, keepdim=True)  # vector_norm sums in sequence: 1e-5 off at V = 150,000
    if not grad:
        return z, at_label, mean, l1
    pull: Any = ce_weight if known is None else ce_weight * known  # of q, but for tv's sign
    if share is not None:
        pull = pull + kl_weight * (share - 1)
    if tv_weight:
        signed = torch.sign(d, out=spare).mul_(e)
        g = torch.addcmul(signed, e, pull - signed.sum(-1, keepdim=True) / z, out=e)
    elif plain:
        g = e if ce_weight else d
    else:
        g = e.mul_(pull)
    if kl_weight and g is not d:
        g.add_(d, alpha=kl_weight)  # -p = (q - p) - q; the q is in `pull`
    if ce_weight:
        push = z * -ce_weight if known is None else z * known * -ce_weight
        g.scatter_add_(-1, label, push)
    if g is not logits:
        logits.copy_(g)
    return z, at_label, mean, l1


def _unit(weights: tuple[float, float, float]) -> float:
    """The weight that `block_terms` leaves out of its gradient."""
    ce, kl, tv = weights
    return tv or ce or kl


def _into(room: Tensor | None, x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`: itself, or a copy in `room`."""
    return x if x.dtype == dtype else x.to(dtype) if room is None else room.copy_(x)


def law(
    logits: Tensor, log_z: Tensor | None, vocab: Vocab, dtype: torch.dtype, room: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The target's logits [P, V], or of what a drafter keeps [P, Vd] and log Z of all [P] -> its law in `dtype` on what
    is kept [P, Vd], and the sum of that [P], None where it is 1; may overwrite the logits. Apart, softmax's steps take
    half of its time."""
    e = _into(room, logits, dtype)
    if log_z is not None:
        p = e.sub_(log_z[:, None]).exp_()
        return p, None if vocab.kept is None else p.sum(-1)
    e = e.sub_(e.amax(-1, keepdim=True)).exp_()
    by = e.sum(-1, keepdim=True).reciprocal_()
    part, mass = vocab.keep(e)
    return part.mul_(by), None if mass is None else mass * by[:, 0]


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

    def chunk(
        self, out: _Results, blocks: list[Span], h: Tensor, r: Tensor, seen: Tensor, log_z: Tensor | None,
        weight: Tensor,
    ) -> None:  # fmt: skip
        """h [C, D], r [C, R], the target's logits `seen` and log_z at its positions as `law` takes them, weight [C]."""
        c, cap, markov = self.config, self.vocab.softcap, self.w2.numel() > 0
        weights = c.ce, c.kl, c.tv
        number = len(h)
        if more := rounded(number, h.device.type, h.dtype) - number:
            h, r = (F.pad(x, (0, 0, 0, more)) for x in (h, r))  # the logits of what is added are 0, and stay so
        logits = F.linear(h, self.head)
        base = logits.clone() if cap is not None and markov else logits  # the cap is on the base logits only
        if cap is None and markov:
            logits.addmm_(r, self.w2.T)
        cut = slice(blocks[0][2], blocks[-1][3])
        label = self.label[cut, None]
        known = None if self.known is None else self.known[cut, None]
        found: list[tuple[Tensor, ...]] = []
        shares: list[Tensor] = []
        # views of all blocks at once: there are many, and a block's passes are short
        sizes, places = [sb - sa for _, _, sa, sb in blocks], [pb - pa for pa, pb, _, _ in blocks]
        first = torch.tensor([pa for pa, *_ in blocks], device=h.device)
        which = self.which[cut] - first.repeat_interleave(torch.tensor(sizes, device=h.device), output_size=number)
        knowns = [None] * len(blocks) if known is None else known.split(sizes)
        log_zs = [None] * len(blocks) if log_z is None else log_z.split(places)
        by_slot = (x[:number].split(sizes) for x in (logits, base, r, which, label))
        views = zip(*by_slot, knowns, seen.split(places), log_zs, strict=True)
        # blocks work in one place, which stays in a cache; on CUDA and in compiled code that is not ours to say
        blank = None if h.is_cuda else h.new_empty(max(places), seen.shape[1], dtype=self.exact)
        room = [] if h.is_cuda else [h.new_empty(max(sizes), len(self.head), dtype=self.exact) for _ in range(3)]
        for x, under, row, here, token, sure, target, total in views:
            p, mass = law(target, total, self.vocab, self.exact, None if blank is None else blank[: len(target)])
            share = None if mass is None else mass[here, None]
            scores, tanh = x, None
            if cap is not None:
                tanh = (x.to(self.exact) / cap).tanh_()
                scores = tanh * cap
                if markov:
                    scores = scores.addmm_(row.to(scores.dtype), self.w2.T.to(scores.dtype))
            # a size of 1 would be a graph of its own
            terms = self.terms if len(x) > 1 and len(p) > 1 else block_terms
            own = [y[: len(x)] for y in room] if terms is block_terms and room else [None] * 3
            found.append(terms(scores, p, here, token, sure, share, weights, out.wanted, own))
            shares += [] if share is None else [share]
            if tanh is not None and out.wanted:
                x.copy_(scores)
                under.copy_(scores.mul_(1 - tanh.square_()))
        z, at_label, mean, l1 = (torch.cat(parts)[:, 0] for parts in zip(*found, strict=True))
        log_q = z.log()
        out.ce[cut] = log_q - at_label if known is None else (log_q - at_label) * known[:, 0]
        share = torch.cat(shares)[:, 0] if shares else None
        if c.kl:
            out.kl[cut] = (log_q if share is None else log_q * share) - mean
        out.l1[cut] = l1 / z if share is None else l1 / z + (1 - share).clamp(min=0)
        if out.wanted:
            scale = F.pad(weight / z * _unit(weights), (0, more))
            out.add(cut, logits, base, r, self.head, self.w2, scale)


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
        """g [C, Vd]: the gradient by a slot's logits, to be scaled by `weight` [C]; g_base: by those before the cap.
        Rows past those of `cut` are 0."""
        n = cut.stop - cut.start
        self.d_h[cut] = (g_base @ head)[:n].to(self.d_h.dtype).mul_(weight[:n, None])
        if w2.numel():
            self.d_r[cut] = (g @ w2)[:n].to(self.d_r.dtype).mul_(weight[:n, None])
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
