"""Laws of regenerating answers: an interrupted run ends like an uninterrupted one, and settings never mix."""

import dataclasses
import json
import shutil
import sys
import types
from collections import Counter

import pytest
import torch

from deepspec.checked import InputError
from deepspec.config import DataConfig
from deepspec.data.answers import regenerate
from deepspec.data.loader import load_rows
from deepspec.data.manifest import manifest_path, read_manifest
from deepspec.data.prompts import Prompt
from deepspec.sampling import Sampling


@dataclasses.dataclass
class Generation:
    tokens: list
    finish: str


@dataclasses.dataclass
class Target:
    name: str = "tiny"
    revision: str | None = None
    dtype: torch.dtype = torch.float32
    stop_ids: tuple = (2,)
    tokenizer: object = None
    vocab: object = dataclasses.field(default_factory=lambda: types.SimpleNamespace(size=100))
    spec: object = dataclasses.field(default_factory=lambda: types.SimpleNamespace(max_positions=50))


@dataclasses.dataclass
class Words:
    """Stands in for a tokenizer; every text is a refusal."""

    chat_template: str

    def decode(self, ids):
        return "I'm sorry, but I cannot"


class Engine:
    """A stand-in whose answer depends on prompt and seed, and which finishes requests out of order."""

    def __init__(self):
        self.served, self.die_after = [], None

    def stream(self, target, drafter, prompts, *, max_new_tokens, sampling, stop_ids, seeds, concurrency):
        assert drafter is None and len(prompts) == len(seeds) > 0 and all(0 <= s < 2**63 for s in seeds)
        for i in sorted(range(len(prompts)), key=lambda i: -i):
            self.served.append(prompts[i])
            if len(self.served) == self.die_after:
                raise KeyboardInterrupt
            length = seeds[i] % (max_new_tokens + 3) + 1
            tokens = [(seeds[i] >> k) % 90 + 5 for k in range(min(length, max_new_tokens))]
            yield i, Generation([*tokens[:-1], 2] if length <= max_new_tokens else tokens, "stop")


@pytest.fixture
def engine(monkeypatch):
    made = Engine()
    module = types.ModuleType("deepspec.eval.generate")
    module.stream = made.stream
    monkeypatch.setitem(sys.modules, "deepspec.eval.generate", module)
    return made


PROMPTS = [Prompt(f"p{i}", "t", [10 + i, 3], {}) for i in range(6)]


def run(out, prompts=PROMPTS, target=None, **settings):
    given = {"max_new_tokens": 4, "sampling": Sampling(temperature=0.7), "seed": 1, **settings}
    return regenerate(target or Target(), prompts, out, **given)


def answers(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def test_answers_are_token_rows_that_training_reads(tmp_path, engine):
    out = tmp_path / "new" / "folder" / "a.jsonl"
    manifest = run(out)
    rows = answers(out)
    assert set(rows) == {p.id for p in PROMPTS}
    assert set(rows["p3"]) == {"id", "task", "prompt_ids", "answer_ids", "finish"}
    assert rows["p3"]["prompt_ids"] == [13, 3] and rows["p3"]["task"] == "t"
    config = DataConfig(path=str(out), max_length=100, min_supervised=2)
    read, dropped = load_rows([out], None, (2,), config, 100)
    usable = {i: r["prompt_ids"] + r["answer_ids"] for i, r in rows.items() if len(r["answer_ids"]) > 1}
    assert {row.id: row.tokens for row in read} == usable and len(usable) + dropped.total() == len(rows)
    assert manifest == read_manifest(out)


def test_the_manifest_holds_what_decides_the_answers(tmp_path, engine):
    tokenizer = Words(chat_template="{{ x }}")
    target = Target(revision="abc", tokenizer=tokenizer, dtype=torch.bfloat16)
    manifest = run(tmp_path / "a.jsonl", target=target, thinking="off", dropped=Counter(bad=2))
    assert len(manifest["settings"].pop("chat_template_sha256")) == 64
    assert manifest["settings"] == {
        "target": "tiny",
        "target_revision": "abc",
        "dtype": "bfloat16",
        "sampling": {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        "seed": 1,
        "max_new_tokens": 4,
        "thinking": "off",
        "stop_ids": [2],
    }
    assert (
        manifest["answers"] == 6
        and manifest["finish"] == {"stop": 6}
        and manifest["refusals"] == 6
        and manifest["dropped"] == {"bad": 2}
    )
    assert {"python", "torch", "transformers"} <= manifest["versions"].keys() and "git_sha" in manifest["versions"]


def test_resume_after_a_kill_at_any_byte(tmp_path, engine):
    whole = tmp_path / "whole.jsonl"
    run(whole)
    data, final = whole.read_bytes(), answers(whole)
    last_two = len(data) - sum(map(len, data.splitlines(keepends=True)[-2:]))
    for size in range(last_two, len(data) + 1):
        out = tmp_path / "killed.jsonl"
        out.write_bytes(data[:size])
        shutil.copy(manifest_path(whole), manifest_path(out))
        engine.served.clear()
        manifest = run(out)
        assert answers(out) == final and manifest["answers"] == 6
        assert len(engine.served) == 6 - data[:size].count(b"\n")  # what was finished is not done again


def test_resume_under_another_limit_and_order(tmp_path, engine):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "a.jsonl"
    run(whole)
    run(out, PROMPTS[2:4])
    run(out, PROMPTS[:3])
    assert run(out, PROMPTS[::-1])["answers"] == 6
    assert answers(out) == answers(whole)
    engine.served.clear()
    run(out)
    assert not engine.served


def test_an_interrupted_run_keeps_what_is_finished(tmp_path, engine):
    out = tmp_path / "a.jsonl"
    engine.die_after = 4
    with pytest.raises(KeyboardInterrupt):
        run(out)
    assert len(answers(out)) == 3 and read_manifest(out)["answers"] == 3
    engine.die_after = None
    run(out)
    assert len(answers(out)) == 6


def test_a_run_that_fails_before_its_first_answer_leaves_nothing(tmp_path, engine):
    engine.die_after = 1
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "a.jsonl")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 2}, "seed is 1 there and 2 now"),
        ({"max_new_tokens": 5}, "max_new_tokens is 4 there and 5 now"),
        ({"thinking": "on"}, 'thinking is "auto" there and "on" now'),
        ({"sampling": Sampling()}, '"temperature": 0.7.* there and .*"temperature": 0.0.* now'),
        ({"target": Target(name="other")}, 'target is "tiny" there and "other" now'),
        ({"target": Target(dtype=torch.bfloat16)}, "dtype is"),
        ({"target": Target(tokenizer=Words(chat_template="y"))}, "chat_template_sha256 is null there"),
    ],
)
def test_other_settings_are_refused_with_the_difference(tmp_path, engine, changes, message):
    out = tmp_path / "a.jsonl"
    run(out, PROMPTS[:2])
    before = out.read_bytes(), manifest_path(out).read_bytes()
    with pytest.raises(InputError, match=message):
        run(out, **changes)
    assert (out.read_bytes(), manifest_path(out).read_bytes()) == before


