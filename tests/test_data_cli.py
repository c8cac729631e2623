"""Laws of `python -m deepspec.data`: one clear line and exit code 2 for bad input, nothing left behind."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from test_data_prompts import Spelling

from deepspec.cli import main
from deepspec.data.__main__ import command
from deepspec.data.prompts import held_out


class Tokenizer(Spelling):
    eos_token_id = ord(";")

    def decode(self, ids, **_):
        return "".join(map(chr, ids))


@pytest.fixture
def loaded(monkeypatch):
    """Stands in for target and engine; lists the models that were loaded."""
    names = []

    def load(name, **options):
        names.append((name, options))
        numbers = {"vocab": types.SimpleNamespace(size=300), "spec": types.SimpleNamespace(max_positions=1000)}
        return types.SimpleNamespace(
            name=name, revision=None, dtype=torch.float32, stop_ids=(59,), tokenizer=Tokenizer(), **numbers
        )

    def stream(target, drafter, prompts, *, max_new_tokens, **_):
        yield from ((i, types.SimpleNamespace(tokens=[59], finish="stop")) for i in range(len(prompts)))

    names_ = ("deepspec.modeling.target", "deepspec.modeling.loading", "deepspec.eval.generate")
    target, loading, engine = map(types.ModuleType, names_)
    target.Target = types.SimpleNamespace(load=load)
    loading.load_tokenizer = lambda name, revision=None: None if name == "bare" else Tokenizer()
    loading.load_config = lambda name, revision=None: None
    loading.load_stop_ids = lambda name, config, tokenizer, revision=None: (tokenizer.eos_token_id,)
    engine.stream = stream
    for module in (target, loading, engine):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return names


def run(capsys, *argv):
    """Exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as exit:
        main(lambda: command([str(a) for a in argv]))
    out, err = capsys.readouterr()
    return exit.value.code, out, err


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"question {i}"], "id": f"q{i}"}) + "\n" for i in range(40)))
    return path


def ids(path):
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


def test_answers_and_the_two_parts(loaded, prompts, tmp_path, capsys):
    parts = {}
    for part in ("train", "held-out"):
        out = tmp_path / f"{part}.jsonl"
        options = ("--only", part, "--hold-out", 0.3, "--seed", 3)
        code, printed, err = run(capsys, "answers", "--target", "T", "--prompts", prompts, "--out", out, *options)
        assert (code, err) == (0, "") and f"{out}: {len(ids(out))} answers" in printed
        parts[part] = set(ids(out))
    assert parts["train"] | parts["held-out"] == {f"q{i}" for i in range(40)}
    assert parts["held-out"] == {f"q{i}" for i in range(40) if held_out(f"q{i}", 0.3)} and parts["held-out"]
    assert not parts["train"] & parts["held-out"]


def test_a_limit_then_all(loaded, prompts, tmp_path, capsys):
    argv = ("answers", "--target", "T", "--prompts", prompts, prompts, "--out", tmp_path / "a.jsonl")
    assert run(capsys, *argv, "--limit", 7)[0] == 0
    assert len(ids(tmp_path / "a.jsonl")) == 7
    code, printed, _ = run(capsys, *argv)
    assert code == 0 and len(set(ids(tmp_path / "a.jsonl"))) == len(ids(tmp_path / "a.jsonl")) == 40
    assert "dropped 40: duplicate" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--temperature", "-1"), "temperature must be >= 0"),
        (("--top-p", "0"), "top_p must be in"),
        (("--limit", "0"), "--limit: a whole number >= 1"),
        (("--max-new-tokens", "0"), "--max-new-tokens: a whole number >= 1"),
        (("--concurrency", "0"), "--concurrency: a whole number >= 1"),
        (("--temperature", "inf"), "temperature must be >= 0 and finite"),
        (("--hold-out", "0.5"), "--hold-out needs --only"),
        (("--only", "train", "--hold-out", "2"), "must be in [0, 1]"),
        (("--only", "train", "--hold-out", "1"), "leaves no prompt"),
        (("--prompts", "missing.jsonl"), "no data file 'missing.jsonl'"),
    ],
)
def test_bad_options_exit_with_2(loaded, prompts, tmp_path, capsys, options, message):
    out = tmp_path / "new" / "a.jsonl"
    code, printed, err = run(capsys, "answers", "--target", "T", "--prompts", prompts, "--out", out, *options)
    assert (code, printed) == (2, "") and message in err and err.startswith("error: ") and err.count("\n") == 1
    assert not loaded
    assert not out.parent.exists()


