"""Keys and values that groups of queries have for themselves, for `two_parts`: written in one place, and their
gradients added up in one.

Letters: B rows, A groups, K kv heads, H head dim, W places of a group, w of them added at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Own:
    """Keys and values of W places that each group has for itself, added one after another and never copied again.

    Attention reads what is there by then, and adds its gradients in one place, of which each addition takes its part.
    """

    keys: Tensor
    """[BKA, W, H]; 0 where nothing has been added."""
    values: Tensor
    """The same."""

    def __init__(self, places: int) -> None:
        """places: W."""
        self.places, self.used, self.links = places, 0, list[Tensor]()
        self.gradients = _Gradients()

    def add(self, k: Tensor, v: Tensor) -> Own:
        """Keys and values of the next places [B, A, w, K, H]."""
        self.links.append(_Add.apply(k, v, self))
        return self

    def put(self, pair: tuple[Tensor, Tensor]) -> slice:
        """Writes the next places; which they are."""
        B, A, w, K, H = pair[0].shape
        if not self.used:
            made = Tensor.new_empty if w == self.places else Tensor.new_zeros
            self.keys, self.values = (made(x, (B * K * A, self.places, H)) for x in pair)
        at = slice(self.used, self.used + w)
        for whole, part in zip((self.keys, self.values), pair, strict=True):
            # not a change to autograd: whoever has saved the whole gives these places no weight
            whole.data[:, at].view(B, K, A, w, H).copy_(part.permute(0, 3, 1, 2, 4))
        self.used += w
        return at


class _Gradients:
    """Where a backward pass adds up the gradients of what an `Own` holds. All that the graph's nodes know of it: its
    links know the nodes, and such a circle would never be freed."""

    def __init__(self) -> None:
        self._pass: int | None = None
        self._parts: tuple[Tensor, ...] = ()

    def of(self, keys: Tensor, values: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """[BKA, W, H] of both, to be added to; 0 at first in every backward pass."""
        current = torch._C._current_graph_task_id()
        if current != self._pass or not self._parts:
            self._pass, self._parts = current, tuple(torch.zeros_like(x, dtype=dtype) for x in (keys, values))
        return self._parts

    def take(self, at: slice, like: Tensor) -> list[Tensor]:
        """What attention has added `at` these places, as `like` [B, A, w, K, H]. The first addition takes its part
        last."""
        B, A, _, K, _ = like.shape
        parts = self._parts
        if not at.start:
            self._parts = ()
        return [x[:, at].unflatten(0, (B, K, A)).permute(0, 2, 3, 1, 4).to(like.dtype).contiguous() for x in parts]


class _Add(torch.autograd.Function):
    """Puts keys and values in their places. Its empty result links whatever attends to them to what they came from."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, own: Own) -> Tensor:
        ctx.gradients, ctx.at, ctx.like = own.gradients, own.put((k, v)), torch.empty_like(k, device="meta")
        return k.new_empty(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, unused: Tensor) -> Any:
        return *ctx.gradients.take(ctx.at, ctx.like), None
