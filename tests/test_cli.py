"""Laws of every command line: a mistake is one line that says what is right, exit code 2, and nothing is written."""

import importlib
import json
import runpy
import subprocess
from pathlib import Path

import pytest

from deepspec import cli

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "config/dspark/tiny.py"
COMMANDS = {
    "tiny": "main",
    "train": "command",
    "data": "command",
    "eval": "run",
    "eval.load": "run",
    "eval.calibrate": "run",
    "eval.profile": "run",
    "eval.studies": "run",
}


def stopped(command, capsys) -> str:
    """The one line that a command says when it stops with 2."""
    with pytest.raises(SystemExit) as stop:
        cli.main(command)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1 and not out, err
    return err


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_option_is_one_line(name, capsys, monkeypatch):
    module = "deepspec." + name if "." in name else f"deepspec.{name}.__main__"
    monkeypatch.setattr("sys.argv", ["x", "--no-such-option"])
    said = stopped(getattr(importlib.import_module(module), COMMANDS[name]), capsys)
    assert f"(see python -m deepspec.{name}" in said and "--help)" in said


@pytest.mark.parametrize(
    "text, kind, value",
    [
        ("1", cli.whole(1), 1),
        ("0", cli.whole(1), "a whole number >= 1 is needed, got '0'"),
        ("1.0", cli.whole(1), "a whole number >= 1"),
        ("9223372036854775808", cli.whole(0), "a whole number >= 0"),
        ("1e3", cli.number(0), 1000.0),
        ("0", cli.number(0), 0.0),
        ("0", cli.number(0, above=True), "a number > 0 is needed, got '0'"),
        ("-1", cli.number(0), "a number >= 0"),
        ("nan", cli.number(0), "a number >= 0"),
        ("inf", cli.number(0), "a number >= 0"),
        ("x", cli.number(2), "a number >= 2 is needed, got 'x'"),
    ],
)
def test_numbers(text, kind, value, capsys):
    """A number in its range, or what would be right."""
    parser = cli.Parser(prog="p")
    parser.add("--n", type=kind, help="h")
    if isinstance(value, str):
        assert f"argument --n: {value}" in stopped(lambda: parser.parse_args([f"--n={text}"]), capsys)
    else:
        found = parser.parse_args([f"--n={text}"]).n
        assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "--config is required"),
        (["--config", "nope.py"], "no config file 'nope.py'"),
        (["--config", "{run}", "--tokens", "5"], "--tokens and --target-config are for --plan"),
        (["--config", "{run}", "--plan", "--tokens", "nan"], "--tokens: a number >= 1"),
        (["--config", "{run}", "--plan", "--target-config", "nope"], "no target config 'nope'"),
        (["--report", "nope"], "no metrics.jsonl in 'nope'"),
    ],
)
def test_training(words, message, tmp_path, capsys, monkeypatch):
    from deepspec.train.__main__ import command

    words = [w.format(run=RECIPE) for w in words]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["x", *words])
    assert message in stopped(command, capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"--sequences": ["0"]}, "--sequences: a whole number >= 1"),
        ({"--temperature": ["-1"]}, "--temperature: a number >= 0"),
        ({"--dtype": ["int3"]}, "invalid choice: 'int3'"),
        ({"--sequences": ["9"]}, "holds 3 rows; 1 held out and 9 to train on"),
        ({"--set": ["train.lr=-1"]}, "train.lr must be > 0"),
        ({"--vary": ["a:train.lr=1e-3", "b:target=other"]}, "recipes of one target"),
        ({"--vary": ["a:train.lr=1e-3", "a:train.lr=1e-4"]}, "two runs would have one name"),
        ({"--answers": ["nope.jsonl"]}, "no data file 'nope.jsonl'"),
        ({"row": {"id": "x"}}, "line 3: no answer (id, prompt_ids, answer_ids)"),
    ],
)
def test_comparing_drafters(changes, message, tmp_path, capsys, monkeypatch):
    """Whatever is wrong is found before the first drafter is trained."""
    row = {"id": "c", "prompt_ids": [1], "answer_ids": [2]}
    rows = [{**row, "id": "a"}, {**row, "id": "b"}, changes.get("row", row)]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    given = {
        "--config": [str(RECIPE)],
        "--answers": [str(tmp_path / "answers.jsonl")],
        "--out": [str(tmp_path / "out")],
        "--prompts": ["1"],
        "--sequences": ["2"],
    } | {k: v for k, v in changes.items() if k != "row"}
    monkeypatch.setattr("sys.argv", ["x", *(w for option, values in given.items() for w in (option, *values))])
    monkeypatch.setattr(subprocess, "run", None)
    assert message in stopped(runpy.run_path(str(ROOT / "scripts/compare_drafters.py"))["main"], capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "files, environment, message",
    [
        (["a.jsonl", "magpie"], {}, "no file of prompts 'a.jsonl'"),
        (["magpie"], {}, "three files of prompts are needed (math, code, chat), got 1"),
        ([], {"STEPS": "many"}, "STEPS must be a whole number >= 1, got 'many'"),
        ([], {"PER_KIND": "0"}, "PER_KIND must be a whole number >= 1"),
        ([], {"HEADS": "vanilla lstm"}, "HEADS are vanilla, gated, rnn or some of them, got 'lstm'"),
        ([], {"ANSWERS": "nope.jsonl"}, "ANSWERS: no file 'nope.jsonl'"),
    ],
)
def test_reproducing(files, environment, message, tmp_path, monkeypatch):
    """Before anything is installed, fetched or written."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    command = ["bash", str(ROOT / "scripts/reproduce_smollm2.sh"), *files]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1) and message in done.stderr
