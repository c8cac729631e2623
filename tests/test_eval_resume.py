"""Interrupted anywhere and resumed, or shared by several processes, an evaluation has the results of one quiet run."""

import json
import os
import subprocess
import sys

import pytest
import torch

from deepspec import DFlashConfig, DSparkConfig, Target
from deepspec.checked import InputError
from deepspec.eval import __main__ as command
from deepspec.eval import evaluator
from deepspec.eval.records import Records
from deepspec.eval.share import Share

TIMES = ("seconds", "_per_second", "speedup", "decomposition", "efficiency")


pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A target of random weights, a drafter, and two tasks; a drafter that is seldom right makes ragged rounds."""
    from helpers import hf_model

    folder = tmp_path_factory.mktemp("resume")
    hf_model(eos_token_id=7).save_pretrained(folder / "target")
    target = Target.load(str(folder / "target"), device="cpu")
    common = {"block_size": 3, "target_layer_ids": (0, 1), "num_draft_layers": 1, "mask_token_id": 39}
    torch.manual_seed(0)
    for name, config in (("flash", DFlashConfig(**common)), ("spark", DSparkConfig(**common, markov_rank=4))):
        drafter = config.build(target.spec, target.vocab)
        drafter.save(folder / name, target={"name": str(folder / "target"), "revision": None})
    for name, n in (("one", 9), ("two", 3)):
        rows = [{"id": f"{name}{i}", "prompt_ids": [(5 * i + k) % 39 for k in range(2 + i % 4)]} for i in range(n)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def arguments(place, out, *more):
    tasks = f"{place}/one.jsonl,{place}/two.jsonl"
    return [
        *("--drafter", f"{place}/flash", f"{place}/spark", "--tasks", tasks, "--out", str(out), "--device", "cpu"),
        *("--max-new-tokens", "5", "--temperature", "1", "--warmup", "0", *more),
    ]


def results(out):
    """Everything but times and what names the run itself."""
    rows = json.loads((out / "results.json").read_text())
    for row in rows:
        del row["settings"]["command"], row["settings"]["processes"], row["settings"]["versions"]
    kept = [{k: v for k, v in row.items() if not any(t in k for t in TIMES)} for row in rows]
    return kept, (out / "generations.jsonl").read_text()


@pytest.fixture(scope="module", params=["1", "2"])
def quiet(request, place):
    """(options, results) of a run that nothing disturbed; one prompt a unit, and eight."""
    out = place / f"quiet{request.param}"
    more = ("--concurrency", request.param)
    command.run(arguments(place, out, *more))
    return more, results(out)


class Stop(BaseException):
    """Like Ctrl-C."""


@pytest.fixture
def decoded(monkeypatch):
    """Counts what is decoded, and stops before prompt number `after`."""
    state = {"count": 0, "after": None}
    decode = evaluator.decode

    def counting(models, contender, prompts, config, sampling, clock, tick, **more):
        def ticking():
            if state["count"] == state["after"]:
                raise Stop
            state["count"] += 1
            tick()

        return decode(models, contender, prompts, config, sampling, clock, ticking, **more)

    monkeypatch.setattr(evaluator, "decode", counting)
    return state


ALL = 3 * 12 * 2  # contenders, prompts, the check and the run


QUICK = [("2", 5), ("2", 30), ("1", 50)]
"""Stopped in the check's first unit, in a later one, in the run; each with the other size of units is slow."""


