"""From what was decoded to figures. Pure functions; a figure that nothing was counted for is None, never 0 or NaN.

Letters: N answers, G slots. Every figure is one division of two sums, so neither the order of the prompts nor the way
they were split into batches changes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

RESAMPLES = 2000
Interval = tuple[float, float]
Array = np.ndarray[Any, Any]
Column = Array | Sequence[float]


class Decoded(Protocol):
    """What the figures need of a `Generation`."""

    @property
    def tokens(self) -> Sequence[int]:
        """New tokens, the one drawn from the prefill first."""

    @property
    def rounds(self) -> Sequence[tuple[int, int]]:
        """(verified, accepted) of every round."""


def committed(generations: Sequence[Decoded]) -> Array:
    """[N] tokens that rounds committed: all but the one drawn from the prefill."""
    return np.array([max(len(g.tokens) - 1, 0) for g in generations], dtype=np.int64)


def round_counts(generations: Sequence[Decoded]) -> Array:
    """[N] rounds of each answer."""
    return np.array([len(g.rounds) for g in generations], dtype=np.int64)


def ratio(part: float, whole: float) -> float | None:
    """part / whole; None where there is no whole."""
    return float(part) / float(whole) if whole else None


def tau(generations: Sequence[Decoded]) -> float | None:
    """Accepted length: tokens committed per round, bonus token included."""
    return ratio(committed(generations).sum(), round_counts(generations).sum())


def verified_per_round(generations: Sequence[Decoded]) -> float | None:
    """Drafted tokens sent to the target per round."""
    return ratio(sum(v for g in generations for v, _ in g.rounds), round_counts(generations).sum())


def accepted_per_round(generations: Sequence[Decoded]) -> float | None:
    """Drafted tokens that the target accepted per round."""
    return ratio(sum(a for g in generations for _, a in g.rounds), round_counts(generations).sum())


def wasted_per_round(generations: Sequence[Decoded]) -> float | None:
    """Drafted tokens sent to the target and not accepted, per round."""
    return ratio(sum(v - a for g in generations for v, a in g.rounds), round_counts(generations).sum())


@dataclass(frozen=True)
class AcceptRates:
    """Acceptance of each slot; slot 0 is the first after the anchor."""

    conditional: list[float | None]
    """[G] accepted at g / rounds that verified g with every earlier slot accepted."""
    prefix: list[float | None]
    """[G] accepted through g / rounds that verified g."""
    reached: list[int]
    """[G] rounds that verified g with every earlier slot accepted."""
    accepted: list[int]
    """[G] rounds that accepted g, and so every earlier slot."""


def accept_rates(generations: Sequence[Decoded], slots: int) -> AcceptRates:
    """The acceptance of slots 0 to `slots` - 1 over all rounds."""
    rounds = np.array([r for g in generations for r in g.rounds], dtype=np.int64).reshape(-1, 2)
    verified, accepted = rounds[:, :1], rounds[:, 1:]
    slot = np.arange(slots)
    through = (accepted > slot).sum(0)
    seen = verified > slot
    reached = (seen & (accepted >= slot)).sum(0)
    return AcceptRates(
        conditional=[ratio(a, n) for a, n in zip(through, reached)],
        prefix=[ratio(a, n) for a, n in zip(through, seen.sum(0))],
        reached=reached.tolist(),
        accepted=through.tolist(),
    )


def tau_interval(generations: Sequence[Decoded], sample: Sequence[int] | None = None, seed: int = 0) -> Interval | None:
    """95 % bootstrap interval of `tau` over prompts; sample [N] is the prompt of each answer, None: one each."""
    return ratio_interval(_by(sample, committed(generations)), _by(sample, round_counts(generations)), seed)


def ratio_interval(part: Column, whole: Column, seed: int = 0) -> Interval | None:
    """95 % percentile bootstrap interval of sum(part) / sum(whole), resampling the N pairs part [N], whole [N].

    None with fewer than two pairs: one observation says nothing about its own spread.
    """
    return _percentiles(_resampled([part, whole], seed, lambda p, w: p / w))


def speedup_interval(
    tokens: Column, seconds: Column, base_tokens: Column, base_seconds: Column, seed: int = 0
) -> Interval | None:
    """95 % bootstrap interval of (tokens / seconds) / (base_tokens / base_seconds) over chunks; each is [N].

    None with fewer than four chunks, whose resamples would make it too narrow.
    """
    if len(tokens) < 4:
        return None
    columns = [tokens, seconds, base_tokens, base_seconds]
    return _percentiles(_resampled(columns, seed, lambda t, s, bt, bs: (t / s) / (bt / bs)))


@dataclass(frozen=True)
class Difference:
    """tau of one drafter minus tau of another on the same prompts."""

    difference: float
    interval: Interval | None


def tau_difference(
    ours: Sequence[Decoded],
    theirs: Sequence[Decoded],
    sample: Sequence[int] | None = None,
    their_sample: Sequence[int] | None = None,
    seed: int = 0,
) -> Difference | None:
    """Paired over prompts: each resample takes the same prompts for both. None where either has no rounds."""
    columns = [_by(sample, f(ours)) for f in (committed, round_counts)]
    columns += [_by(their_sample, f(theirs)) for f in (committed, round_counts)]
    if len(columns[0]) != len(columns[2]):
        raise ValueError(f"a paired difference needs the same prompts: {len(columns[0])} and {len(columns[2])}")
    a, b = tau(ours), tau(theirs)
    if a is None or b is None:
        return None
    return Difference(a - b, _percentiles(_resampled(columns, seed, lambda p, w, q, v: p / w - q / v)))


def distinct_ngrams(generations: Sequence[Decoded], n: int = 4) -> float | None:
    """`distinct_rate` of continuations; None where none has n tokens."""
    rows = [g.tokens for g in generations if len(g.tokens) >= n]
    return distinct_rate(rows, n) if rows else None


def distinct_rate(rows: Sequence[Sequence[int]], n: int = 4) -> float:
    """Distinct n-grams over all n-grams, within each row of token ids, averaged over the rows that have any."""
    rates = []
    for row in rows:
        grams = [tuple(row[i : i + n]) for i in range(len(row) - n + 1)]
        if grams:
            rates.append(len(set(grams)) / len(grams))
    return sum(rates) / len(rates) if rates else 0.0


def repetition_rate(generations: Sequence[Decoded], longest: int = 32, least: int = 16) -> float | None:
    """Share of continuations that end in a loop: their last max(3 p, `least`) tokens have a period p <= `longest`."""
    return ratio(sum(_loops(g.tokens, longest, least) for g in generations), len(generations))


def _loops(tokens: Sequence[int], longest: int, least: int) -> bool:
    for period in range(1, longest + 1):
        span = max(3 * period, least)
        if span > len(tokens):
            continue
        tail = tokens[-span:]
        if tail[period:] == tail[:-period]:
            return True
    return False


def _by(sample: Sequence[int] | None, column: Array) -> Array:
    """column [N] summed over the answers of each prompt: answers of one conversation are not independent."""
    return column if sample is None else np.bincount(sample, column)


def _resampled(columns: Sequence[Column], seed: int, figure: Any) -> Array:
    """`figure` of the columns' sums in each of the resamples where it is finite; empty with fewer than two rows."""
    table = np.stack([np.asarray(c, dtype=np.float64) for c in columns], axis=1)  # [N, columns]
    n = len(table)
    if n < 2:
        return np.empty(0)
    table = table[np.lexsort(table.T)]  # in an order of its own, so that the order of the prompts changes nothing
    rng = np.random.default_rng(seed)
    times = rng.multinomial(n, np.full(n, 1 / n), size=RESAMPLES)  # [resamples, N] how often each row was drawn
    with np.errstate(divide="ignore", invalid="ignore"):
        values: Array = figure(*(times @ table).T)
    return values[np.isfinite(values)]


def _percentiles(values: Array) -> Interval | None:
    if not len(values):
        return None
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
