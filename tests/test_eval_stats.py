"""Laws of the figures: pinned values on hand-made rounds, and nothing that order or batches could change."""

from dataclasses import dataclass

import numpy as np
import pytest

from deepspec.eval import stats


@dataclass
class Decoded:
    tokens: list[int]
    rounds: list[tuple[int, int]]


def decoded(*rounds: tuple[int, int], lost: int = 0) -> Decoded:
    """A continuation of these rounds; `lost` tokens were trimmed at a stop id or the budget."""
    return Decoded(list(range(1 + sum(a + 1 for _, a in rounds) - lost)), list(rounds))


def test_rounds_of_3_2_1_0_are_pinned():
    g = [decoded((3, 3), (3, 2), (3, 1), (3, 0))]
    assert stats.tau(g) == 10 / 4
    assert stats.verified_per_round(g) == 3
    rates = stats.accept_rates(g, 3)
    assert rates.conditional == [3 / 4, 2 / 3, 1 / 2]
    assert rates.prefix == [3 / 4, 2 / 4, 1 / 4]
    assert rates.reached == [4, 3, 2] and rates.accepted == [3, 2, 1]
    assert stats.accepted_per_round(g) == 6 / 4 and stats.wasted_per_round(g) == 6 / 4


def test_a_slot_counts_only_where_it_was_verified():
    g = [decoded((3, 3), (1, 1), (0, 0), (2, 0))]
    rates = stats.accept_rates(g, 4)
    assert rates.conditional == [2 / 3, 1.0, 1.0, None]
    assert rates.prefix == [2 / 3, 1 / 2, 1.0, None]
    assert stats.verified_per_round(g) == 6 / 4
    assert stats.accepted_per_round(g) == 4 / 4 and stats.wasted_per_round(g) == 2 / 4
    assert stats.tau(g) == (4 + 2 + 1 + 1) / 4


def test_trimmed_tokens_are_not_counted():
    assert stats.tau([decoded((3, 3), (2, 2), lost=1)]) == (4 + 2) / 2  # the stop id was the second accepted token
    assert stats.tau([Decoded([5], []), decoded((3, 1))]) == 2  # a first token that stops belongs to no round


@pytest.mark.parametrize("g", [[], [Decoded([], [])], [Decoded([5], [])]])
def test_nothing_counted_is_none(g):
    assert stats.tau(g) is None
    assert stats.tau_interval(g) is None
    assert stats.verified_per_round(g) is None
    assert stats.accepted_per_round(g) is None and stats.wasted_per_round(g) is None
    assert stats.accept_rates(g, 2) == stats.AcceptRates([None, None], [None, None], [0, 0], [0, 0])
    assert stats.tau_difference(g, g) is None
    assert stats.distinct_ngrams(g) is None


def random_run(seed: int, prompts: int = 30, mean: float = 2.0) -> list[Decoded]:
    rng = np.random.default_rng(seed)
    runs = [np.minimum(rng.poisson(mean, rng.integers(1, 9)), 7) for _ in range(prompts)]
    return [decoded(*((7, int(a)) for a in run)) for run in runs]


def test_order_and_split_change_nothing():
    ours, theirs = random_run(0), random_run(1)
    order = np.random.default_rng(2).permutation(len(ours))
    mixed, other = [ours[i] for i in order], [theirs[i] for i in order]
    assert stats.tau(mixed) == stats.tau(ours)
    assert stats.tau_interval(mixed) == stats.tau_interval(ours)
    assert stats.accept_rates(mixed, 7) == stats.accept_rates(ours, 7)
    assert stats.tau_difference(mixed, other) == stats.tau_difference(ours, theirs)
    halves = (ours[:7], ours[7:])
    summed = sum(stats.committed(h).sum() for h in halves) / sum(stats.round_counts(h).sum() for h in halves)
    assert stats.tau(ours) == summed


def test_conditional_rates_multiply_to_prefix_rates_when_all_is_verified():
    rates = stats.accept_rates(random_run(3), 7)
    assert np.allclose(np.cumprod(rates.conditional[:5]), rates.prefix[:5])


def test_the_interval_covers_a_known_ratio():
    """300 trials at nominal 95 %; fewer than 270 or all of them inside happens by chance less than once in 10,000."""
    rng, hits = np.random.default_rng(0), 0
    for _ in range(300):
        whole = rng.integers(1, 30, 60)
        part = rng.binomial(whole * 3, 0.5)
        low, high = stats.ratio_interval(part, whole)
        hits += low <= 1.5 <= high
    assert 270 <= hits < 300