@pytest.mark.parametrize(
    "quiet, after",
    [
        pytest.param(size, n, marks=[] if (size, n) in QUICK else pytest.mark.slow)
        for size in ("1", "2")
        for n in (5, 30, 50)
    ],
    indirect=["quiet"],
)
def test_interrupted_and_resumed_equals_uninterrupted(after, quiet, place, decoded, tmp_path, capsys):
    more, expected = quiet
    decoded["after"] = after
    with pytest.raises(Stop):
        command.run(arguments(place, tmp_path / "out", *more))
    decoded.update(after=None, count=0)
    if after < 16:  # nothing was finished: eight prompts of each contender make the first record
        assert not (tmp_path / "out").exists()
    command.run(arguments(place, tmp_path / "out", *more, "--resume"))
    assert results(tmp_path / "out") == expected
    assert ALL - after <= decoded["count"] <= ALL - after + 3 * 12, "what was finished is skipped"
    capsys.readouterr()
    decoded["count"] = 0
    command.run(arguments(place, tmp_path / "out", *more, "--resume"))
    assert decoded["count"] == 0 and results(tmp_path / "out") == expected
    assert "spark" in capsys.readouterr().out, "the tables are printed again"


def test_a_unit_of_one_prompt_is_the_most_that_is_lost(place, decoded, tmp_path):
    decoded["after"] = 55
    with pytest.raises(Stop):
        command.run(arguments(place, tmp_path / "out"))
    decoded.update(after=None, count=0)
    command.run(arguments(place, tmp_path / "out", "--resume"))
    assert decoded["count"] == ALL - 55


def test_an_unfinished_run_is_neither_lost_nor_mixed_with_another(place, decoded, tmp_path):
    out = tmp_path / "out"
    decoded["after"] = 45
    with pytest.raises(Stop):
        command.run(arguments(place, out))
    decoded["after"] = None
    before = sorted((p, p.read_bytes()) for p in out.rglob("*") if p.is_file())
    with pytest.raises(InputError, match="unfinished run; --resume goes on with it"):
        command.run(arguments(place, out))
    for change, named in (
        (("--seed", "5"), "seed is 0 there and 5 now"),
        (("--dtype", "float32"), 'dtype is "auto" there'),
        (("--limit", "3"), "limit is null there and 3 now"),
    ):
        with pytest.raises(InputError, match=named):
            command.run(arguments(place, out, *change, "--resume"))
    assert sorted((p, p.read_bytes()) for p in out.rglob("*") if p.is_file()) == before
    command.run(arguments(place, out, "--resume"))
    command.run(arguments(place, out, "--seed", "5"))  # a finished run may be replaced
    assert {r["settings"]["seed"] for r in json.loads((out / "results.json").read_text())} == {5}


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "progress").mkdir()
    (tmp_path / "progress" / "notes.jsonl").write_text("mine")
    for resume in (False, True):
        with pytest.raises(InputError, match="no folder of ours"):
            Records(tmp_path / "progress").begin({}, resume)
    assert (tmp_path / "progress" / "notes.jsonl").read_text() == "mine"


def test_a_new_run_keeps_nothing_of_a_finished_one(tmp_path):
    """Not even a profile: it was made for another concurrency, maybe."""
    records = Records(tmp_path / "r")
    records.begin({"a": 1}, False)
    records.add(("x",), {})
    (tmp_path / "r" / "profile-d-float32.json").write_text("{}")
    records.finish()
    records.begin({"a": 1}, True)
    assert (tmp_path / "r" / "profile-d-float32.json").exists()
    records.finish()
    records.begin({"a": 2}, True)
    assert sorted(p.name for p in (tmp_path / "r").iterdir()) == ["settings.json"]


def test_a_line_torn_by_a_kill_is_dropped(tmp_path):
    records = Records(tmp_path / "r")
    records.begin({"a": 1}, False)
    records.add(("run", 0.0, 1), {"x": 1})
    with (tmp_path / "r" / "0.jsonl").open("a") as file:
        file.write('{"key": ["run", 0.0, 2], "x"')
    again = Records(tmp_path / "r")
    again.begin({"a": 1}, True)
    again.add(("run", 0.0, 3), {"x": 3})
    again.refresh()
    keys = [("run", 0.0, n) for n in (1, 2, 3)]
    assert again.missing(keys) == [keys[1]] and again[keys[2]] == {"x": 3}


