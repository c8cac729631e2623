"""A reduced draft vocabulary: which of the target's V tokens a drafter can propose, and how files store that.

A drafter's head costs D * V products a slot, and most of V is hardly ever written. Verification stays exact: a
proposal's law is 0 on tokens left out. Letters: V the target's tokens, Vd the kept ones, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..checked import InputError, require
from .vocab import Vocab

FLUSH = 1 << 20
"""Supervised tokens counted at once."""


def for_training(vocab: Vocab, size: int | None, rows: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> Vocab:
    """The vocabulary of a new drafter with draft_vocab_size `size`: the ids that `rows` supervise most; None: all.

    rows: tokens and loss mask of every training row.
    """
    return vocab if size is None else reduce(vocab, choose(count(rows, vocab.size), size))


def count(rows: Iterable[tuple[Sequence[int], Sequence[bool]]], vocab_size: int) -> Tensor:
    """How often each token is supervised [V] long; rows: (tokens [T], loss mask [T])."""
    counts, waiting = torch.zeros(vocab_size, dtype=torch.long), []
    for tokens, mask in rows:
        waiting += [t for t, m in zip(tokens, mask) if m]
        if len(waiting) > FLUSH:
            counts += torch.bincount(torch.tensor(waiting), minlength=vocab_size)
            waiting.clear()
    return counts + torch.bincount(torch.tensor(waiting, dtype=torch.long), minlength=vocab_size)


def choose(counts: Tensor, size: int) -> Tensor:
    """The `size` most counted ids, ascending [Vd]; equal counts, also zeros, go to lower ids."""
    require(1 <= size <= len(counts), f"drafter.draft_vocab_size must be 1 to {len(counts)}, got {size}")
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def reduce(vocab: Vocab, kept: Tensor, head: Tensor | None = None) -> Vocab:
    """A vocabulary that shares the target's tensors and drafts `kept` [Vd] alone; `vocab` itself where that is all.

    head [Vd, D]: a head of the drafter's own; None: the target's rows.
    """
    kept = kept.to(vocab.head.device)
    if bool((kept[1:] <= kept[:-1]).any()) or not 0 <= int(kept.min()) <= int(kept.max()) < vocab.size:
        raise InputError(f"kept tokens must be strictly increasing and within 0 to {vocab.size - 1}")
    everything = len(kept) == vocab.size
    if head is not None:
        if head.shape != (len(kept), vocab.dim):
            raise InputError(f"a draft head must be [{len(kept)}, {vocab.dim}], got {list(head.shape)}")
        head = head.to(vocab.head)
        if torch.equal(head, vocab.head if everything else vocab.head[kept]):
            head = None
    if everything and head is None:
        return vocab
    return Vocab(
        vocab.embedding.detach(), vocab.head.detach(), softcap=vocab.softcap, embed_scale=vocab.embed_scale,
        kept=None if everything else kept, draft_head=head,
    )  # fmt: skip


def check(config_size: int | None, vocab: Vocab) -> None:
    """ConfigError where a drafter's draft_vocab_size is not the vocabulary's."""
    require(
        (config_size or vocab.size) == vocab.draft_size,
        f"drafter.draft_vocab_size is {config_size}, the vocabulary drafts {vocab.draft_size} of {vocab.size} tokens; "
        "a reduced vocabulary comes from draft_vocab.for_training(target.vocab, size, rows)",
    )


# -- files -------------------------------------------------------------------------------------------------------------


def to_tensors(vocab: Vocab) -> dict[str, Tensor]:
    """What a saved drafter carries: nothing where it drafts the target's tokens with the target's head."""
    tensors: dict[str, Tensor] = {}
    if vocab.has_own_head:
        tensors["lm_head.weight"] = vocab.draft_head.detach()
    if vocab.kept is not None:  # an identity map would cost servers a scatter a step
        mask = torch.zeros(vocab.size, dtype=torch.bool)
        mask[vocab.kept.cpu()] = True
        # offsets: target id = draft id + d2t[draft id]
        tensors |= {"d2t": vocab.kept.cpu() - torch.arange(vocab.draft_size), "t2d": mask}
    return tensors


def from_tensors(vocab: Vocab, tensors: dict[str, Tensor]) -> Vocab:
    """The vocabulary of a drafter's file; takes lm_head.weight, d2t and t2d out of `tensors`. InputError where the map
    is none."""
    head, d2t, t2d = (tensors.pop(name, None) for name in ("lm_head.weight", "d2t", "t2d"))
    size = vocab.size if head is None and d2t is None else len(d2t if head is None else head)  # type: ignore[arg-type]
    if d2t is None:
        if size != vocab.size and t2d is None:
            raise InputError(f"lm_head.weight has {size} rows of {vocab.size} and there is no d2t to say which")
        kept = torch.arange(size) if t2d is None else t2d.nonzero()[:, 0]
    else:
        kept = torch.arange(len(d2t)) + d2t.long()  # offsets, not ids
        if len(kept) != size:
            raise InputError(f"d2t has {len(kept)} entries, lm_head.weight {size} rows")
        bad = "" if bool((kept[1:] > kept[:-1]).all()) else "does not increase"
        if not 0 <= int(kept.min()) <= int(kept.max()) < vocab.size:
            bad = f"leaves 0 to {vocab.size - 1}"
        if bad:
            raise InputError(f"d2t is no map of offsets (target id = draft id + d2t): it {bad}")
    if t2d is not None and not torch.equal(t2d.bool().nonzero()[:, 0], kept):
        raise InputError("t2d and d2t do not name the same tokens")
    return reduce(vocab, kept, head)
