"""Passes of one shape, for a compiler: every row scores the same number of places over the cache's whole capacity.

Letters: B rows, S places of a row, N = B * S, C capacity, Q heads, K kv heads, H head dim, D hidden, L tapped layers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .attention import attend
from .cache import KVCache

PLACES = 32
"""Places of a row in one pass, at most; longer passes are prefill and keep their own shape."""
ROUND = 256
"""Capacities are multiples of this, so that runs of about one length share a program."""


def capacity(max_length: int) -> int:
    """C for rows of up to max_length tokens: a pass writes all its places, so there is room for one behind the last."""
    return -(-(max_length + PLACES) // ROUND) * ROUND


class FixedPass:
    """Where each of a pass's places is, and attention over it. Which places are real is the caller's business: the
    others write behind their row's end, where the next pass overwrites them and nobody looks."""

    def __init__(self, lengths: Tensor, places: int, cache: KVCache) -> None:
        """lengths [B] long: what each row holds before the pass."""
        self.rows, self.cache, self.seen = len(lengths), cache, {}  # type: ignore[var-annotated]
        self._at = lengths[:, None] + torch.arange(places, device=lengths.device)
        self.positions = self._at.flatten()
        self._where = (torch.arange(self.rows, device=lengths.device)[:, None] * cache.capacity + self._at).flatten()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """q [1, Q, N, H], k and v [1, K, N, H] -> [1, N, Q, H]."""
        self.cache.write(layer, self._where, k[0].transpose(0, 1), v[0].transpose(0, 1))
        keys, values = self.cache.read(layer, self.cache.capacity)
        key = torch.arange(self.cache.capacity, device=q.device)
        mask = key <= self._at[..., None]
        if window is not None:
            mask = mask & (key > self._at[..., None] - window)
        queries = q[0].unflatten(1, (self.rows, -1)).transpose(0, 1)
        return attend(queries, keys, values, mask[:, None], scale).transpose(1, 2).flatten(0, 1)[None]


class FixedDecoder:
    """A target's decoder on such passes, compiled, one program for each number of rows and places."""

    def __init__(self, decoder: Any, **options: Any) -> None:
        """decoder: of transformers, calling our attention function; options: of torch.compile."""
        self._decoder = decoder
        for place, layer in enumerate(decoder.layers):
            layer.register_forward_hook(_tap(place), with_kwargs=True)
        self._program = torch.compile(self._run, dynamic=False, **options)

    def __call__(
        self, tokens: Tensor, lengths: Tensor, cache: KVCache, layer_ids: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """tokens [B, S], lengths [B] -> features [B, S, L * D], hidden [B, S, D]."""
        features, hidden = self._program(tokens, lengths, cache, tuple(layer_ids))
        return features, hidden

    def _run(
        self, tokens: Tensor, lengths: Tensor, cache: KVCache, layer_ids: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        view = FixedPass(lengths, tokens.shape[1], cache)
        output = self._decoder(
            input_ids=tokens.flatten()[None],
            position_ids=view.positions[None],
            attention_mask=torch.empty(1, 1, 1, 1, device=tokens.device),
            use_cache=False,
            deepspec_pass=view,
        )
        hidden = output.last_hidden_state[0].unflatten(0, tokens.shape)
        parts = [view.seen[i][0] for i in layer_ids]
        features = torch.cat(parts, -1).unflatten(0, tokens.shape) if parts else hidden[..., :0]
        return features, hidden


def _tap(place: int) -> Any:
    """A hook that leaves a layer's output with a fixed pass; for other passes it does nothing."""

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        view = kwargs.get("deepspec_pass")
        if isinstance(view, FixedPass):
            view.seen[place] = output[0] if isinstance(output, tuple) else output

    return hook
