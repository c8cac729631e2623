"""Laws of profiles measured, of load served and of load simulated; and their commands on a random target.

Letters: R requests or users, G slots.
"""

import itertools
import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import G, Planned, make_drafter, target

import deepspec
from deepspec import InputError, Sampling
from deepspec.data.prompts import Prompt
from deepspec.eval import arguments, calibrate, closed_loop, load, load_views, plots, profile, rounds, simulation
from deepspec.eval.closed_loop import Load, budget_of, serve, warmup_of
from deepspec.eval.cost import Additive, Profile, load_profile
from deepspec.eval.figures import Models
from deepspec.eval.probing import (
    OFF,
    OFTEN,
    Measured,
    Probe,
    additive,
    found,
    measure,
    nonnegative,
    planned,
    table,
)
from deepspec.eval.schedule import threshold, verify_all
from deepspec.eval.settings import Contender, EvalConfig
from deepspec.eval.simulation import simulate
from deepspec.eval.throughput import throughput
from deepspec.eval.traces import Trace, collect

COST = Additive(
    bias_seconds=0.01, bs_probes=(1, 8), alpha_seconds=(0.002, 0.016),
    m_probes=(1, 64), theta_seconds=(0.0, 0.063), draft_seconds=(0.002, 0.016),
)  # fmt: skip


# -- watching rounds ---------------------------------------------------------------------------------------------------


def test_a_round_lasts_from_the_last_one_to_its_end_prefill_apart(monkeypatch):
    """By a clock that ticks one second a look: prefill is taken out of the round it delays, other parts are not."""
    monkeypatch.setattr(rounds.time, "perf_counter", itertools.count().__next__)
    log = rounds.RoundLog(torch.device("cpu"), lambda log: len(log.rounds) == 3)  # looks: 0
    log([2, 0], [3, 0])  # 1, 2
    with log.part("prefill"):  # 3, 4
        pass
    with log.part("verify"):
        pass
    log([1, 1], [1, 2])  # 5, of which one was prefill
    with pytest.raises(rounds.Enough):
        log([0, 0], [1, 1])
    assert log.rounds[0] == rounds.Round(seconds=1, requests=1, verified=2, committed=3)
    assert log.rounds[1] == rounds.Round(seconds=2, requests=2, verified=2, committed=3)
    assert log.prefill == 1


# -- profiles ----------------------------------------------------------------------------------------------------------


def test_a_probe_verifies_what_was_planned():
    """Over active rows those likeliest to survive, nothing beyond a row's room, no draft in a round that is off."""
    active, room = torch.tensor([True, False, True, True]), torch.full((4,), 9)
    probe = Probe([7, OFF, 0, 7], 3)
    assert probe.wants(active).tolist() == active.tolist()
    assert probe(torch.ones(4, 5), active, room).tolist() == [3, 0, 2, 2]
    assert not probe.wants(active).any()
    assert probe.wants(active).any() and probe(torch.ones(4, 5), active, room).tolist() == [0] * 4
    hopes = torch.tensor([[0.1], [1.0], [0.9], [0.5]]).expand(-1, 5)  # survivals 0.9 ... 0.59, 0.5, 0.25 before 0.1
    assert probe.wants(active).any() and probe(hopes, active, room).tolist() == [0, 0, 5, 2]
    probe = Probe([9], 3)
    probe.wants(active)
    assert probe(torch.ones(4, 5), active, torch.tensor([1, 9, 9, 9])).tolist() == [1, 0, 4, 4]
    probe = Probe([5, OFF], 4)  # while a prompt is read the plan waits
    assert probe.wants(active).tolist() == active.tolist() and probe(torch.ones(4, 5), active, room).tolist() == [0] * 4
    everyone = torch.ones(4, dtype=torch.bool)
    assert probe.wants(everyone).all() and probe(torch.ones(4, 5), everyone, room).tolist() == [2, 1, 1, 1]
    assert not probe.wants(everyone).any()


