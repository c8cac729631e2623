"""Keys and values of many sequences in one preallocated tensor a layer. Rewinding a row is somebody else's integer.

Letters: B rows, C capacity, N packed tokens, K kv heads, H head dim.
"""

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


class KVCache:
    """Per layer, keys and values [B, C, K, H], made at the layer's first write (layers may differ in K and H)."""

    def __init__(self, rows: int, capacity: int) -> None:
        self.rows, self.capacity = rows, capacity
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, row: int, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [1, K, S, H] of one row from position `start` on, and return all it has by then, as
        views [1, K, start + S, H]: write and read in one, for the row that is alone."""
        base, end = row * self.capacity, start + keys.shape[2]
        found = []
        for stored, new in zip(self._layers[layer], (keys, values)):
            stored[base + start : base + end].copy_(new[0].transpose(0, 1))
            found.append(stored[base : base + end].transpose(0, 1)[None])
        return found[0], found[1]

    def write(self, layer: int, where: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [N, K, H] at flat places where [N] = row * capacity + position."""
        if layer not in self._layers:
            # zeros, not empty: a masked place still enters a product with weight 0, which NaN would survive
            places = self.rows * self.capacity
            self._layers[layer] = (keys.new_zeros(places, *keys.shape[1:]), values.new_zeros(places, *values.shape[1:]))
        for stored, new in zip(self._layers[layer], (keys, values)):
            stored.index_copy_(0, where, new)

    def read(
        self, layer: int, length: int, rows: Tensor | slice | None = None, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of positions `first` to `length` of `rows` (None: all; as a view, unless a tensor names
        them), each [B, K, length - first, H]."""
        found = []
        for stored in self._layers[layer]:
            grid = stored.view(self.rows, self.capacity, *stored.shape[1:])[:, first:length]
            found.append((grid if rows is None else grid[rows]).transpose(1, 2))
        return found[0], found[1]


def as_list(counts: Tensor | list[int] | tuple[int, ...]) -> list[int]:
    """Per-row integers as Python ones; a tensor on an accelerator costs one synchronisation."""
    return counts.tolist() if isinstance(counts, Tensor) else [int(c) for c in counts]


def on_device(values: Sequence[int], device: torch.device | str) -> Tensor:
    """Integers of the host as a long tensor on `device`, without making the host wait for the device."""
    made = torch.tensor(values, dtype=torch.long)
    return made.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else made.to(device)


class Ragged:
    """Which of a padded grid's places [B, S] are real, when row b has counts[b] <= S tokens: packing without padding.

    A pass costs what its real tokens cost: rows with count 0 take no part, and nothing is computed for padding outside
    attention itself.
    """

    def __init__(self, counts: list[int], device: torch.device) -> None:
        self.counts = counts
        self.live = [b for b, count in enumerate(counts) if count]
        self.width = max(counts, default=0)
        self.total = sum(counts)
        self.full = all(count == self.width for count in counts)
        self.device = device
        self._flat: dict[int, Tensor] = {}
        """The real places of a flat grid, by its width."""

    @functools.cached_property
    def rows(self) -> Tensor:
        """[N] the row of each real place."""
        return on_device([b for b in self.live for _ in range(self.counts[b])], self.device)

    @functools.cached_property
    def columns(self) -> Tensor:
        """[N] where in its row each is."""
        return on_device([s for b in self.live for s in range(self.counts[b])], self.device)

    @functools.cached_property
    def _starts(self) -> Tensor:
        """[B, 1] where each row's places begin."""
        return on_device([*itertools.accumulate(self.counts[:-1], initial=0)], self.device)[:, None]

    def at(self, columns: Tensor) -> Tensor:
        """columns [B, n] or [n] of each row -> where they are among the packed places; of columns that a row has not,
        some place or other."""
        return (self._starts + columns).clamp(max=self.total - 1)

    def pack(self, grid: Tensor) -> Tensor:
        """[B, S', ...] -> [N, ...]."""
        if self.full and grid.shape[1] == self.width:
            return grid.flatten(0, 1)
        if (width := grid.shape[1]) not in self._flat:
            self._flat[width] = self.rows * width + self.columns
        # on a CPU several times as quick as places by two indices
        return grid.flatten(0, 1).index_select(0, self._flat[width])

    def unpack(self, packed: Tensor, width: int | None = None) -> Tensor:
        """[N, ...] -> [B, width, ...], zeros where there is nothing."""
        width = self.width if width is None else width
        if self.full and width == self.width:
            return packed.view(len(self.counts), width, *packed.shape[1:])
        grid = packed.new_zeros(len(self.counts), width, *packed.shape[1:])
        grid[self.rows, self.columns] = packed
        return grid
