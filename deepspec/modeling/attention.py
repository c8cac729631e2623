"""Attention of anchored blocks over a context: one visibility rule, two backends, and the call that decoding uses.

Letters: B rows, T context positions, A anchors, G slots of a block, N = A * G queries, Q heads, K kv heads, H head dim.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from .own import Own
from .two_parts import TwoParts, turned

Backend = Literal["auto", "flex", "sdpa"]

_SCORES_KEPT = 1 << 26
"""Most scores that are kept for backward (256 MiB in float32) where they are formed one by one; more are made again."""


def sees_context(
    anchor: Tensor, anchor_document: Tensor, position: Tensor, document: Tensor, slot: Tensor | int = 0,
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """The rule, for broadcastable tensors: a block sees context strictly before its anchor, in its own document, and
    with a window only what is less than `window` positions before the slot that looks, as servers count it.

    `anchor` and `position` are places in the row. Within itself a block sees every slot, other blocks never.
    """
    seen = (position < anchor) & (document == anchor_document)
    return seen if window is None else seen & (position > anchor + slot - window)


@dataclass(frozen=True)
class Anchored:
    """Blocks of G slots at `anchors` [B, A] over a context whose places belong to `document` [B, T]."""

    anchors: Tensor
    document: Tensor
    slots: int
    heads: tuple[int, int]
    """Q and K."""
    backend: Backend = "auto"
    window: int | None = None

    def attend(self, q: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], scale: float) -> Tensor:
        """q [B, N, Q, H]; context keys and values [B, T, K, H]; the blocks' own [B, N, K, H] -> [B, N, Q, H]."""
        return (self._flex if self._is_flex else self._plain)(q, context, block, scale)

    def prepare(self) -> Anchored:
        """Make the mask now: layers that are compiled find it made."""
        _ = self._block_mask if self._is_flex else self._parts
        return self

    @property
    def _is_flex(self) -> bool:
        return self.anchors.is_cuda if self.backend == "auto" else self.backend == "flex"

    @functools.cached_property
    def own_document(self) -> Tensor:
        """[B, A] the document each anchor stands in."""
        return self.document.gather(1, self.anchors)

    # -- flex_attention: context and blocks in one sequence of T + N keys; masked tiles are skipped --------------------

    @functools.cached_property
    def _block_mask(self) -> Any:
        (B, A), T, G = self.anchors.shape, self.document.shape[1], self.slots
        anchors, own, document, window = self.anchors, self.own_document, self.document, self.window

        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            block = (q // G).clamp(max=A - 1)  # lengths are rounded up to tiles: indices may run past the end
            place = k.clamp(max=T - 1)
            context = sees_context(anchors[b, block], own[b, block], k, document[b, place], q % G, window)
            return torch.where(k < T, context, (k - T) // G == q // G)

        return _mask_maker(anchors.is_cuda)(visible, B, None, A * G, T + A * G, device=anchors.device)

    def _flex(self, q: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], scale: float) -> Tensor:
        keys, values = (torch.cat(pair, 1).transpose(1, 2) for pair in zip(context, block))
        gqa = q.shape[2] != keys.shape[1]
        call = flex_attention if torch.compiler.is_compiling() else _flex_call(q.is_cuda)
        out = call(q.transpose(1, 2), keys, values, block_mask=self._block_mask, scale=scale, enable_gqa=gqa)
        return out.transpose(1, 2)

    # -- plain products: scores with the context and within blocks apart, one softmax over both ------------------------

    @functools.cached_property
    def _parts(self) -> TwoParts:
        """A slot may see other places than its block's others where there is a window."""
        (B, A), T, device = self.anchors.shape, self.document.shape[1], self.document.device
        place = torch.arange(T, device=device)
        slot = torch.arange(1 if self.window is None else self.slots, device=device)[:, None]

        def sees(cut: slice) -> Tensor:
            anchor, own = (x[:, cut, None, None] for x in (self.anchors, self.own_document))
            return sees_context(anchor, own, place, self.document[:, None, None], slot, self.window)

        return TwoParts(sees, (B, A, self.slots, T), self.heads, kept=_SCORES_KEPT)

    @torch.compiler.disable  # slices are of another size in every batch
    def _plain(self, q: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], scale: float) -> Tensor:
        blocks = self.anchors.shape[1], self.slots
        own = Own(self.slots).add(*(x.unflatten(1, blocks) for x in block))
        keys, values = (turned(x) for x in context)
        return self._parts(q.unflatten(1, blocks), (keys, values), own, scale).flatten(1, 2)


@functools.cache
def _mask_maker(compiled: bool) -> Any:
    """create_block_mask; compiled it never holds the whole mask [A * G, T + A * G]."""
    return torch.compile(create_block_mask, dynamic=False) if compiled else create_block_mask


@functools.cache
def _flex_call(compiled: bool) -> Any:
    return torch.compile(flex_attention, dynamic=False) if compiled else flex_attention


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, causal: bool = False) -> Tensor:
    """Plain grouped attention: q [B, Q, S, H], k and v [B, K, L, H], mask [B, 1, S, L] bool -> [B, Q, S, H].

    Unless causal, the heads of a group are laid beside each other as more queries, so keys are never repeated.
    """
    B, Q, S, H = q.shape
    K = k.shape[1]
    if causal:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=Q != K)
    if mask is not None and Q != K:
        mask = mask.expand(B, Q // K, S, -1).flatten(1, 2)[:, None]
    out = F.scaled_dot_product_attention(q.reshape(B, K, Q // K * S, H), k, v, attn_mask=mask, scale=scale)
    return out.view(B, Q, S, H)
