"""Laws of a run that is stopped, killed, starved or poisoned: nothing that was done is lost, nothing wrong is kept."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import worlds
from helpers import token_rows, write_jsonl, write_run

import deepspec
from deepspec import ConfigError, InputError, fit, load_config
from deepspec.checked import RunError
from deepspec.data.batches import Batches
from deepspec.train import checkpoint
from deepspec.train.objective import Objective

STEPS = 40
LONG = (f"train.max_steps={STEPS}", "train.epochs=99", "train.micro_batch=1", "train.save_every=1")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("survive"))


@pytest.fixture(scope="module")
def straight(file, tmp_path_factory):
    """Forty uninterrupted steps of four passes each, every checkpoint kept."""
    out = tmp_path_factory.mktemp("straight") / "out"
    run = worlds.train([(file, (*LONG, "train.keep_last=99", f"out={out}"), None)])[0]
    return out, run


def rows_of(out) -> list[dict]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if "second" not in k} for line in lines]


def same_state(a: Path, b: Path, step: int) -> bool:
    x, y = worlds.state(a, step), worlds.state(b, step)
    return x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)


def newest(out) -> int:
    kept = checkpoint.found(out)
    return int(kept[-1].name.removeprefix("step-")) if kept else 0


def wait(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happens"
        time.sleep(0.002)


# -- kills and signals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kills", [5, pytest.param(10, marks=pytest.mark.slow)])  # more of the same
def test_kills_change_nothing(file, straight, kills, tmp_path):
    """SIGKILL after step 17 and at random instants, also within the writing of a checkpoint: after each, the newest
    checkpoint is whole and is the uninterrupted run's; the end is bit-equal, weights, optimiser, learning rates and
    every number logged."""
    out, chance = tmp_path / "out", random.Random(5)
    words = ("--config", str(file), "--set", *LONG, f"out={out}")
    goals = [17 + 2 * i for i in range(kills)]
    for goal in goals:
        child = worlds.command(*words)
        wait(lambda goal=goal: newest(out) >= goal)
        time.sleep(chance.random() * 0.05)
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL and goal <= newest(out) < STEPS
        assert same_state(out, straight[0], newest(out))
    child = worlds.command(*words)
    child.join(worlds.SECONDS)
    assert child.exitcode == 0 and same_state(out, straight[0], STEPS)
    assert rows_of(out) == rows_of(straight[0])
    assert not [p for p in (out / "checkpoints").iterdir() if p.name.startswith(".")]
    names = [p.name for p in checkpoint.found(out)]
    assert names == [f"step-{STEPS - 1:07d}", f"step-{STEPS:07d}"] and (out / "drafter" / "config.json").is_file()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_with_0(file, straight, number, tmp_path):
    """Told to stop, the command saves what it has though no checkpoint was due, exits with 0 within seconds, and goes
    on to the same end."""
    out = tmp_path / "out"
    words = ("--config", str(file), "--set", *LONG, "train.save_every=1000", f"out={out}")
    child = worlds.command(*words)
    wait(lambda: (out / "metrics.jsonl").is_file() and len(rows_of(out)) >= 3)
    os.kill(child.pid, number)
    began = time.monotonic()
    child.join(60)
    assert child.exitcode == 0 and time.monotonic() - began < 30
    assert 3 <= newest(out) < STEPS and same_state(out, straight[0], newest(out))
    assert len(rows_of(out)) == newest(out)


PLACES = (1, 2, 3, 4, 6, 8)
"""Of a stop: every one in the first step, two in the second. Others are these, a step or two later."""


@pytest.mark.parametrize(
    "asked", [pytest.param(n, marks=[] if n in PLACES else pytest.mark.slow) for n in range(1, 14)]
)
def test_stopping_within_a_step_loses_nothing(file, straight, asked, tmp_path):
    """Told to stop at any question, between passes or after them, the run ends with the state of its last whole step;
    what was half accumulated leaves no trace."""
    calls = []

    def stop() -> bool:
        calls.append(1)
        return len(calls) >= asked

    config = load_config(file, *LONG, "train.save_every=1000", f"out={tmp_path / 'out'}")
    reports = [r.step for r in fit(config, stop=stop)]
    assert reports == list(range(1, asked // 4 + 1)) and len(calls) <= asked + 3
    assert newest(tmp_path / "out") == len(reports)
    if reports:
        assert same_state(tmp_path / "out", straight[0], len(reports))
    (report,) = worlds.train([(file, (*LONG, f"out={tmp_path / 'out'}"), len(reports) + 1)])
    assert report["reports"] == straight[1]["reports"][len(reports) : len(reports) + 1]


def test_processes_stop_together(file, straight, tmp_path):
    """One of two processes is told to stop, in the middle of a step: both end at the same step, with exit, and one
    process goes on from what they saved."""
    job = (str(file), (*LONG, "train.batch_size=6", f"out={tmp_path / 'out'}"))
    for told in ((1, 5), (0, 6), (1, 3)):
        first, second = worlds.together(2, stopped, job, *told)
        assert first == second
    whole = worlds.train([(file, (*LONG, "train.batch_size=6", f"out={tmp_path / 'one'}"), 8)])[0]["reports"]
    rest = worlds.train([(*job, 8)])[0]["reports"]
    assert rest and rest[-1]["step"] == 8
    assert rest[-1]["loss"] == pytest.approx(whole[-1]["loss"], rel=1e-4)


def stopped(job, rank: int, asked: int) -> list[int]:
    """Steps this process did before all stopped because process `rank` was told to, at its asked-th question."""
    calls = []

    def stop() -> bool:
        calls.append(1)
        return int(os.environ["RANK"]) == rank and len(calls) >= asked

    return [report.step for report in fit(load_config(job[0], *job[1]), stop=stop)]


# -- going on from a folder --------------------------------------------------------------------------------------------


def test_resume_from_a_folder(file, straight, tmp_path):
    """A checkpoint's folder, or a run's, is gone on from: in its own run (later checkpoints are set aside, not lost)
    and in a new one, which goes on by itself when the same command is given again; what is no checkpoint is refused."""
    shutil.copytree(straight[0], tmp_path / "out")
    config = load_config(file, *LONG, "train.keep_last=99", f"out={tmp_path / 'out'}")
    run = fit(config, resume=str(checkpoint.folder(tmp_path / "out", 37)))
    assert [r.step for r in run] == [38, 39, 40]
    assert same_state(tmp_path / "out", straight[0], STEPS) and rows_of(tmp_path / "out") == rows_of(straight[0])
    aside = [p.name for p in (tmp_path / "out" / "checkpoints").glob("aside-*")]
    assert sorted(aside) == [f"aside-step-00000{n}" for n in (38, 39, 40)]
    new = load_config(file, *LONG, f"out={tmp_path / 'new'}")
    assert [r.step for r in fit(new, resume=str(checkpoint.folder(straight[0], 39)))] == [40]
    assert same_state(tmp_path / "new", straight[0], STEPS)
    assert list(fit(new, resume=str(checkpoint.folder(straight[0], 39)))) == []
    for wrong in (str(tmp_path / "nothing"), str(tmp_path), str(straight[0] / "drafter")):
        with pytest.raises(InputError, match="no checkpoint in"):
            fit(config, resume=wrong)
    with pytest.raises(ConfigError, match=r"train.lr: 0.003 -> 0.1"):
        fit(load_config(file, *LONG, "train.lr=0.1", f"out={tmp_path / 'third'}"), resume=str(straight[0]))
    assert not (tmp_path / "third").exists()


def test_other_data_are_refused(file, straight, tmp_path):
    """The same settings with other rows behind the same path are another run."""
    folder = tmp_path / "copy"
    shutil.copytree(file.parent, folder)
    config = load_config(file, f"out={tmp_path / 'out'}", f"data.path={folder / 'rows.jsonl'}", "train.max_steps=2")
    list(fit(config))
    write_jsonl(folder / "rows.jsonl", token_rows(11))
    with pytest.raises(ConfigError, match=r"rows.*10.*11"):
        fit(config)
    write_jsonl(folder / "rows.jsonl", token_rows(10, length=19))
    with pytest.raises(ConfigError, match="data"):
        fit(config)


def test_the_best_stays(file, tmp_path):
    """A checkpoint marked as the best outlives newer ones until a better one is marked; going back before it forgets
    it."""
    out = tmp_path / "out"
    for report in fit(load_config(file, "train.save_every=1", "train.keep_last=2", f"out={out}")):
        if report.step in (1, 3):
            checkpoint.mark_best(out, report.step, float(report.step))
    assert [p.name[-1] for p in checkpoint.found(out)] == ["3", "5", "6"] and checkpoint.best(out) == (3, 3.0)
    checkpoint.tidy(out, 4)
    assert checkpoint.best(out) == (3, 3.0)
    checkpoint.tidy(out, 2)
    assert checkpoint.best(out) is None and checkpoint.found(out) == []


# -- numbers that are not finite ---------------------------------------------------------------------------------------


def poison(monkeypatch, index: int, after: int) -> None:
    """From the `after`-th pass on, the features of sequence `index` hold a NaN."""
    real, calls = Batches.batch, []

    def batch(self, picked):
        calls.append(1)
        made = real(self, picked)
        for b, (i, _) in enumerate(picked):
            if i == index and len(calls) > after:
                made.features[b, 2] = torch.nan
        return made

    monkeypatch.setattr(Batches, "batch", batch)


def test_a_loss_that_is_not_finite_stops_the_run(file, straight, monkeypatch, tmp_path):
    """One line with the step and the sample; weights and checkpoints stay as they were before it."""
    config = load_config(file, *LONG, "train.save_every=1", f"out={tmp_path / 'out'}")
    first = next(n for n, i in enumerate(straight[1]["served"]) if n >= 8 and i == 3)
    poison(monkeypatch, 3, 8)
    run, last = fit(config), None
    with pytest.raises(RunError) as caught:
        for report in run:
            last = report
    text, step = str(caught.value), first // 4 + 1
    assert text.startswith(f"step {step}: loss or gradient is not finite, from sample ") and len(text.splitlines()) == 1
    assert repr(row_id(config, 3)) in text and f"step-{step - 1:07d}" in text
    assert newest(tmp_path / "out") == step - 1 and same_state(tmp_path / "out", straight[0], step - 1)
    weights = worlds.state(tmp_path / "out", step - 1)
    assert all(torch.equal(v, weights[k]) for k, v in last.drafter.state_dict().items())


def row_id(config, index: int) -> str:
    from deepspec.data.loader import load_rows

    return load_rows(config.data.path, None, (), config.data, 40)[0][index].id


def test_a_gradient_that_is_not_finite_stops_the_run(file, tmp_path):
    """A finite loss does not hide it; where no row alone is to blame, that is said."""
    config = load_config(file, "train.save_every=1", f"out={tmp_path / 'out'}")
    counts: list[int] = []

    def spoil(grad):
        counts.append(1)
        return grad * torch.inf if len(counts) == 3 else grad

    run = fit(config)
    report = next(run)
    next(report.drafter.parameters()).register_hook(spoil)
    with pytest.raises(RunError, match="step 3: loss or gradient is not finite, from no sample alone"):
        list(run)
    assert newest(tmp_path / "out") == 2


def poisoned(job) -> str:
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, 3, 0)
        try:
            return str([r.step for r in fit(load_config(job[0], *job[1]))])
        except RunError as error:
            return str(error)


def test_all_processes_name_the_sample(file, tmp_path):
    """A bad row of one process stops all, at the same step, and all name it."""
    job = (str(file), ("train.micro_batch=1", f"out={tmp_path / 'out'}"))
    for how in ("ddp", "fsdp"):
        first, second = worlds.together(2, poisoned, (job[0], (*job[1], f"train.sharding={how}")))
        assert first == second and "not finite, from sample" in first
        assert repr(row_id(load_config(file), 3)) in first


# -- memory ------------------------------------------------------------------------------------------------------------


def starve(patch, most: int, when=lambda calls: True) -> None:
    """The objective runs out of memory with more than `most` rows."""
    real, calls = Objective.forward, []

    def forward(self, batch, *args, **kwargs):
        calls.append(1)
        if len(batch.tokens) > most and when(len(calls)):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(self, batch, *args, **kwargs)

    patch.setattr(Objective, "forward", forward)


@pytest.mark.parametrize("when", [1, 2, 3])
def test_out_of_memory_means_fewer_rows_a_pass(file, monkeypatch, caplog, when, tmp_path):
    """Memory runs out in the first pass, the second, or the second step: the step begins again with half the rows a
    pass, the log says so, and the run is the one with the same effective batch."""
    plain = worlds.train([(file, ("train.micro_batch=1", f"out={tmp_path / 'plain'}"), None)])[0]["reports"]
    starve(monkeypatch, 1, lambda calls: calls >= when)
    with caplog.at_level("WARNING", "deepspec"):
        starved = worlds.train([(file, ("train.micro_batch=4", f"out={tmp_path / 'out'}"), None)])[0]["reports"]
    said = [r.getMessage() for r in caplog.records if r.name == "deepspec.train.step"]
    assert len(said) == 2 and "with 4 sequences a pass; 2 from now on, the effective batch stays 4" in said[0]
    for ours, theirs in zip(starved, plain, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_out_of_memory_with_one_row_is_one_clear_line(file, monkeypatch, tmp_path):
    """Nothing is left to halve: the message says what to lower; other errors are not mistaken for it."""
    starve(monkeypatch, 0, lambda calls: calls > 2)
    with pytest.raises(RunError, match=r"step 2: out of memory with one sequence a pass; lower .*step-0000001"):
        list(fit(load_config(file, "train.save_every=1", f"out={tmp_path / 'out'}")))
    assert newest(tmp_path / "out") == 1
    monkeypatch.undo()
    monkeypatch.setattr(Objective, "forward", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="shapes differ"):
        list(fit(load_config(file, f"out={tmp_path / 'other'}")))


def starving(job, rank: int) -> list | str:
    with pytest.MonkeyPatch.context() as patch:
        if int(os.environ["RANK"]) == rank:
            starve(patch, 1)
        return worlds.train([job])[0]["reports"]


def failing(job) -> str:
    try:
        return str(starving(job, 1))
    except RunError as error:
        return str(error)
    except RuntimeError:
        return "left alone"


def test_one_process_out_of_memory(file, tmp_path):
    """One process of two takes fewer sequences a pass, the other goes on as it was, and the run is the same."""
    common = ("train.batch_size=8", "train.max_steps=3")
    plain = worlds.train([(file, (*common, f"out={tmp_path / 'plain'}"), None)])[0]["reports"]
    job = (str(file), (*common, "train.micro_batch=2", f"out={tmp_path / 'two'}"), None)
    for reports in worlds.together(2, starving, job, 1):
        assert [r["loss"] for r in reports] == pytest.approx([r["loss"] for r in plain], rel=1e-4)


def test_out_of_memory_where_others_wait(file, tmp_path):
    """In the pass that exchanges gradients a process cannot begin again: it says which settings go on, nobody hangs."""
    job = (str(file), ("train.batch_size=4", "train.micro_batch=2", f"out={tmp_path / 'out'}"), None)
    first, second = worlds.together(2, failing, job)
    assert (
        first == "left alone" and "in process 1 with 2 sequences a pass" in second and "train.micro_batch=1" in second
    )


# -- one line on the command line --------------------------------------------------------------------------------------


def test_a_run_that_cannot_go_on_exits_with_1(monkeypatch, capsys, file, tmp_path):
    """Its one line goes to stderr, without a traceback."""
    from deepspec import cli
    from deepspec.train import __main__ as train

    poison(monkeypatch, 3, 0)
    monkeypatch.setattr("sys.argv", ["train", "--config", str(file), "--set", f"out={tmp_path / 'out'}"])
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(SystemExit) as done:
        cli.main(train.command)
    for s, handler in zip((signal.SIGINT, signal.SIGTERM), before):
        signal.signal(s, handler)
    assert done.value.code == 1
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(error) == 1 and "not finite" in error[0] and "there is no checkpoint yet" in error[0]


def test_fields_of_provenance_do_not_touch_the_drafter(file, straight, tmp_path):
    """What a caller notes beside a drafter cannot overwrite what describes it."""
    target = deepspec.Target.load(str(file.parent / "target"))
    drafter = deepspec.load_drafter(straight[0], target)
    for taken in ("drafter", "format"):
        with pytest.raises(InputError, match=taken):
            drafter.save(tmp_path / "saved", **{taken: "mine"})
        assert not (tmp_path / "saved").exists()
    drafter.save(tmp_path / "saved", note="mine")
    assert deepspec.load_drafter(tmp_path / "saved", target).config == drafter.config
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["deepspec"]["note"] == "mine"
