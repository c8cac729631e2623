"""What the target computed on training rows, from one of two sources behind one call: live, or from a cache on disk.

A source answers `source(index)`, the rows of a micro-batch by their number, with features and hidden states of all
their positions one after the other. Letters: M rows asked for, N positions of them together, L tapped layers, D hidden.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..checked import InputError
from ..modeling.target import Target
from .rows import Rows

FAULTS = ("non-finite", "all-zero", "constant")
"""What makes a row's features useless. All three have been seen where a capture went wrong without an error."""

CPU_PASS = 1024
"""Positions of one pass on a CPU: with more its products are no quicker, and less of it stays in the caches."""


@dataclass(frozen=True)
class Features:
    """Of M rows, position after position."""

    features: Tensor
    """[N, L * D]; zeros in a row that is not usable."""
    hidden: Tensor
    """[N, D], right at least where it supervises."""
    faults: Tensor
    """[M, len(FAULTS)] bool: what is wrong with each row."""
    log_z: Tensor | None = None
    """[N] float32: `Vocab.log_z` of hidden, right where that is; None: not known."""

    @property
    def usable(self) -> Tensor:
        """[M] bool: rows without a fault; the others must not be trained on."""
        return ~self.faults.any(-1)


class FeatureSource(Protocol):
    """Where training takes features from."""

    stored: bool
    """Whether they lie on a disk, where reading them early spares a wait."""
    seconds: float
    """How long the target computed them so far."""

    def __call__(self, index: Sequence[int]) -> Features: ...

    def check(self, limit: float) -> None:
        """InputError where more than this fraction of the rows so far were not usable. Waits for the device."""
        ...


class Live:
    """Computed here and now by the target, rows packed in passes without padding: an accelerator takes all that are
    asked for in one, a CPU up to CPU_PASS positions.

    How many positions a pass has decides which kernel its products run, and so their last bits: a row's features are
    those it has alone up to rounding in the target's dtype. The same rows asked for in the same order give the same
    bits.
    """

    def __init__(self, target: Target, layers: Sequence[int], rows: Rows, dtype: torch.dtype | None = None) -> None:
        """dtype: what features and hidden are rounded to; None: the target's own."""
        self.target, self.layers, self.rows, self.dtype = target, tuple(layers), rows, dtype
        self.stored, self.seconds = False, 0.0
        self._seen = 0
        self._refused = torch.zeros((), dtype=torch.long, device=target.device)

    def __call__(self, index: Sequence[int]) -> Features:
        began, device = time.perf_counter(), self.target.device
        counts = self.rows.lengths[list(index)].tolist()
        most = CPU_PASS if device.type == "cpu" else sum(counts)
        parts = [self._pass(group) for group in groups(index, counts, most)]
        features, hidden = parts[0] if len(parts) == 1 else (torch.cat(x) for x in zip(*parts))
        self.seconds += time.perf_counter() - began
        if self.dtype is not None:
            features, hidden = features.to(self.dtype), hidden.to(self.dtype)
        found = faults(features, hidden, counts, len(self.layers))
        self._seen += len(counts)
        if not clear(found):
            usable = ~found.any(-1)
            self._refused += (~usable).sum()
            good = usable.repeat_interleave(torch.tensor(counts, device=device), output_size=len(hidden))[:, None]
            # zeros, not merely no loss: 0 * nan is nan in a gradient
            features, hidden = features.where(good, 0), hidden.where(good, 0)
        return Features(features, hidden, found)

    def _pass(self, index: Sequence[int]) -> tuple[Tensor, Tensor]:
        tokens = [self.rows.tokens_of(i) for i in index]
        packed = torch.from_numpy(np.concatenate(tokens).astype(np.int64)).to(self.target.device)
        return self.target.packed_features(packed, [len(t) for t in tokens], self.layers)

    def check(self, limit: float) -> None:
        check_refused(int(self._refused), self._seen, limit)


def check_refused(refused: int, rows: int, limit: float) -> None:
    """InputError where more than `limit` of the rows (of 1000, where there are fewer) have useless features."""
    if refused > limit * max(rows, 1000):
        raise InputError(
            f"the target's features of {refused} of {rows} rows are {', '.join(FAULTS[:-1])} or {FAULTS[-1]}, more "
            f"than data.max_refused ({limit:g}) allows: its weights, its dtype (float16 overflows) or the capture are "
            "at fault"
        )


def groups(index: Iterable[int], counts: Iterable[int], most: int) -> Iterator[list[int]]:
    """Rows in their order, in groups of at most `most` positions together, or of one row. counts: of each row."""
    group, total = list[int](), 0
    for i, count in zip(index, counts):
        if group and total + count > most:
            yield group
            group, total = [], 0
        group.append(i)
        total += count
    if group:
        yield group


def faults(features: Tensor, hidden: Tensor, counts: Sequence[int], layers: int) -> Tensor:
    """[M, len(FAULTS)] bool: which faults each of M rows of counts[m] positions has in any of its layers, the last
    hidden state counting as one. Constant: all positions alike, but not zero. Never waits for an accelerator."""
    size = torch.tensor(counts, device=hidden.device)
    row = torch.arange(len(counts), device=hidden.device).repeat_interleave(size, output_size=len(hidden))
    first = (size.cumsum(0) - size)[row]

    def every(flags: Tensor) -> Tensor:
        """[N, L] -> [M, L]: whether it holds at all positions of a row."""
        exceptions = torch.zeros(len(counts), flags.shape[1], dtype=torch.int32, device=flags.device)
        return exceptions.index_add_(0, row, (~flags).int()) == 0

    found = torch.zeros(len(counts), len(FAULTS), dtype=torch.bool, device=hidden.device)
    for part in (features.unflatten(-1, (layers, -1)), hidden[:, None]):
        largest = part.abs().amax(-1)  # tells more than one thing in one pass; nan where there is one
        finite, zero = every(largest.isfinite()), every(largest == 0)
        alike = every(largest == largest[first]) & (size > 1)[:, None] & ~zero
        if not clear(alike):  # else seldom: rows whose largest are alike
            alike &= every((part == part[first]).all(-1))
        found |= torch.stack([(~finite).any(-1), zero.any(-1), alike.any(-1)], -1)
    return found


def clear(flags: Tensor) -> bool:
    """Whether none is set, as far as that is known without waiting for an accelerator."""
    return flags.device.type == "cpu" and not bool(flags.any())