def test_a_process_sees_what_others_did_since(tmp_path):
    first, second = Records(tmp_path / "r", 0), Records(tmp_path / "r", 1)
    first.begin({}, False)
    first.add(("a",), {})
    second.add(("b",), {})
    with (tmp_path / "r" / "1.jsonl").open("a") as file:
        file.write('{"key": ["c"]')
        file.flush()
        first.refresh()
        assert first.missing([("a",), ("b",), ("c",)]) == [("c",)]
        file.write("}\n")
    first.refresh()
    assert not first.missing([("a",), ("b",), ("c",)])


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_shares_are_disjoint_and_complete(world):
    items = list(range(5))
    shares = [list(Share(rank, world).mine(items)) for rank in range(world)]
    assert sorted(x for share in shares for x in share) == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_where_a_process_runs(monkeypatch):
    """Its GPU is its place on its machine, where the choice is left to us and there are several processes."""
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    share = Share.from_environment()
    assert share == Share(rank=5, world=8, local_rank=1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [share.device(d) for d in ("auto", "cuda", "cpu", "cuda:3")] == ["cuda:1", "cuda:1", "cpu", "cuda:3"]
    assert Share().device("auto") == "auto"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert share.device("auto") == "auto"
    for name in ("RANK", "WORLD_SIZE"):  # one alone says nothing
        with monkeypatch.context() as patch:
            patch.delenv(name)
            assert Share.from_environment() == Share()


def test_two_shares_of_the_work_give_the_results_of_one(place, quiet, tmp_path, monkeypatch, capsys):
    """One after the other here; whoever comes last writes and prints."""
    more, expected = quiet
    order = (0, 1) if more[-1] == "1" else (1, 0)
    out = tmp_path / "out"
    monkeypatch.setattr(Share, "first", lambda self, action: action() if self.rank == order[0] else None)
    for rank in order:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        command.run(arguments(place, out, *more))
        assert (out / "results.json").exists() == (rank == order[1])
    assert results(out) == expected
    assert capsys.readouterr().out.count("one: 9 prompts") == 1
    done = [len((out / "progress" / f"{rank}.jsonl").read_text().splitlines()) for rank in order]
    assert min(done) > 0.2 * sum(done)


@pytest.mark.slow
def test_two_processes_share_the_work_and_give_the_results_of_one(place, quiet, tmp_path):
    """Two processes that torch.distributed introduces to each other, as torchrun does."""
    more, expected = quiet
    if more[-1] == "1":
        pytest.skip("one size of units is enough")
    out, port = tmp_path / "out", str(29500 + os.getpid() % 10000)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "deepspec.eval", *arguments(place, out, *more)],
            env={
                **os.environ,
                **{"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [p.communicate(timeout=300) for p in processes]
    assert [p.returncode for p in processes] == [0, 0], said
    assert results(out) == expected
    printed = "".join(stdout for stdout, _ in said)
    assert printed.count("one: 9 prompts") == printed.count("two: 3 prompts") == printed.count("written: ") == 1
    done = [len((out / "progress" / f"{rank}.jsonl").read_text().splitlines()) for rank in range(2)]
    assert min(done) > 0
    assert json.loads((out / "results.json").read_text())[0]["settings"]["processes"] == 2


@pytest.mark.slow
def test_a_mistake_found_by_the_first_process_ends_them_all(place, tmp_path):
    """Otherwise the others would wait for it forever."""
    out, port = tmp_path / "out", str(29500 + (os.getpid() + 5000) % 10000)
    (out / "progress").mkdir(parents=True)
    (out / "progress" / "settings.json").write_text("{}")
    (out / "progress" / "0.jsonl").write_text('{"key": ["x"]}\n')
    code = (
        "from deepspec.eval.share import Share; from deepspec.eval.records import Records; from pathlib import Path\n"
        f"records = Records(Path({str(out / 'progress')!r}))\n"
        "Share.from_environment().first(lambda: records.begin({}, False))"
    )
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env={**env, "RANK": str(r)}, stderr=subprocess.PIPE, text=True)
        for r in range(2)
    ]
    for p in processes:
        assert "holds an unfinished run" in p.communicate(timeout=120)[1] and p.returncode == 1
