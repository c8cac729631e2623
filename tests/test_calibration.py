"""Laws of calibration: figures by hand, temperatures that help on other records, an order that they keep.

Letters: N records, G slots.
"""

import json

import numpy as np
import pytest
import torch
from helpers import G, Planned, make_drafter, target

import deepspec
from deepspec import InputError, Sampling
from deepspec.data.prompts import Prompt
from deepspec.eval.calibration import (
    GRID,
    Records,
    auc,
    brier,
    ece,
    fit,
    load_sts,
    quality,
    reliability,
    survival,
)  # fmt: skip
from deepspec.eval.traces import Trace, TraceFile, collect, load_traces, logit


def records(n: int, true: list[float], seed: int = 0) -> Records:
    """Records whose conditional confidence is right once slot g's logit is divided by true[g]."""
    rng = np.random.default_rng(seed)
    right = rng.normal(0.8, 1.2, (n, len(true)))
    alive = rng.random(right.shape) < 1 / (1 + np.exp(-right))
    return Records(right * np.array(true), alive.cumprod(1).sum(1))


def test_figures_by_hand():
    """Four records in two bins of 15, by pencil: (0.5 + 0.5) promised and 2 of 2 kept, (0.9 + 0.9) promised, 1 of 2."""
    chance, outcome = np.array([0.5, 0.5, 0.9, 0.9]), np.array([True, True, True, False])
    assert ece(chance, outcome) == pytest.approx((abs(1.0 - 2) + abs(1.8 - 1)) / 4)
    assert brier(chance, outcome) == pytest.approx((0.25 + 0.25 + 0.01 + 0.81) / 4)
    assert auc(chance, outcome) == pytest.approx((0 + 0 + 0.5) / 3)  # two below the one that failed, one beside it
    assert auc(chance, np.ones(4, bool)) is None
    assert reliability(chance, outcome) == [(0.5, 1.0, 2), (pytest.approx(0.9), 0.5, 2)]
    assert ece(np.array([1.0]), np.array([True])) == 0  # the last bin holds 1
    assert survival(np.array([[0.0, np.log(3)]]), [1.0, 2.0]) == pytest.approx(
        np.array([[0.5, 0.5 * 3**0.5 / (1 + 3**0.5)]])
    )


def test_a_slot_is_judged_on_the_rounds_that_reached_it():
    """Four rounds by hand: slot 1's own confidence is ranked among the three that reached it (AUC 1/2: one above, one
    below), its survival is judged on all four."""
    logits = np.array([[2.0, 9.0], [2.0, 0.0], [2.0, 1.0], [2.0, -1.0]])
    found = quality(Records(logits, np.array([0, 2, 1, 1])), [1.0, 1.0])
    assert found.auc == [0.5, 0.5]  # slot 0: all the same confidence
    a = survival(logits, [1.0, 1.0])
    assert found.brier[1] == pytest.approx(np.mean((a[:, 1] - [0, 1, 0, 0]) ** 2))
    assert sum(n for _, _, n in found.diagrams[1]) == 4


def test_temperatures_are_found_and_help_on_other_records():
    """Logits spoilt by known factors: fitted on one half, the mean calibration error on the other falls below 2 % and
    below half; the order, and so the AUC, of every slot stays. 20,000 records of a fixed seed."""
    true = [2.5, 0.5, 1.0, 3.0]
    found = fit(records(20_000, true))
    assert all(t in GRID for t in found)
    assert np.abs(np.log(np.array(found) / true)).max() < 0.35
    theirs = records(20_000, true, seed=1)
    before, after = quality(theirs, [1.0] * 4), quality(theirs, found)
    assert np.mean(after.ece) < 0.02 and np.mean(after.ece) < np.mean(before.ece) / 2
    assert np.mean(after.brier) < np.mean(before.brier)
    assert after.auc == before.auc and None not in after.auc


def test_slots_are_fitted_from_the_left():
    """A slot's temperature depends on the slots up to it alone, and minimises the error of the product up to it with
    the earlier ones as they were found."""
    all_four = records(3000, [2.0, 0.7, 1.5, 1.0])
    grid = GRID[::12]
    found = fit(all_four, grid)
    for g in range(1, 5):
        assert fit(Records(all_four.logits[:, :g], all_four.survived.clip(max=g)), grid) == found[:g]
    for g in range(4):
        errors = [
            ece(survival(all_four.logits, [*found[:g], t, 1, 1, 1][:4])[:, g], all_four.survived > g) for t in grid
        ]
        assert errors[list(grid).index(found[g])] == min(errors)


def test_confidence_that_is_right_is_left_alone():
    """Of temperatures that do as well the one nearest 1 is taken: a slot that nobody reaches keeps 1."""
    assert fit(Records(np.zeros((10, 2)), np.zeros(10, dtype=int)), np.array([0.5, 1.0, 2.0])) == [1.0, 1.0]


def test_records_are_needed():
    with pytest.raises(InputError, match="no records"):
        Records(np.zeros((0, 3)), np.zeros(0))