def test_a_bad_line_exits_with_2_before_a_model_loads(loaded, prompts, tmp_path, capsys):
    with prompts.open("a") as file:
        file.write("\n")
    out = tmp_path / "a.jsonl"
    code, _, err = run(capsys, "answers", "--target", "T", "--prompts", prompts, "--out", out)
    assert (code, loaded) == (2, []) and err == f"error: {prompts}, line 41: empty line; it must be a JSON object\n"
    code, _, err = run(capsys, "show", prompts, "--target", "T", "-n", 99)
    assert code == 2 and "line 41" in err


@pytest.mark.parametrize("place", ["a-file/a.jsonl", "a-file/deeper/a.jsonl", "."])
def test_an_unwritable_output_is_found_before_a_model_loads(loaded, prompts, tmp_path, capsys, place):
    (tmp_path / "a-file").touch()
    before = sorted(tmp_path.rglob("*"))
    code, _, err = run(capsys, "answers", "--target", "T", "--prompts", prompts, "--out", tmp_path / place)
    assert (code, loaded) == (2, []) and "cannot be written" in err
    assert sorted(tmp_path.rglob("*")) == before


def test_show_marks_what_is_supervised(loaded, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    messages = [{"role": role, "content": content} for role, content in zip(("user", "assistant") * 2, "qarb")]
    records = [{"turns": ["no answer"]}, {"id": "x", "messages": messages}, {"prompt_ids": [65], "answer_ids": [66]}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    code, printed, _ = run(capsys, "show", path, "--tokenizer", "T", "-n", 2)
    assert code == 0
    assert printed.splitlines() == [
        f"--- {path}, line 1: skipped: no assistant turn",
        f"--- {path}, line 2, row x#0: 10 tokens, 2 supervised",
        "{}u:q;a:[[a;]]",
        f"--- {path}, line 2, row x#1: 18 tokens, 2 supervised",
        "{}u:q;a:a;u:r;a:[[b;]]",
        "dropped 1: no assistant turn",
    ]
    colored = run(capsys, "show", path, "--tokenizer", "T", "-n", 1, "--color", "always")[1]
    assert "\x1b[2m{}u:q;a:\x1b[0m\x1b[33m[[\x1b[0m\x1b[1;32ma;\x1b[0m\x1b[33m]]" in colored
    assert "A[[B]]" in run(capsys, "show", path, "--target", "T", "-n", 9)[1]
    assert run(capsys, "show", path, "--target", "bare")[0] == 2


def test_prompts_then_what_can_be_read_over(loaded, tmp_path, capsys):
    """A file with a broken line: an error that names it, or all but that line."""
    source = tmp_path / "s.jsonl"
    source.write_text('{"turns": ["a"]}\n{\n{"turns": ["b"]}\n{"turns": []}\n')
    out = tmp_path / "p.jsonl"
    argv = ("prompts", source, "--out", out, "--exclude", "none", "--hold-out", 0)
    code, _, err = run(capsys, *argv)
    assert code == 2 and "s.jsonl, line 2: not valid JSON" in err and not out.exists()
    code, printed, _ = run(capsys, *argv, "--malformed", "skip")
    assert (code, len(ids(out))) == (0, 2)
    assert printed.splitlines() == [
        f"{out}: 2 prompts; {tmp_path / 'p.held-out.jsonl'}: 0 held out",
        "dropped 1: not valid JSON",
        "dropped 1: empty conversation",
    ]
    excluded = tmp_path / "bench.jsonl"
    excluded.write_text('{"turns": ["B!", "c"]}\n{"messages": [{"role": "user", "content": "d"}]}\n')
    code, printed, _ = run(capsys, *argv[:4], "--exclude", excluded, "--hold-out", 0, "--malformed", "skip")
    assert (code, len(ids(out))) == (0, 1) and "dropped 1: a benchmark's prompt" in printed
    code, _, err = run(capsys, *argv[:4], "--exclude", "missing.jsonl")
    assert code == 2 and "missing.jsonl" in err
    answers = ("answers", "--target", "T", "--prompts", source, "--out", tmp_path / "a.jsonl", "--malformed", "skip")
    code, printed, _ = run(capsys, *answers)
    assert code == 0 and "dropped 1: not valid JSON" in printed and len(ids(tmp_path / "a.jsonl")) == 2
    code, printed, _ = run(capsys, "show", source, "--target", "T", "--malformed", "skip")
    assert code == 2 and "dropped 1: not valid JSON" in printed


def test_help_loads_nothing_heavy():
    root = Path(__file__).parents[1]
    code = (
        "import sys, deepspec; before = set(sys.modules)\n"
        "from deepspec.data.__main__ import command\n"
        "try: command(['answers', '--help'])\n"
        "finally: assert not {'torch', 'transformers'} & {m.split('.')[0] for m in set(sys.modules) - before}"
    )
    env = {**os.environ, "PYTHONPATH": str(root), "COLUMNS": "200"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=root)
    assert done.returncode == 0 and "--hold-out FRACTION" in done.stdout, done.stderr