def test_the_interval_is_of_95_percent():
    """As wide as the normal law says of 400 numbers, to the 6 % that 2,000 resamples leave open (90 % is 16 % less)."""
    part = np.random.default_rng(1).normal(5, 1, 400)
    low, high = stats.ratio_interval(part, np.ones(400))
    assert high - low == pytest.approx(2 * 1.96 * part.std() / 20, rel=0.06)


def test_resamples_without_a_round_do_not_count():
    """Of two prompts one has no round: what is left of their resamples is the other's tau."""
    g = [Decoded([5], []), decoded((3, 3))]
    assert stats.tau_interval(g) == (4.0, 4.0)
    assert stats.tau_difference(g[:1], g[1:]) is None and stats.tau_difference(g[1:], g[:1]) is None


def test_each_side_of_a_difference_has_its_own_turns():
    """A conversation that ended early for one drafter and not for the other is still one prompt of both."""
    ours, theirs = [decoded((3, 3)), decoded((3, 1))] * 2, [decoded((3, 1))] * 2
    found = stats.tau_difference(ours, theirs, [0, 0, 1, 1], [0, 1])
    assert (found.difference, found.interval) == (1.0, (1.0, 1.0))


def test_more_prompts_narrow_the_interval_and_one_has_none():
    widths = []
    for prompts in (20, 80, 320):
        low, high = stats.tau_interval(random_run(4, prompts))
        widths.append(high - low)
    assert widths[0] > widths[1] > widths[2]
    assert stats.tau_interval(random_run(4, 1)) is None


def test_paired_difference():
    ours = random_run(5)
    zero = stats.tau_difference(ours, ours)
    assert zero.difference == 0 and zero.interval == (0, 0)
    better = [decoded(*((7, min(a + 1, 7)) for _, a in g.rounds)) for g in ours]
    gain = stats.tau_difference(better, ours)
    assert gain.difference == stats.tau(better) - stats.tau(ours)
    assert 0 < gain.interval[0] <= gain.difference <= gain.interval[1]
    low, high = stats.tau_interval(better)
    assert gain.interval[1] - gain.interval[0] < high - low  # pairing takes the prompts' own spread away
    with pytest.raises(ValueError, match="same prompts: 30 and 29"):
        stats.tau_difference(ours, ours[1:])


def test_speedup_interval_brackets_the_ratio_of_rates():
    rng = np.random.default_rng(0)
    tokens, seconds = np.full(20, 100.0), rng.uniform(0.9, 1.1, 20)
    low, high = stats.speedup_interval(tokens, seconds, tokens, 2 * seconds)
    assert low == pytest.approx(2) and high == pytest.approx(2)  # drift that hits both alike leaves no spread
    assert stats.speedup_interval(tokens[:3], seconds[:3], tokens[:3], seconds[:3]) is None
    assert stats.speedup_interval(tokens[:4], seconds[:4], 3 * tokens[:4], seconds[:4]) == pytest.approx((1 / 3, 1 / 3))
    low, high = stats.speedup_interval(tokens, seconds, tokens, 2 * rng.permutation(seconds))
    assert low < 2 < high


def test_distinct_ngrams_and_loops():
    varied, stuck = Decoded(list(range(20)), []), Decoded([1, 2] * 10, [])
    assert stats.distinct_ngrams([varied]) == 1
    assert stats.distinct_ngrams([stuck]) == 2 / 17
    assert stats.distinct_ngrams([varied, stuck, Decoded([1, 2, 3], [])]) == (1 + 2 / 17) / 2
    assert stats.distinct_ngrams([Decoded([1, 1, 1, 1], [])]) == 1 == stats.distinct_rate([[1], [1, 1, 1, 1]])
    assert stats.distinct_rate([[1]]) == 0 and stats.repetition_rate([]) is None
    for period, loops in ((10, True), (32, True), (33, False)):  # three times over, and once less a token
        text = [*range(100, 150), *list(range(period)) * 3]
        assert stats.repetition_rate([Decoded(text, [])]) == loops
        assert stats.repetition_rate([Decoded(text[:50] + text[51:], [])]) == 0
    assert stats.repetition_rate([varied, stuck]) == 1 / 2
    assert stats.repetition_rate([Decoded([*range(50), *[7, 8, 9] * 6], [])]) == 1  # only the end matters
    assert stats.repetition_rate([Decoded([1] * 15, [])]) == 0  # too short to tell
    assert stats.repetition_rate([Decoded([1] * 16, [])]) == 1