def test_logits_come_back():
    """logit undoes the sigmoid, and stays finite where float32 said 0 or 1."""
    x = torch.linspace(-12, 12, 49)
    assert np.abs(logit(x.sigmoid().double().numpy()) - x.double().numpy()).max() < 0.02
    assert np.isfinite(logit(np.array([0.0, 1.0]))).all()


# -- temperatures in a drafter -----------------------------------------------------------------------------------------

TEMPERATURES = (2.0, 0.5, 1.0, 3.0)


def proposals(tgt, **changes):
    drafter = make_drafter("vanilla", tgt, **changes)
    state = drafter.new_state(1, 16)
    scored = tgt.open(1, 16, drafter.config.target_layer_ids).score(torch.tensor([[3, 1, 4]]))
    drafter.observe(state, scored.features, torch.tensor([[1, 4, 1]]), [3])
    return drafter, drafter.propose(state, Sampling(), torch.full((1, G), 0.5))


def test_a_drafter_divides_by_its_temperatures(tmp_path):
    """A proposal's confidence is sigmoid(logit / temperature), its tokens stay; config.json keeps the temperatures."""
    tgt = target()
    _, plain = proposals(tgt)
    drafter, scaled = proposals(tgt, confidence_temperatures=TEMPERATURES)
    assert torch.allclose(
        scaled.confidence, (plain.confidence.logit() / torch.tensor(TEMPERATURES)).sigmoid(), atol=1e-5
    )
    assert torch.equal(scaled.tokens, plain.tokens)
    drafter.save(tmp_path / "d")
    assert deepspec.load_drafter(tmp_path / "d", tgt).config.confidence_temperatures == TEMPERATURES


@pytest.mark.parametrize("wrong", [(1.0,) * (G + 1), (1.0, 1.0, 1.0, 0.0), (1.0, -1.0, 1.0, 1.0)])
def test_wrong_temperatures_are_refused(wrong):
    with pytest.raises(InputError, match="confidence_temperatures must hold 4 numbers > 0"):
        make_drafter("vanilla", target(), confidence_temperatures=wrong)


# -- traces ------------------------------------------------------------------------------------------------------------

PROMPTS = [Prompt(f"p{i}", "t", [3, 1, 4 + i], {}) for i in range(5)]


def test_traces_hold_what_was_promised_and_what_survived():
    """Survivals are those of the rounds, logits are the drafter's own whatever temperatures it has, the last round of a
    request is left out; a drafter's survivals are exactly the slots it gets right."""
    tgt = target()
    settings = dict(sampling=Sampling(), max_new_tokens=20, concurrency=3, seeds=range(5))
    plain, scaled = (
        dict(collect(tgt, proposals(tgt, **c)[0], PROMPTS, **settings))
        for c in ({}, {"confidence_temperatures": TEMPERATURES})
    )
    for i, trace in plain.items():
        assert trace.id == f"p{i}" and trace.logits.shape == (len(trace.survived), G) and len(trace.survived) > 2
        assert np.abs(scaled[i].logits - trace.logits).max() < 1e-3
        assert scaled[i].survived.tolist() == trace.survived.tolist()
    known = [
        p.prompt_ids + g.tokens
        for p, g in zip(PROMPTS, deepspec.generate(tgt, None, [p.prompt_ids for p in PROMPTS], max_new_tokens=40))
    ]
    mixed = Planned(tgt, known, G, right=lambda n, g: g != n % (G + 1))
    mixed.config.confidence_temperatures = ()
    for _, trace in collect(tgt, mixed, PROMPTS, **settings):
        assert trace.survived.tolist() == [n % (G + 1) for n in range(len(trace.survived))]


def test_a_collection_goes_on(tmp_path):
    """What is written reads back; a line that was killed half-way is cut off; other settings are refused."""
    path, one = tmp_path / "traces.jsonl", Trace("a", np.array([[0.5, -1.25]]), np.array([1]))
    file = TraceFile(path, {"seed": 1})
    file.add(4, one)
    with path.open("a") as f:
        f.write('{"key": 5, "id": "b", "log')
    again = TraceFile(path, {"seed": 1})
    assert again.keys == [4] and again.traces[0].logits.tolist() == [[0.5, -1.25]]
    again.add(5, Trace("b", np.zeros((0, 2)), np.zeros(0, dtype=int)))
    settings, traces = load_traces(path)
    assert settings == {"seed": 1} and [t.id for t in traces] == ["a"] and traces[0].survived.tolist() == [1]
    with pytest.raises(InputError, match="another seed"):
        TraceFile(path, {"seed": 2})
    path.write_text("{}\n")
    with pytest.raises(InputError, match="no file of traces"):
        load_traces(path)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"temperatures": [1, 0]}', '{"temperatures": []}', '{"temperatures": "x"}']
)
def test_broken_temperatures_are_refused(tmp_path, text):
    (tmp_path / "sts.json").write_text(text)
    with pytest.raises(InputError, match=r"sts\.json"):
        load_sts(tmp_path / "sts.json")


def test_sts_is_read(tmp_path):
    (tmp_path / "sts.json").write_text(json.dumps({"temperatures": [1, 2.5], "dataset": "x", "num_samples": 3}))
    assert load_sts(tmp_path / "sts.json") == [1.0, 2.5]
