"""The figures of a result row, computed by hand: from records of units to tau, times, speed-up and its parts."""

import pytest

from deepspec.eval.figures import Run, Turn, differences, equality, figures, head, timed_equality


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
    assert (row["wall_seconds"], row["baseline_wall_seconds"], row["baseline_prefill_seconds"]) == (4.0, 6.0, 1.5)
    assert row["efficiency"] == pytest.approx(1.5 / (15 / 7))


def test_what_belongs_to_the_baseline_and_what_to_the_drafter():
    """Text is judged by the baseline's, prefill is each one's own."""
    loop = {"prompt": 1, "tokens": [1] * 20, "rounds": [[0, 0]] * 19}
    plain = filled(record([[loop]], seconds=2.0, draft=0.0, verify=1.0, passes=19, prefill=0.25))
    row = figures(filled(record([[turn(20, (19, 18))]], 1.0, 0.1, 0.2, 1)), plain, 19)
    assert (row["repetition_rate"], row["distinct_4gram"]) == (1.0, 1 / 17)
    assert (row["prefill_seconds"], row["baseline_prefill_seconds"]) == (0.5, 0.25)
    row = figures(plain, filled(record([[turn(20, *[(0, 0)] * 19)]], 1.0, 0.0, 0.2, 19)), 19)
    assert (row["repetition_rate"], row["distinct_4gram"]) == (0.0, 1.0)


@pytest.mark.parametrize("task, number", [("mbpp", 256), ("mine", None)])
def test_the_paper_s_number_of_prompts(task, number):
    found = head(task, 3, "Qwen/Qwen3-4B")
    assert found["samples"] == 3 and found.get("paper_samples") == number
    assert found["domain"] == ("code" if number else "mine")


def test_answers_of_one_conversation_are_resampled_together():
    """Two prompts of equal rounds whose turns differ: every resample of whole prompts has the same tau."""
    talk = [turn(6, (4, 4)), turn(2, (4, 0))]  # 5 and 1 tokens in a round each
    same = filled(*[record([talk], 1.0, 0.1, 0.1, 2)] * 4)
    assert figures(same, same, 4)["tau_interval"] == (3.0, 3.0)
    assert differences("a", {"a": same, "b": same}) == {"b": {"difference": 0.0, "interval": (0.0, 0.0)}}
    one, two = (filled(*[record([[t]], 1.0, 0.1, 0.1, 1)] * 2) for t in (turn(2, (4, 0)), turn(4, (4, 2))))
    assert differences("a", {"a": two, "b": one})["b"]["difference"] == 2.0
    apart = filled(*[record([[t]], 1.0, 0.1, 0.1, 1) for t in talk * 4])
    low, high = figures(apart, apart, 4)["tau_interval"]
    assert low < 3.0 < high


def test_a_repeat_adds_to_times_and_to_nothing_else():
    again = {k: v for k, v in record([[turn(11)]], 4.0, 0.6, 1.2, 4).items() if k != "samples"}
    once, twice = (filled(*[record([[turn(11, (3, 3))]], 2.0, 0.4, 0.8, 4)] * 2) for _ in "12")
    twice.add(0, again)
    assert (twice.tokens, twice.seconds) == ([22, 11], [6.0, 2.0])
    assert twice.speed == 33 / 8 and twice.per_round("draft") == pytest.approx(1.4 / 12)
    assert (twice.samples, twice.sample) == (once.samples, once.sample)
    assert figures(twice, once, 3)["tokens"] == figures(once, once, 3)["tokens"] == 22


def test_equality_counts_prompts_and_keeps_where_they_differ():
    rows = [{"id": "a", "equal": True}, {"id": "b", "equal": False, "turn": 1, "index": 4, "margin": 1e-7}]
    assert equality(rows) == {
        "equal": 1, "total": 2, "dtype": "float32", "differ": [{"id": "b", "turn": 1, "index": 4, "margin": 1e-7}],
    }  # fmt: skip
    assert equality([]) is None
    ours, base = Run(samples=[[Turn([], [1, 2], [])]] * 3), Run(samples=[[Turn([], [1, 2], [])]] * 3)
    ours.samples = [*ours.samples[:2], [Turn([], [1, 2], []), Turn([], [9], [])]]
    base.samples[0] = base.samples[0] * 2  # a second turn: another output, and no second prompt
    assert timed_equality(ours, base, "bfloat16") == {"equal": 1, "total": 3, "dtype": "bfloat16"}
