"""Each study is one command, one table and one picture, and its figures are those of the result rows."""

import json

import pytest
from helpers import write_run

from deepspec.checked import InputError
from deepspec.eval import plots, study_views
from deepspec.eval.studies import run
from deepspec.train import loop


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A recipe for a random target, and two tasks, one of them named like a benchmark."""
    folder = tmp_path_factory.mktemp("studies")
    write_run(folder)
    for name in ("gsm8k", "mine"):
        rows = [{"id": f"{name}{i}", "prompt_ids": [i + 1, 2 * i + 1]} for i in range(3)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def common(place, out):
    tasks = f"{place}/gsm8k.jsonl,{place}/mine.jsonl"
    return ["--tasks", tasks, "--out", str(out), "--max-new-tokens", "8", "--warmup", "0", "--device", "cpu"]


def read(out, study):
    """(header, lines) of the table, and the result rows."""
    lines = (out / f"{study}.md").read_text().splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if not line.startswith("| ---")]
    rows = json.loads((out / "results.json").read_text())
    assert (out / f"{study}.png").exists() == plots.available()
    return cells[0], cells[1:], rows


@pytest.fixture(scope="module")
def swept(place):
    """The output of a depth study, whose drafters the other studies use."""
    out = place / "depth"
    run(
        [
            "depth",
            "--config",
            f"a={place}/run.py",
            "--values",
            "1",
            "2",
            "--set",
            "train.max_steps=1",
            *common(place, out),
        ]
    )
    return out


def test_a_sweep_trains_and_measures_every_value(swept, capsys):
    header, lines, rows = read(swept, "depth")
    assert header[:4] == ["recipe", "draft layers", "task", "T"]
    expected = [["a", str(n), task, "0"] for task in ("gsm8k", "mine") for n in (1, 2)]
    assert [line[:4] for line in lines] == expected
    assert [line[4] for line in lines] == [f"{r['tau']:.2f}" for r in rows]
    for n in (1, 2):
        config = json.loads((swept / "drafters" / f"a-num_draft_layers-{n}" / "drafter" / "config.json").read_text())
        assert config["num_hidden_layers"] == n


def test_a_sweep_again_trains_nothing_again(swept, place):
    before = [(p, p.read_bytes()) for p in sorted(swept.rglob("*")) if p.suffix in (".safetensors", ".jsonl")]
    more = ["--values", "1", "2", "--set", "train.max_steps=1", "--resume"]
    run(["depth", "--config", f"a={place}/run.py", *more, *common(place, swept)])
    after = [(p, p.read_bytes()) for p in sorted(swept.rglob("*")) if p.suffix in (".safetensors", ".jsonl")]
    assert before == after, "neither trained nor decoded again"


def test_acceptance_pools_the_tasks_of_a_domain(swept, place, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "available", lambda: False)
    drafter = f"d={swept}/drafters/a-num_draft_layers-1/drafter"
    run(["acceptance", "--drafter", drafter, *common(place, tmp_path)])
    header, lines, rows = read(tmp_path, "acceptance")
    assert header == ["domain", "drafter", "T", "slot 0", "slot 1", "slot 2", "slot 3"]
    assert [line[:3] for line in lines] == [["math", "d", "0"], ["mine", "d", "0"]]
    for line, r in zip(lines, rows):
        assert line[3:] == ["-" if x is None else f"{x:.3f}" for x in r["accept_rates_conditional"]]


def test_threshold_admits_ever_less(swept, place, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "available", lambda: False)
    drafter = f"d={swept}/drafters/a-num_draft_layers-1/drafter"
    run(["threshold", "--drafter", drafter, "--levels", "0", "0.5", "1", *common(place, tmp_path)])
    header, lines, rows = read(tmp_path, "threshold")
    assert header[3:] == ["accepted", "rejected", "acceptance", "tau"]
    sent = {line[0]: float(line[3]) + float(line[4]) for line in lines if line[1] == "mine"}
    assert list(sent) == [f"d threshold:{x}" for x in ("0", "0.5", "1")]
    assert sent["d threshold:0"] > sent["d threshold:0.5"] >= sent["d threshold:1"] == 0
    assert {line[6] for line in lines if line[0] == "d threshold:1"} == {"1.00"}
    assert {r["greedy_equal"] for r in rows} == {None}, "no check unless asked for"


def counted(task, accepted, reached, tokens, turns, rounds):
    counts = {"accepted": accepted, "reached": reached}
    row = {"domain": "math", "drafter": "d", "temperature": 0.0, "task": task, "accept_counts": counts}
    return {**row, "tokens": tokens, "turns": turns, "rounds": rounds}


def test_pooled_figures_weigh_rounds_and_not_tasks():
    rows = [counted("a", [1, 0], [2, 0], 11, 1, 5), counted("b", [30, 9], [38, 30], 95, 5, 20)]
    assert study_views.acceptance_table(rows)[1] == ("math", "d", "0", f"{31 / 40:.3f}", f"{9 / 30:.3f}")
    assert study_views.pooled_tau(rows) == (10 + 90) / 25


@pytest.mark.parametrize(
    "change, words",
    [
        (("--tasks", "{place}/nope.jsonl"), "nope.jsonl"),
        (("--values", "2", "0"), "block_size"),
        (("--config", "{place}/run.py", "{place}/run.py"), "--config: the same name"),
    ],
)
def test_a_mistake_is_found_before_anything_is_trained(place, tmp_path, monkeypatch, change, words):
    """Also where it is in the last of several recipes or values, or in what comes after the training."""
    monkeypatch.setattr(loop, "fit", None)
    given = {"--config": [f"{place}/run.py"], "--values": ["2"]}
    given |= dict(zip(common(place, tmp_path / "out")[::2], ([x] for x in common(place, tmp_path / "out")[1::2])))
    given[change[0]] = [x.format(place=place) for x in change[1:]]
    with pytest.raises(InputError, match=words):
        run(["length", *(word for option, values in given.items() for word in (option, *values))])
    assert not (tmp_path / "out").exists()


ROW = {"accepted_per_round": 1.5, "wasted_per_round": 0.5, "tau_interval": (1.0, 3.0), "tau": 2.0}
ROW |= {"draft_seconds_per_round": 0.001, "verify_seconds_per_round": 0.25}


def test_tables_keep_apart_what_is_not_one():
    """A line for each drafter, domain, task and temperature; a drafter of more slots widens the table; by hand."""
    base = {**counted("a", [3], [4], 11, 1, 5), **ROW}
    hot = {**base, "temperature": 1.0, "accept_counts": {"accepted": [1], "reached": [4]}}
    hot |= {"accepted_per_round": 0.0, "wasted_per_round": 0.0, "tau": None, "tau_interval": None, "rounds": 0}
    wide = {**base, "drafter": "w", "accept_counts": {"accepted": [2, 0], "reached": [2, 0]}}
    assert study_views.acceptance_table([base, hot, wide]) == [
        ("domain", "drafter", "T", "slot 0", "slot 1"),
        ("math", "d", "0", "0.750", "-"),
        ("math", "d", "1", "0.250", "-"),
        ("math", "w", "0", "1.000", "-"),
    ]
    chat = {**base, "domain": "chat"}
    assert study_views.threshold_table([base, hot, chat])[1:] == [
        ("d", "math", "0", "1.50", "0.50", "0.750", "2.00"),
        ("d", "math", "1", "0.00", "0.00", "-", "-"),
        ("d", "chat", "0", "1.50", "0.50", "0.750", "2.00"),
    ]
    places = {"d": ("a", 3), "w": ("b", 1)}
    assert study_views.sweep_table([base, {**hot, "draft_seconds_per_round": None}, wide], places, "depth")[1:] == [
        ("a", "3", "a", "0", "2.00", "[1.00, 3.00]", "1.00", "250.00"),
        ("a", "3", "a", "1", "-", "-", "-", "250.00"),
        ("b", "1", "a", "0", "2.00", "[1.00, 3.00]", "1.00", "250.00"),
    ]


def test_a_sweep_s_picture_shows_each_recipe_by_value():
    """Ascending in value, a panel a task and temperature, each recipe's own points."""
    pytest.importorskip("matplotlib")
    places = {"x": ("a", 3), "y": ("a", 1), "z": ("b", 1)}
    rows = [
        {"drafter": d, "task": "t", "temperature": t, "tau": tau + t, "tau_interval": None}
        for t in (0.0, 1.0)
        for d, tau in (("x", 3.0), ("y", 2.0), ("z", 5.0))
    ]
    for t, panel in enumerate(study_views.sweep_picture(rows, places, "depth").axes):
        seen = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in panel.lines}
        assert seen == {"a": ([1, 3], [2.0 + t, 3.0 + t]), "b": ([1], [5.0 + t])}


def test_a_sweep_needs_one_process(place, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="one process"):
        run(["length", "--config", f"{place}/run.py", "--values", "2", *common(place, tmp_path / "out")])
    assert not (tmp_path / "out").exists()