def test_a_foreign_file_is_never_added_to_or_cut(tmp_path, engine):
    out = tmp_path / "a.jsonl"
    out.write_text('{"turns": ["mine"]}\nno newline at the end')
    with pytest.raises(InputError, match="has no manifest"):
        run(out)
    assert out.read_text().endswith("at the end")
    run(tmp_path / "b.jsonl")
    shutil.copy(manifest_path(tmp_path / "b.jsonl"), manifest_path(out))
    with pytest.raises(InputError, match=r"a\.jsonl, line 1: not an answer"):
        run(out)
    assert out.read_text().endswith("at the end")


def test_a_damaged_manifest_is_an_input_error(tmp_path, engine):
    out = tmp_path / "a.jsonl"
    run(out)
    for damage, message in (("{", "not valid JSON"), ("{}", "no settings")):
        manifest_path(out).write_text(damage)
        with pytest.raises(InputError, match=message):
            run(out)


def test_duplicate_ids_are_answered_once_and_counted(tmp_path, engine):
    manifest = run(tmp_path / "a.jsonl", [*PROMPTS, PROMPTS[0], Prompt("p1", "t", [99], {})])
    assert manifest["answers"] == 6
    assert manifest["dropped"] == {"duplicate": 1, "duplicate id, other tokens": 1}


def test_an_answer_depends_on_seed_and_id_only(tmp_path, engine):
    def made(*, seed=1, prompts=PROMPTS):
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        run(out, prompts, seed=seed)
        return {i: row["answer_ids"] for i, row in answers(out).items()}

    first = made()
    assert made(prompts=PROMPTS[3:])["p4"] == first["p4"]
    assert made(seed=2) != first and len(set(map(tuple, first.values()))) > 1


def test_prompts_that_do_not_fit_are_counted(tmp_path, engine):
    """50 positions: 46 of prompt and 4 new ones fit, 47 do not."""
    long = [Prompt(f"l{n}", "t", [5] * n, {}) for n in (46, 47, 40_000)]
    manifest = run(tmp_path / "a.jsonl", [*PROMPTS, *long])
    assert manifest["dropped"] == {"longer than the target's context": 2} and "l46" in answers(tmp_path / "a.jsonl")
    with pytest.raises(InputError, match="no prompt leaves room for 4 new tokens in 50 positions"):
        run(tmp_path / "b.jsonl", long[1:])
    assert not (tmp_path / "b.jsonl").exists()


@pytest.mark.parametrize("settings", [{"max_new_tokens": 0}, {"concurrency": 0}])
def test_settings_are_checked(tmp_path, engine, settings):
    with pytest.raises(InputError, match=next(iter(settings))):
        run(tmp_path / "a.jsonl", **settings)


def test_a_prompt_outside_the_vocabulary_is_refused(tmp_path, engine):
    with pytest.raises(InputError, match="prompt 'x': token id 100"):
        run(tmp_path / "a.jsonl", [Prompt("x", "t", [100], {})])
    assert not list(tmp_path.iterdir())
