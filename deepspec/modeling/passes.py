"""One packed pass of a target: which row and place each token has, and attention of each row over its own past.

Rows that have a past look at the cache, as a grid padded to the widest of them; rows that begin look at their own new
tokens alone. A pass may hold both: answers that go on, and prompts that join them.

Letters: B rows, S new positions of a row, N packed positions, Q heads, K kv heads, H head dim.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention import attend
from .cache import KVCache, Ragged, on_device


class Pass:
    """Attention of N packed tokens, layer by layer."""

    def __init__(self, ragged: Ragged, lengths: Sequence[int], cache: KVCache | None) -> None:
        """lengths: what each row holds before the pass; cache None: nothing is kept, all rows begin."""
        self.ragged, self.cache, self._lengths = ragged, cache, list(lengths)
        self._elsewhere: dict[torch.device, Pass] = {}
        live, device = ragged.live, ragged.device
        start = on_device(lengths, device)
        self.positions = start[ragged.rows] + ragged.columns
        self.ignored = torch.empty(1, 1, 1, 1, device=device)
        """A 4-D mask stops transformers from making one; our attention does not read it."""
        old, new = ([b for b in live if bool(lengths[b]) is past] for past in (True, False))
        self._solo = (live[0], lengths[live[0]]) if cache is not None and len(live) == 1 and old else None
        """The row that is alone, and where it starts: its keys are a plain slice."""
        self.where = None if cache is None or self._solo else ragged.rows * cache.capacity + self.positions
        self._old = _Old(ragged, old, lengths) if old else None
        self._new = _New(ragged, new) if new else None

    def to(self, device: Any, **kwargs: Any) -> Pass:
        """The same pass for a layer on another device: accelerate asks for it where a target is spread over several."""
        place = torch.device(device)
        if place == self.ragged.device:
            return self
        if place not in self._elsewhere:
            self._elsewhere[place] = Pass(Ragged(self.ragged.counts, place), self._lengths, self.cache)
        return self._elsewhere[place]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """q [1, Q, N, H], k and v [1, K, N, H] -> [1, N, Q, H]; of tokens past N, which only fill a size, zeros."""
        if more := q.shape[2] - self.ragged.total:
            q, k, v = (x[:, :, : self.ragged.total] for x in (q, k, v))
            return F.pad(self._attend(layer, q, k, v, scale, window), (0, 0, 0, 0, 0, more))
        return self._attend(layer, q, k, v, scale, window)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        if self._solo is not None and self._old is not None and self.cache is not None:
            k, v = self.cache.extend(layer, *self._solo, k, v)
            return attend(q, k, v, self._old.mask(window), scale).transpose(1, 2)
        if self.cache is not None and self.where is not None:
            self.cache.write(layer, self.where, k[0].transpose(0, 1), v[0].transpose(0, 1))
        if self._old is None:
            return q.transpose(1, 2) if self._new is None else self._new.attend(q, k, v, scale, window)
        assert self.cache is not None  # nobody has a past without one
        if self._new is None:
            return self._old.attend(q, *self._old.read(self.cache, layer), scale, window)
        seen = torch.empty_like(q.transpose(1, 2))
        new, old = self._new.places, self._old.places
        own_q, own_k, own_v = (x.index_select(2, new) for x in (q, k, v))
        seen.index_copy_(1, new, self._new.attend(own_q, own_k, own_v, scale, window))
        past_k, past_v = self._old.read(self.cache, layer)
        return seen.index_copy_(1, old, self._old.attend(q.index_select(2, old), past_k, past_v, scale, window))


class _Group:
    """Rows of a pass that attend alike, as a padded grid."""

    def __init__(
        self, ragged: Ragged, mine: Sequence[int], lengths: Sequence[int], rows: Sequence[int] | None = None
    ) -> None:
        """mine: the rows whose tokens these are; rows: those of the grid, with some that only fill it (None: the same);
        lengths: what each row of the pass holds before it."""
        rows = mine if rows is None else rows
        self.grid = Ragged([ragged.counts[b] if b in mine else 0 for b in rows], ragged.device)
        self._of, self._mine = ragged, mine
        self.longest = max(lengths[b] + ragged.counts[b] for b in mine)
        self._starts = on_device([lengths[b] for b in rows], ragged.device)
        self._one_query = self.grid.width == 1 and len({lengths[b] for b in mine}) == 1
        self._masks: dict[int | None, Tensor | None] = {}

    @functools.cached_property
    def places(self) -> Tensor:
        """[n] which of the pass's packed tokens are theirs."""
        ends = list(itertools.accumulate(self._of.counts, initial=0))
        return on_device([i for b in self._mine for i in range(ends[b], ends[b + 1])], self._of.device)

    def mask(self, window: int | None) -> Tensor | None:
        """[B, 1, S, longest] bool, the same for every layer with this window; None where all is visible."""
        if window not in self._masks:
            device = self._starts.device
            key = torch.arange(self.longest, device=device)
            query = (self._starts[:, None] + torch.arange(self.grid.width, device=device))[..., None]
            mask = key <= query
            if window is not None:
                mask = mask & (key > query - window)
            everything = self._one_query and (window is None or self.longest <= window)
            self._masks[window] = None if everything else mask[:, None]
        return self._masks[window]


class _Old(_Group):
    """Rows with a past: they see the cache."""

    def __init__(self, ragged: Ragged, mine: Sequence[int], lengths: Sequence[int]) -> None:
        first, end = mine[0], mine[-1] + 1
        # all rows between are a view of the cache, others a copy: unless most would look in vain, the view is cheaper
        near = end - first <= 2 * len(mine)
        self._cached: slice | Tensor = slice(first, end) if near else on_device(mine, ragged.device)
        super().__init__(ragged, mine, lengths, range(first, end) if near else None)

    def read(self, cache: KVCache, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the grid's rows, each [B, K, longest, H]."""
        return cache.read(layer, self.longest, self._cached)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """Packed q [1, Q, N, H], k and v as `read` -> [1, N, Q, H]."""
        padded = self.grid.unpack(q[0].transpose(0, 1)).transpose(1, 2)
        return self.grid.pack(attend(padded, k, v, self.mask(window), scale).transpose(1, 2))[None]


class _New(_Group):
    """Rows that begin: they see their own new tokens."""

    def __init__(self, ragged: Ragged, mine: Sequence[int]) -> None:
        super().__init__(ragged, mine, [0] * len(ragged.counts))
        self._apart = ragged.device.type == "cpu" and not self.grid.full
        """Rows of unequal length attend one by one: on a CPU padding costs more than calls."""
        self._cuts = [(sum(self.grid.counts[:i]), n) for i, n in enumerate(self.grid.counts)]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """Packed q [1, Q, N, H], k and v [1, K, N, H] -> [1, N, Q, H]."""
        plain = window is None or self.grid.width <= window
        if plain and self._apart:
            seen = []
            for start, count in self._cuts:
                own = [x.narrow(2, start, count) for x in (q, k, v)]
                seen.append(attend(own[0], own[1], own[2], None, scale, causal=True).transpose(1, 2))
            return torch.cat(seen, 1)
        q, k, v = (self.grid.unpack(x[0].transpose(0, 1)).transpose(1, 2) for x in (q, k, v))
        out = attend(q, k, v, None if plain else self.mask(window), scale, causal=plain)
        return self.grid.pack(out.transpose(1, 2))[None]
