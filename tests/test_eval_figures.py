"""The figures of a result row, computed by hand: from records of units to tau, times, speed-up and its parts."""

import pytest

from deepspec.eval.figures import Run, Turn, differences, equality, figures, timed_equality


def turn(tokens, *rounds):
    return {"prompt": 3, "tokens": list(range(tokens)), "rounds": [list(r) for r in rounds]}


def record(samples, seconds, draft, verify, passes, prefill=0.5):
    tokens = sum(len(t["tokens"]) for turns in samples for t in turns)
    parts = {"prefill": prefill, "draft": draft, "verify": verify}
    counts = {"prefill": 1, "draft": 2 * passes, "verify": passes}
    return {"samples": samples, "tokens": tokens, "seconds": seconds, "parts": parts, "counts": counts}


def filled(*records):
    run = Run()
    for unit, found in enumerate(records):
        run.add(unit, found)
    return run


DRAFTED = filled(
    # rounds 3, 2, 1, 0 of 3: 1 + 4 + 3 + 2 + 1 tokens
    record([[turn(11, (3, 3), (3, 2), (3, 1), (3, 0))]], seconds=2.0, draft=0.4, verify=0.8, passes=4),
    # stopped by its second of three accepted drafts, so trimmed to (2, 2); a first token that stops; nothing at all
    record([[turn(3, (2, 2))], [turn(1)], [turn(0)]], seconds=1.0, draft=0.1, verify=0.2, passes=1),
    # two turns of one conversation
    record([[turn(3, (3, 1)), turn(2, (0, 0))]], seconds=1.0, draft=0.1, verify=0.5, passes=2),
)
PLAIN = filled(
    record([[turn(11, *[(0, 0)] * 10)]], seconds=3.0, draft=0.0, verify=2.5, passes=10),
    record([[turn(3, (0, 0), (0, 0))], [turn(1)], [turn(0)]], seconds=1.5, draft=0.0, verify=0.5, passes=2),
    record([[turn(3, (0, 0), (0, 0)), turn(2, (0, 0))]], seconds=1.5, draft=0.0, verify=0.75, passes=3),
)


def test_every_figure_by_hand():
    row = figures(DRAFTED, PLAIN, slots=3)
    assert row["rounds"] == 4 + 1 + 2 and row["tokens"] == 11 + 3 + 1 + 0 + 3 + 2
    assert row["tau"] == (10 + 2 + 0 + 2 + 1) / 7, "all tokens but the one that each prefill draws"
    assert row["verified_per_round"] == (12 + 2 + 3) / 7
    assert row["accepted_per_round"] == (6 + 2 + 1) / 7
    assert row["wasted_per_round"] == (6 + 0 + 2) / 7
    assert row["accept_counts"] == {"reached": [6, 5, 2], "accepted": [5, 3, 1]}
    assert row["accept_rates_conditional"] == [5 / 6, 3 / 5, 1 / 2]
    assert row["accept_rates_prefix"] == [5 / 6, 3 / 6, 1 / 5]
    assert row["tokens_per_second"] == 20 / 4 and row["baseline_tokens_per_second"] == 20 / 6
    assert row["speedup"] == pytest.approx(6 / 4) and row["speedup_interval"] is None
    assert (row["draft_seconds"], row["verify_seconds"], row["prefill_seconds"]) == pytest.approx((0.6, 1.5, 1.5))
    assert row["draft_seconds_per_round"] == pytest.approx(0.6 / 7)
    assert row["verify_seconds_per_round"] == pytest.approx(1.5 / 7)
    assert row["target_seconds_per_round"] == pytest.approx(3.75 / 15)
    assert row["decomposition"] == pytest.approx((15 / 7) * 0.25 / (2.1 / 7))
    assert row["efficiency"] == pytest.approx(1.5 / (15 / 7))


def test_answers_of_one_conversation_are_resampled_together():
    """Two prompts of equal rounds whose turns differ: every resample of whole prompts has the same tau."""
    talk = [turn(6, (4, 4)), turn(2, (4, 0))]  # 5 and 1 tokens in a round each
    same = filled(*[record([talk], 1.0, 0.1, 0.1, 2)] * 4)
    assert figures(same, same, 4)["tau_interval"] == (3.0, 3.0)
    assert differences("a", {"a": same, "b": same}) == {"b": {"difference": 0.0, "interval": (0.0, 0.0)}}
    apart = filled(*[record([[t]], 1.0, 0.1, 0.1, 1) for t in talk * 4])
    low, high = figures(apart, apart, 4)["tau_interval"]
    assert low < 3.0 < high


def test_a_repeat_adds_to_times_and_to_nothing_else():
    again = {k: v for k, v in record([[turn(11)]], 4.0, 0.6, 1.2, 4).items() if k != "samples"}
    once, twice = (
        filled(record([[turn(11, (3, 3))]], 2.0, 0.4, 0.8, 4)),
        filled(record([[turn(11, (3, 3))]], 2.0, 0.4, 0.8, 4)),
    )
    twice.add(0, again)
    assert twice.speed == 22 / 6 and twice.per_round("draft") == pytest.approx(1.0 / 8)
    assert (twice.samples, twice.sample) == (once.samples, once.sample)


def test_equality_counts_prompts_and_keeps_where_they_differ():
    rows = [{"id": "a", "equal": True}, {"id": "b", "equal": False, "turn": 1, "index": 4, "margin": 1e-7}]
    assert equality(rows) == {
        "equal": 1, "total": 2, "dtype": "float32", "differ": [{"id": "b", "turn": 1, "index": 4, "margin": 1e-7}],
    }  # fmt: skip
    assert equality([]) is None
    ours, base = Run(samples=[[Turn([], [1, 2], [])]] * 3), Run(samples=[[Turn([], [1, 2], [])]] * 3)
    ours.samples = [*ours.samples[:2], [Turn([], [1, 2], []), Turn([], [9], [])]]
    assert timed_equality(ours, base, "bfloat16") == {"equal": 2, "total": 3, "dtype": "bfloat16"}