def test_the_fit_recovers_an_additive_cost():
    """Measurements that are a sum of a cost of requests and one of tokens, bent at powers of two, are fitted to
    rounding, drafting included; the table is the same at the most requests a batch can hold."""
    knots = np.array([1, 2, 4, 8, 16, 32, 64])
    theta = np.array([5.0, 5, 5.5, 7, 11, 20, 39])
    alpha = {1: 1.0, 4: 2.0, 16: 7.0}
    measured = [
        Measured(r, 0.0, a + np.interp(r, knots, theta) - 0.25 * r,
                 {b: a + float(np.interp(b, knots, theta)) for b in range(r, 4 * r + 1, max(1, r // 4))})
        for r, a in alpha.items()
    ]  # fmt: skip
    cost, error = additive(measured)
    assert error < 1e-9 and cost.bias_seconds > 0
    for m in measured:
        assert np.allclose(cost.step(m.requests, np.array(list(m.step))), list(m.step.values()))
        assert cost.plain(m.requests) == pytest.approx(m.off)
    steps = table(cost)
    assert steps.max_batch_tokens == 64
    for tokens, rate in zip(steps.sample_batch_tokens, steps.sample_steps_per_sec):
        r = max(r for r in alpha if r <= tokens)
        assert rate == pytest.approx(1 / float(cost.step(r, np.array([tokens]))[0]))


def test_noise_never_makes_a_cost_negative():
    """With measurements that are noise alone, every cost is positive and grows with tokens; a round without drafting
    costs what was measured, or less."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        measured = [
            Measured(r, 1.0, 0.1 + rng.random(), {b: 0.1 + rng.random() for b in range(r, 5 * r + 1, r)})
            for r in (1, 3)
        ]
        cost, _ = additive(measured)
        for m in measured:
            steps = cost.step(m.requests, np.arange(m.requests, 5 * m.requests + 1))
            assert steps.min() > 0 and (np.diff(steps) >= -1e-12).all()
            assert 0 < cost.plain(m.requests) <= m.off + 1e-9


def test_the_least_that_is_not_negative():
    """As scipy's, on 200 random problems, among them some without a unique answer."""
    from scipy.optimize import nnls

    rng = np.random.default_rng(0)
    for i in range(200):
        a, b = rng.normal(size=(12, 1 + i % 9)), rng.normal(size=12)
        a[:, 0] = a[:, -1] * (2 if i % 4 == 0 else 1)
        x = nonnegative(a, b)
        assert x.min() >= 0 and np.linalg.norm(a @ x - b) == pytest.approx(nnls(a, b)[1], abs=1e-9)


def test_a_fit_is_convex():
    """One slow size in between is noise: a token more is never cheaper than the one before, so nothing traps a schedule
    that stops early."""
    step = {1: 1.0, 2: 1.4, 3: 1.1, 4: 1.2, 8: 1.5, 16: 2.4, 32: 5.0}
    cost, _ = additive([Measured(1, 1.0, 1.0, step)])
    assert (np.diff(cost.step(1, np.arange(1, 33)), n=2) >= -1e-12).all()


def test_a_fit_of_one_measurement_is_possible():
    cost, error = additive([Measured(2, 1.0, 1.0, {2: 1.5})])
    assert error < 1e-9 and cost.plain(2) == pytest.approx(1.0)


def test_measuring_counts_every_size_and_only_full_rounds(monkeypatch):
    """From 0 drafts to all, as many rounds as announced, averages positive; with a clock of one second a look, a second
    each."""
    monkeypatch.setattr(rounds.time, "perf_counter", itertools.count().__next__)
    tgt, ticks = target(), []
    found = measure(
        tgt, make_drafter("vanilla", tgt), [[3, 1, 4], [1, 5]], 3, repeats=2, sizes=4, tick=lambda: ticks.append(1)
    )
    assert list(found.step) == [3, 7, 11, 3 + 3 * G]
    assert len(ticks) == len(planned(G, 3, 2, 4))
    assert {found.plain, found.off, *found.step.values()} <= {1.0, 2.0}


def test_a_plan_and_what_was_found():
    """Every size as often as asked, no drafting OFTEN times that, after a warm-up of the largest; medians by hand; what
    is past the plan's end is ignored."""
    plan = planned(3, 2, repeats=2, sizes=3, warmup=4)
    assert plan[:4] == [6] * 4 and sorted(plan[4:]) == [OFF] * 2 * OFTEN + [0, 0, 3, 3, 6, 6]
    assert planned(3, 2, repeats=2, sizes=3, seed=1) != planned(3, 2, repeats=2, sizes=3, seed=2)
    seconds = {OFF: 1.0, 0: 2.0, 3: 4.0, 6: 8.0}
    spent = [seconds[kind] for kind in plan[4:]]
    spent[plan[4:].index(3)] = 5.0
    assert found(2, plan[4:], [*spent, 99.0], [0.5, 9.0, 0.7]) == Measured(2, 0.7, 1.0, {2: 2.0, 5: 4.5, 8: 8.0})
    assert found(2, plan[4:], spent, [0.5, 9.0, 0.7], max) == Measured(2, 9.0, 1.0, {2: 2.0, 5: 5.0, 8: 8.0})


# -- load --------------------------------------------------------------------------------------------------------------


def test_what_is_served_is_counted():
    """An oracle's users get G + 1 tokens a round each, all drafts verified; without a drafter it is one; each contender
    is a server of its own. The first rounds do not count."""
    tgt = target()
    prompts = [[3, 1, 4], [1, 5]]
    known = [p + g.tokens for p, g in zip(prompts, deepspec.generate(tgt, None, prompts, max_new_tokens=80))]
    oracle = Planned(tgt, known, G)
    contenders = {"none": (None, None), "all": (oracle, verify_all()), "some": (oracle, Probe([2], 2))}
    seen = serve(tgt, contenders, prompts, 2, rounds=10, warmup=2, sampling=Sampling())
    done = {name: Load.of(2, its) for name, its in seen.items()}
    full, plain, some = done["all"], done["none"], done["some"]
    assert list(done) == list(contenders) and full.rounds == plain.rounds == some.rounds == 10
    assert full.tokens == 2 * (G + 1) * 10 and full.verification_length == G
    assert plain.tokens == 2 * 10 and plain.verified == 0 and some.tokens == 10 * (2 + 2)
    assert full.throughput == pytest.approx(full.tokens / full.seconds)
    assert full.speed == pytest.approx(full.throughput / 2)


def test_contenders_take_turns():
    """One thread at a time, each once before any again, in no order for good; who has left is passed over; a failure of
    one is told at the end."""
    turns, seen = rounds.Turns(3, seed=1), []

    def run(me, times):
        for i in range(times):
            turns.take(me)
            seen.append(me)
            turns.give(me, leave=i == times - 1)

    threads = [threading.Thread(target=run, args=(me, times)) for me, times in enumerate((9, 1, 8))]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(10)
    laps = [seen[:3], *(seen[i : i + 2] for i in range(3, 17, 2)), seen[17:]]
    assert [sorted(lap) for lap in laps] == [[0, 1, 2], *[[0, 2]] * 7, [0]] and len(
        {tuple(lap) for lap in laps[1:8]}
    ) == 2

    class Broken(Probe):
        def __call__(self, *args):
            raise ZeroDivisionError

    tgt = target()
    contenders = {"none": (None, None), "broken": (make_drafter("vanilla", tgt), Broken([1], 2))}
    with pytest.raises(ZeroDivisionError):
        serve(tgt, contenders, [[1]], 2, rounds=3, warmup=warmup_of(2), sampling=Sampling())


def test_as_many_rounds_as_asked_or_a_clear_error(monkeypatch):
    """Prompts go on as long as they are needed where answers are short, and where no round is without one that is read
    this is said."""
    tgt = target()
    monkeypatch.setattr(closed_loop, "BUDGET", 2)
    seen = serve(tgt, {"none": (None, None)}, [[1]], 2, rounds=66, warmup=1, sampling=Sampling())["none"]
    done = Load.of(2, seen)
    assert done.rounds == 66 and done.tokens == 2 * 66
    monkeypatch.setattr(tgt, "stop_ids", tuple(range(tgt.vocab.size)))
    with pytest.raises(InputError, match="0 of 5 rounds with 2 requests in flight"):
        serve(tgt, {"none": (None, None)}, [[1]], 2, rounds=3, warmup=2, sampling=Sampling())


def traces(survived: int, chance: float = 0.9, n: int = 20) -> list[Trace]:
    logits = np.full((n, G), np.log(chance / (1 - chance)))
    return [Trace(f"t{i}", logits, np.full(n, survived)) for i in range(5)]


def test_a_simulation_is_the_cost_and_the_traces():
    """With traces that always say the same the figures follow by hand: what is verified, what survives of it, what a
    round costs with and without drafting, and without a drafter."""
    R, ones = 4, [1.0] * G
    bench = Profile(COST, {"plain_seconds": [0.01, 0.02]})
    full = simulate(traces(2), ones, bench, verify_all(), R, rounds=30)
    seconds = float(COST.step(R, np.array([R + R * G]))[0])
    assert full == Load(R, 30 * R * 3, pytest.approx(30 * seconds), 30, 30 * R * G)
    # between the sizes that were measured at as many requests, where some were
    sizes = {
        "measured": [{"requests": 9, "step": []}, {"requests": R, "off": 0.5, "step": [[R, 0.1], [R + 2 * R * G, 0.5]]}]
    }
    some = simulate(traces(2), ones, Profile(COST, sizes), verify_all(), R, rounds=30)
    assert some.seconds == pytest.approx(30 * 0.3)
    none = simulate(traces(2), ones, bench, None, R, rounds=30)
    assert none.tokens == 30 * R and none.seconds == pytest.approx(30 * np.interp(R, [1, 8], [0.01, 0.02]))
    # the temperatures count: at 0.9 ** (1 / 10) or so everything passes, as it is nothing does
    assert simulate(traces(2), ones, bench, threshold(0.95), R, rounds=30).verified == 0
    assert simulate(traces(2), [0.1] * G, bench, threshold(0.95), R, rounds=30).verified == 30 * R * G


@pytest.mark.parametrize("budget, rounds", [(1, 1), (2, 1), (3, 1), (4, 2), (5, 3), (8, 3), (9, 4), (99, 4)])
def test_a_trace_within_a_budget(budget, rounds):
    """Rounds that commit 2, 1, 4 and 1 tokens after the prefill's one bring an answer to 3, 4, 8 and 9 tokens."""
    logits, survived = np.arange(4 * G).reshape(4, G), np.array([1, 0, 3, 0])
    part = Trace("t", logits, survived).within(budget)
    assert part.id == "t" and part.survived.tolist() == [1, 0, 3, 0][:rounds]
    assert np.array_equal(part.logits, logits[:rounds])


def test_a_simulation_asks_in_turn():
    """One user, by hand: three rounds of the first answer and, for its last token, the first again; two rounds of the
    second, which has one that was recorded; the first. No round that reads a prompt counts."""
    told = [Trace("a", np.zeros((3, G)), np.array([1, 0, 3])), Trace("b", np.zeros((1, G)), np.array([2]))]
    kept = [2, 1, 4, 2, 3, 3, 2, 1, 4]
    for n in range(1, 10):
        for early in range(n):
            how = dict(rounds=n - early, warmup=early)
            assert simulate(told, [1.0] * G, Profile(COST), verify_all(), 1, **how).tokens == sum(kept[early:n])
    with pytest.raises(InputError, match="too short for rounds in which 64 users"):
        simulate(told, [1.0] * G, Profile(COST), verify_all(), 64, rounds=5)


@pytest.mark.parametrize("users", [1, 2, 5])
def test_a_simulation_of_the_same_prompts_is_what_is_served(monkeypatch, users):
    """Of greedy answers recorded in full, the same rounds: as many tokens and as many drafts verified."""
    for module in (closed_loop, simulation):
        monkeypatch.setattr(module, "BUDGET", 14)
    tgt = target()
    prompts = [Prompt(str(i), "t", [3, 1, 4 + i][: 1 + i % 3], {}) for i in range(7)]
    plain = deepspec.generate(tgt, None, [p.prompt_ids for p in prompts], max_new_tokens=80)
    known = [[*p.prompt_ids, *g.tokens] for p, g in zip(prompts, plain)]
    drafter = Planned(tgt, known, G, right=lambda n, g: g < (5 * n) % (G + 2))
    monkeypatch.setattr(drafter.config, "confidence_temperatures", (), raising=False)
    how = dict(sampling=Sampling(), max_new_tokens=40, concurrency=3, seeds=range(7))
    told = dict(collect(tgt, drafter, prompts, **how))
    answers, size = [told[i] for i in range(7)], dict(rounds=40, warmup=7)
    contenders = {"none": (None, None), "all": (drafter, verify_all())}
    seen = serve(tgt, contenders, [p.prompt_ids for p in prompts], users, sampling=Sampling(), **size)
    for name, (_, schedule) in contenders.items():
        real, like = Load.of(users, seen[name]), simulate(answers, [1.0] * G, Profile(COST), schedule, users, **size)
        assert (like.tokens, like.verified, like.rounds) == (real.tokens, real.verified, real.rounds)
    assert len({r.committed for r in seen["all"]}) > 1


@pytest.mark.parametrize("users", [1, 3, 32])
def test_first_answers_end_at_times_of_their_own(users):
    """From few tokens to all of them, evenly; later ones have all of them."""
    budgets = [budget_of(i, users) for i in range(users + 3)]
    assert budgets[users - 1 :] == [rounds.BUDGET] * 4 and min(budgets) >= 2
    steps = np.diff([1, *budgets[:users]])
    assert steps.max() - steps.min() <= 1


def test_a_simulation_goes_through_its_traces():
    """Rounds that keep nothing and all in turn: half of all drafts survive, whoever starts where."""
    logits, survived = np.zeros((20, G)), np.array([0, G] * 10)
    turn = simulate([Trace("t", logits, survived)], [1.0] * G, Profile(COST), verify_all(), 3, rounds=400)
    assert turn.tokens == pytest.approx(3 * 400 * (1 + G / 2), rel=0.02)


def test_a_simulation_without_hope_is_nearly_plain():
    """Where nothing survives, the scheduler drafts for a row now and then and pays less than a hundredth for that; each
    draft for a few costs what it costs so many users."""
    bench, n = Profile(COST), 320
    hopeless = simulate(traces(0, chance=0.01), [1.0] * G, bench, throughput(COST), 8, rounds=n)
    assert hopeless.tokens == n * 8 and hopeless.verified == 0
    assert 1 <= hopeless.seconds / (n * COST.plain(8)) < 1.01

    class First:
        name = "first"

        def wants(self, active):
            return active & (torch.arange(len(active)) == 0)

        def __call__(self, confidence, active, room):
            assert confidence.any(1).tolist() == (room > 0).tolist() == self.wants(active).tolist()
            return torch.zeros_like(room)

    some = simulate(traces(0), [1.0] * G, bench, First(), 8, rounds=n)
    assert some.seconds == pytest.approx(n * (COST.plain(8) + 0.002))


def recorded(quality: float, bias: float, seed: int = 0) -> list[Trace]:
    """60 texts of 40 rounds: slots survive with a chance that differs between texts, rounds and slots; the
    drafter knows it but for noise, and `bias` too high."""
    rng, found = np.random.default_rng(seed), []
    for i in range(60):
        x = quality + 0.75 * rng.normal() + rng.normal(size=(40, 1)) + 0.4 * rng.normal(size=(40, G))
        survived = (rng.random((40, G)) < 1 / (1 + np.exp(-x))).cumprod(1).sum(1)
        found.append(Trace(f"t{i}", x + bias + 0.5 * rng.normal(size=(40, G)), survived))
    return found


@pytest.mark.parametrize("quality, bias", [(-2, 1), (-1, 0), (0, -1), (0, 1), (1, 0), (2.5, 0)])
def test_whatever_the_drafter_and_the_load_the_scheduler_is_near_the_best(quality, bias):
    """Costs like a small model's on a CPU, where drafting ceases to pay somewhere between one user and thirty-two, or
    nowhere, or never pays: at every load at least 0.95 of the better of verifying everything and not drafting, and the
    verification length falls. Simulated; drafters that say too much, too little, and what is right."""
    cost = Additive(
        bias_seconds=0.01, bs_probes=(1, 4, 16, 32), alpha_seconds=(0.014, 0.020, 0.045, 0.080),
        m_probes=(1, 8, 16, 32, 64, 128, 256), theta_seconds=(0.040, 0.047, 0.055, 0.075, 0.115, 0.200, 0.370),
        draft_seconds=(0.014, 0.020, 0.045, 0.080),
    )  # fmt: skip
    texts, profile, lengths = [recorded(quality, bias, seed) for seed in range(3)], Profile(cost), []
    for users, number in ((1, 600), (4, 200), (32, 60)):
        how = dict(rounds=number, warmup=100)
        none, everything, ours = (
            Load.total([simulate(told, [1.0] * G, profile, make(), users, **how) for told in texts])
            for make in (lambda: None, verify_all, lambda: throughput(cost))
        )
        best = max(none.throughput, everything.throughput)
        assert ours.throughput >= 0.95 * best, users
        lengths.append(ours.verification_length)
    assert lengths == sorted(lengths, reverse=True)


def test_schedules_are_held_against_the_better_of_two():
    """By hand: four repeats with one and four users, all of whose tokens and seconds count; the better of no
    speculation and verify_all is that with more tokens a second over all. The interval is over repeats, four at least.
    """
    seconds = {"no speculation": (10, 5, 20, 5), "verify_all": (5, 10, 10, 5), "throughput": (10, 10, 12, 8)}
    rows = [
        load_views.row(name, users, [Load(users, 100, s, 1, 0) for s in took], [])
        for users in (1, 4)
        for name, took in seconds.items()
        if (name, users) != ("verify_all", 4)
    ]
    load_views.compare(rows)
    # 400 tokens in 40, 30 and 40 seconds
    assert [r["to_best"] for r in rows] == [pytest.approx(0.75), 1, pytest.approx(0.75), None, None]
    assert rows[1]["to_best_interval"] == (1, 1) and rows[3]["to_best_interval"] is None
    low, high = rows[2]["to_best_interval"]
    assert 0.5 <= low < 0.75 < high <= 1  # its ratios lie between 5 / 10 and 10 / 10
    assert f"0.75 [{low:.2f}, {high:.2f}]" in load_views.table(rows)
    few = [load_views.row(name, 1, [Load(1, 9, 3.0, 1, 0)] * 3, []) for name in seconds]
    load_views.compare(few)
    assert few[2]["to_best"] == 1 and few[2]["to_best_interval"] is None


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def models(monkeypatch, tmp_path):
    """Random models in place of those the arguments name; the drafter lies in a directory, prompts in a file."""
    tgt = target()
    make_drafter("vanilla", tgt).save(tmp_path / "drafter")
    lines = [{"id": str(i), "prompt_ids": [3, 1, 4 + i]} for i in range(6)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))

    def found(args):
        return tgt, deepspec.load_drafter(args.drafter, tgt)

    for module in (calibrate, load, profile):
        monkeypatch.setattr(module, "load_models", found)
    return ["--drafter", str(tmp_path / "drafter"), "--out", str(tmp_path / "out")], tmp_path


def test_the_whole_path(models, capsys, monkeypatch):
    """Calibrate, profile, serve, simulate: every file is written, holds a server's keys, and serves the next command;
    calibrating again records nothing anew."""
    common, root = models
    monkeypatch.setattr(closed_loop, "MEMORY", 8)  # a short warm-up: most of the rounds are of it
    prompts, out = ["--prompts", str(root / "prompts.jsonl")], root / "out"
    calibrate.run([*common, *prompts, "--rounds", "60", "--max-new-tokens", "12", "--concurrency", "4"])
    served = json.loads((out / "sts.json").read_text())
    assert set(served) == {"temperatures", "dataset", "num_samples", "ece_before", "ece_after"}
    assert len(served["temperatures"]) == len(served["ece_after"]) == G and served["num_samples"] > 20
    config = json.loads((root / "drafter" / "config.json").read_text())
    assert config["deepspec"]["drafter"]["confidence_temperatures"] == served["temperatures"]
    before = (out / "traces.jsonl").read_text()
    calibrate.run([*common, *prompts, "--rounds", "60", "--max-new-tokens", "12", "--concurrency", "4"])
    assert (out / "traces.jsonl").read_text() == before
    assert json.loads((out / "sts.json").read_text()) == served  # traces hold logits without temperatures

    profile.run([*common, "--concurrency", "1,2", "--context", "5", "--repeats", "1"])
    assert load_profile(out / "profile.json").cost.bs_probes == (1, 2)
    assert load_profile(out / "sps.json").cost.max_batch_tokens == 2 + 2 * G

    schedules = ["--schedule", "verify_all", "threshold:0.5", "throughput", "lagged", f"throughput:{out / 'sps.json'}"]
    files = ["--profile", str(out / "profile.json"), "--traces", str(out / "traces.jsonl"), "--concurrency", "1,2"]
    load.run([*common, *prompts, *files, *schedules, "--rounds", "5", "--repeats", "1"])
    drawn = [p for p in ("reliability.png", "profile.png", "load.png") if plots.available()]
    assert all((out / name).read_bytes()[:4] == b"\x89PNG" for name in drawn)
    monkeypatch.setattr(plots, "available", lambda: False)  # drawing again is most of the rest's time
    rows = json.loads((out / "load.json").read_text())["rows"]
    assert len(rows) == 2 * 6 and all(r["measured_throughput"] > 0 and r["simulated_throughput"] > 0 for r in rows)
    assert all(max(r["to_best"] for r in rows[i : i + 2]) == 1 for i in (0, 6))  # of the two that set it
    load.run([*common, *files, *schedules, "--simulate", "--sts", str(out / "sts.json")])
    again = json.loads((out / "load.json").read_text())["rows"]
    plain = [[r["simulated_throughput"] for r in table if r["schedule"] == load.NONE] for table in (rows, again)]
    assert plain[0] == pytest.approx(plain[1]) and all(r["simulated_throughput"] > 0 for r in again)
    assert all(r["measured_throughput"] is None for r in again)
    assert "verify_all" in capsys.readouterr().out and (out / "load.md").read_text().count("|") > 20
    # without a profile a probe takes turns with the schedules; two repeats measure each size
    beside = ["--traces", str(out / "traces.jsonl"), "--concurrency", "2", "--schedule", "verify_all", "lagged"]
    load.run([*common, *prompts, *beside, "--rounds", "5", "--repeats", "2"])
    made = json.loads((out / "profile.json").read_text())["deepspec"]
    (measured,) = made["measured"]
    assert measured["requests"] == 2 and made["plain_seconds"][0] > 0
    assert {tokens for tokens, _ in measured["step"]} == {2 + n for n in planned(G, 2, 1) if n != OFF}
    rows = json.loads((out / "load.json").read_text())["rows"]
    assert all(r["measured_throughput"] > 0 and r["simulated_throughput"] > 0 for r in rows) and len(rows) == 3


@pytest.mark.parametrize(
    "command, extra, words",
    [
        (load, ["--simulate"], "needs --profile and --traces"),
        (load, [], "--prompts is missing"),
        (load, ["--prompts", "p", "--schedule", "guess"], "schedule 'guess' must be"),
        (load, ["--prompts", "p", "--concurrency", "0"], "numbers >= 1"),
        (load, ["--prompts", "p", "--schedule", "lagged", "lagged"], "'lagged' is given twice"),
        (load, ["--prompts", "p"], "no data file 'p'"),
        (load, ["--prompts", "p", "--sts", "s"], "--sts is for the simulation, which needs --traces"),
        (load, ["--prompts", "p", "--traces", "t"], "traces t cannot be read"),
        (load, ["--rounds", "0"], "--rounds: a whole number >= 1 is needed, got '0'"),
        (load, ["--repeats", "many"], "--repeats: a whole number"),
        (load, ["--seed", "-1"], "--seed: a whole number >= 0"),
        (load, ["--temperature", "nan"], "--temperature: a number >= 0 is needed, got 'nan'"),
        (profile, ["--concurrency", "1,x"], "numbers with commas"),
        (profile, ["--repeats", "0"], "--repeats: a whole number >= 1"),
        (profile, ["--context", "-3"], "--context: a whole number >= 1"),
        (calibrate, [], "required: --prompts"),
        (calibrate, ["--prompts", "p"], "no data file 'p'"),
        (calibrate, ["--prompts", "p", "--concurrency", "0"], "--concurrency: a whole number >= 1"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_leave_nothing(models, command, extra, words, monkeypatch):
    """Before a model is loaded."""
    common, root = models
    monkeypatch.setattr(command, "load_models", None)
    with pytest.raises(InputError, match=words) as error:
        command.run([*common, *extra])
    assert "\n" not in str(error.value) and not (root / "out").exists()


def test_a_drafter_without_opinion_is_not_calibrated(models):
    common, root = models
    make_drafter("no-confidence", target()).save(root / "drafter")
    with pytest.raises(InputError, match="no confidence head"):
        calibrate.run([*common, "--prompts", str(root / "prompts.jsonl")])


def test_prompts_must_fit(models):
    tgt, (_, root) = target(), models
    with pytest.raises(InputError, match="no prompt has at most 2 tokens"):
        arguments.load_prompts(root / "prompts.jsonl", tgt, tgt.spec.max_positions - 2)


def test_an_evaluation_profiles_what_its_schedules_need(tmp_path):
    """A cost for each drafter with a schedule that asks for one, kept in a file for the next time; none for others."""
    tgt = target()
    drafters = {"a": make_drafter("vanilla", tgt), "b/c": make_drafter("dflash", tgt)}
    config = EvalConfig(concurrency=2)
    task = SimpleNamespace(prompts=[Prompt("p", "t", [3, 1, 4], {})])
    contenders = [Contender("baseline"), Contender("x", "a", "verify_all"), Contender("y", "b/c", "lagged")]
    work = SimpleNamespace(config=config, tasks=[task], contenders=contenders)
    found = profile.with_costs(Models(tgt, drafters), work, tmp_path)
    assert list(found.costs) == ["b/c"] and found.costs["b/c"].bs_probes == (2,)
    assert contenders[2].fresh_schedule(found.costs["b/c"]).name == "lagged"
    (file,) = tmp_path.iterdir()
    again = profile.with_costs(Models(tgt, drafters), work, tmp_path)
    assert again.costs == found.costs and list(tmp_path.iterdir()) == [file]
