"""Laws of gathering prompts: each once, in an order of its own, apart from what is held out and what is measured on."""

import itertools
import json
import random
import types
from collections import Counter

import pytest
from test_data_prompts import assistant, user, write

from deepspec.checked import InputError
from deepspec.data.collect import Choice, collect_prompts, held_out_path
from deepspec.data.manifest import manifest_path, read_manifest
from deepspec.data.overlap import Overlap
from deepspec.data.prompts import held_out, load_prompts
from deepspec.data.sources import as_conversation, count_records, read_source


def questions(n, start=0):
    return [{"turns": [f"question {i}"]} for i in range(start, start + n)]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def collect(out, *sources, exclude=(), skip_malformed=False, **choice):
    made = Choice(sources=tuple(map(str, sources)), **{"hold_out": 0.3, **choice})
    return collect_prompts(made, out, exclude=Overlap(exclude), skip_malformed=skip_malformed)


def texts(path):
    return [record["messages"][0]["content"] for record in read(path)]


@pytest.mark.parametrize("hold_out", [0.0, 0.2, 1 / 3, 1.0])
@pytest.mark.parametrize("n", [1, 50, 1001])
def test_every_prompt_is_in_one_of_the_two_files(tmp_path, n, hold_out):
    source = write(tmp_path / "s.jsonl", *questions(n), *questions(n // 2))
    out = tmp_path / "p.jsonl"
    manifest = collect(out, source, hold_out=hold_out)
    train, held = texts(out), texts(held_out_path(out))
    assert sorted(train + held) == sorted(f"question {i}" for i in range(n))
    assert (manifest["prompts"], manifest["held_out"]) == (len(train), len(held))
    assert manifest["dropped"] == ({"duplicate": n // 2} if n > 1 else {}) and manifest == read_manifest(out)
    assert all(held_out(r["id"], hold_out) for r in read(held_out_path(out)))
    assert not any(held_out(r["id"], hold_out) for r in read(out))


def test_the_order_is_the_seeds_and_a_limit_takes_its_beginning(tmp_path):
    """Two orders of 100 agree with chance 1 / 100!; no file is favoured: 20 of 100 from the second half alone, or the
    first, have chance 1e-6."""
    first, second = (write(tmp_path / f"{i}.jsonl", *questions(50, 50 * i)) for i in range(2))
    collect(tmp_path / "all.jsonl", first, second, hold_out=0.0)
    order = texts(tmp_path / "all.jsonl")
    assert order != sorted(order, key=lambda t: int(t.split()[1]))
    collect(tmp_path / "turned.jsonl", second, first, hold_out=0.0)
    assert [r["messages"] for r in read(tmp_path / "turned.jsonl")] == [
        r["messages"] for r in read(tmp_path / "all.jsonl")
    ]
    collect(tmp_path / "other.jsonl", first, second, hold_out=0.0, seed=1)
    assert texts(tmp_path / "other.jsonl") != order and sorted(texts(tmp_path / "other.jsonl")) == sorted(order)
    manifest = collect(tmp_path / "few.jsonl", first, second, limit=20)
    few = {*texts(tmp_path / "few.jsonl"), *texts(held_out_path(tmp_path / "few.jsonl"))}
    assert few == set(order[:20]) and len({int(t.split()[1]) // 50 for t in few}) == 2
    assert manifest["dropped"] == {"beyond the limit": 80} and manifest["prompts"] + manifest["held_out"] == 20


def test_what_is_held_out_stays_held_out(tmp_path):
    """Under another seed, limit, order and company, and a larger fraction holds out more."""
    source = write(tmp_path / "s.jsonl", *questions(200))
    more = write(tmp_path / "t.jsonl", *questions(300, 100))
    collect(tmp_path / "a.jsonl", source)
    held = set(texts(held_out_path(tmp_path / "a.jsonl")))
    collect(tmp_path / "b.jsonl", more, source, seed=5, hold_out=0.4)
    assert held < set(texts(held_out_path(tmp_path / "b.jsonl")))
    collect(tmp_path / "c.jsonl", source, seed=9, limit=100)
    assert not held & set(texts(tmp_path / "c.jsonl"))


QUESTION = "A farmer has 17 sheep and buys 5 more each week for 3 weeks. How many sheep does the farmer have now?"
FRAME = "\nPlease think about it step by step, then put the final answer into a box at the very end."


def test_prompts_of_benchmarks_are_left_out(tmp_path):
    benchmark = [QUESTION + FRAME, "Name a prime." + FRAME, "Name a square." + FRAME, "What is 2+2?"]
    kept = ["Name a cube." + FRAME, "A farmer has 18 sheep and sells one.", "What is 2+3?", "What is 2+2? And why?"]
    gone = [
        QUESTION,
        "I was asked this:  " + QUESTION.upper().replace(" ", "\n"),
        "what is 2 + 2",
        " ".join(QUESTION.split()[2:18]) + " And then?",
    ]
    later = {"messages": [user("hello there"), assistant("hi"), user(QUESTION), assistant("32")]}
    source = write(tmp_path / "s.jsonl", *({"turns": [t]} for t in kept + gone), later)
    out = tmp_path / "p.jsonl"
    manifest = collect(out, source, exclude=benchmark, hold_out=0.0)
    assert manifest["dropped"] == {"a benchmark's prompt": 5} and sorted(texts(out)) == sorted(kept)


LAYOUTS = [
    {"messages": [user("a"), assistant("b"), user("c"), assistant("d")]},
    {"conversations": [{"from": f, "value": v} for f, v in zip(("human", "gpt") * 2, "abcd")]},
    {"data": ["a", "b", "c", "d"]},
    {"conversation": [{"human": "a", "assistant": "b"}, {"human": "c", "assistant": "d"}]},
    {"prompt": [user("a"), assistant("b"), user("c")], "chosen": "x"},
    {"messages": [user("a"), assistant("b"), user("c"), assistant("d")], "prompt": "a", "prompt_id": "7"},
]


@pytest.mark.parametrize("record", LAYOUTS)
def test_layouts_of_one_conversation_are_one_prompt(tmp_path, record):
    source = write(tmp_path / "s.jsonl", *LAYOUTS[:1], record)
    collect(tmp_path / "p.jsonl", source, hold_out=0.0)
    (found,) = read(tmp_path / "p.jsonl")
    assert found["messages"] == LAYOUTS[4]["prompt"] and found["task"] == "s"


@pytest.mark.parametrize("key", ["prompt", "question", "instruction", "problem", "query"])
def test_one_question_layouts(key):
    assert as_conversation({key: "a", "output": "x", "input": None})["messages"] == [user("a")]
    system = as_conversation({key: "a", "system": "s", "tools": []})
    assert system == {"messages": [{"role": "system", "content": "s"}, user("a")], "tools": []}
    with_input = as_conversation({key: "a", "input": "b"})["messages"][0]["content"]
    assert with_input == ("a\n\nb" if key == "instruction" else "a")


def test_prompts_load_as_they_were_written(tmp_path):
    """What `prompts` writes, `answers` reads under the same ids."""
    tools = [{"name": "add"}]
    source = write(
        tmp_path / "s.jsonl",
        {"prompt_ids": [1, 2]},
        {"messages": [user("a")], "tools": json.dumps(tools)},
        *questions(3),
    )
    collect(tmp_path / "p.jsonl", source, hold_out=0.0)
    records = read(tmp_path / "p.jsonl")
    assert [r["tools"] for r in records if "tools" in r] == [tools]
    from test_data_prompts import Spelling

    assert [p.id for p in load_prompts(tmp_path / "p.jsonl", Spelling())] == [r["id"] for r in records]


def test_every_dropped_record_has_a_reason(tmp_path):
    lines = [
        b'{"turns": ["good"]}',
        b'{"turns": ["good"]}',
        b"{",
        b'{"turns": ["\xff"]}',
        b"3",
        b"",
        b'{"text": "x"}',
        b'{"messages": "x"}',
        *(
            json.dumps(r).encode()
            for r in (
                {"messages": [assistant("a"), user("b"), assistant("c")]},
                {"messages": [user("a"), user("b")]},
                {"messages": [user("a"), assistant(" "), user("b")]},
                {"messages": [assistant("a")]},
                {"messages": [{"role": "oracle", "content": "a"}]},
                {"turns": []},
                {"turns": ["bad tools"], "tools": "{"},
            )
        ),
    ]
    source = tmp_path / "s.jsonl"
    source.write_bytes(b"\n".join(lines) + b"\n")
    manifest = collect(tmp_path / "p.jsonl", source, hold_out=0.0, skip_malformed=True)
    assert texts(tmp_path / "p.jsonl") == ["good"] and sum(manifest["dropped"].values()) == len(lines) - 1
    assert len(manifest["dropped"]) == len(lines) - 1  # every one for another reason
    with pytest.raises(InputError, match=r"s\.jsonl, line 3: not valid JSON"):
        collect(tmp_path / "q.jsonl", source)
    assert not (tmp_path / "q.jsonl").exists() and not list(tmp_path.glob(".*"))


def test_nothing_usable_is_an_error_that_counts(tmp_path):
    source = write(tmp_path / "s.jsonl", {"turns": []}, {"turns": []})
    with pytest.raises(InputError, match=r"no prompt in .*s\.jsonl; dropped: 2 empty conversation"):
        collect(tmp_path / "new" / "p.jsonl", source)
    assert not (tmp_path / "new").exists()


def test_a_foreign_file_is_not_overwritten(tmp_path):
    source, out = write(tmp_path / "s.jsonl", *questions(3)), tmp_path / "p.jsonl"
    for foreign in (out, held_out_path(out)):
        foreign.write_text("mine")
        with pytest.raises(InputError, match="was not made by this command"):
            collect(out, source)
        assert foreign.read_text() == "mine"
        foreign.unlink()
    collect(out, source)
    before = out.read_bytes()
    collect(out, source)
    assert out.read_bytes() == before and manifest_path(out).is_file()


def test_parquet_is_read_like_jsonl(tmp_path):
    """Columns with lists of objects come back with nulls for keys that an object lacks; they are no keys."""
    import pyarrow.parquet

    records = [
        {"messages": [user("a"), {**assistant(""), "tool_calls": [{"function": {"name": "f"}}]}, user("b")]},
        {"messages": [user("c")]},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "s.parquet", row_group_size=1)
    write(tmp_path / "s.jsonl", *records)
    found = [record for _, record in read_source(str(tmp_path / "s.parquet"), "train")]
    assert found == records and count_records(str(tmp_path / "s.parquet"), "train") == 2
    assert count_records(str(tmp_path / "s.jsonl"), "train") == 2
    (tmp_path / "bad.parquet").write_text("x")
    with pytest.raises(InputError, match=r"bad\.parquet is no Parquet file"):
        list(read_source(str(tmp_path / "bad.parquet"), "train"))


def test_data_sets_of_the_hub(tmp_path, monkeypatch):
    asked = []

    def load_dataset(name, config, *, split, revision):
        asked.append((name, config, split, revision))
        if name == "no/such":
            raise FileNotFoundError("Dataset 'no/such' doesn't exist\nmore")
        return [{"conversations": [{"from": "human", "value": f"{name} {i}", "weight": None}]} for i in range(2)]

    monkeypatch.setitem(__import__("sys").modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    out = tmp_path / "p.jsonl"
    collect(out, "some/set", "other/set:part@v1.0", split="train_sft", hold_out=0.0)
    assert set(asked) == {("some/set", None, "train_sft", None), ("other/set", "part", "train_sft", "v1.0")}
    assert sorted(texts(out)) == ["other/set 0", "other/set 1", "some/set 0", "some/set 1"]
    assert Counter(r["task"] for r in read(out)) == {"set": 4}
    monkeypatch.setattr("deepspec.eval.tasks.cache_dir", lambda *parts: tmp_path / parts[-1])
    write(tmp_path / "gsm8k.jsonl", *questions(3))
    collect(tmp_path / "q.jsonl", "gsm8k", hold_out=0.0)
    assert len(read(tmp_path / "q.jsonl")) == 3 and {r["task"] for r in read(tmp_path / "q.jsonl")} == {"gsm8k"}
    with pytest.raises(InputError, match=r"'no/such', split 'train', cannot be read: Dataset 'no/such' doesn't exist$"):
        collect(out, "no/such")
    for name in ("missing.jsonl", "a/missing.parquet", "x", "a/b/c"):
        with pytest.raises(InputError, match="no data file"):
            collect(out, name)


@pytest.mark.parametrize("settings", [{"limit": 0}, {"hold_out": 1.5}])
def test_settings_are_checked(settings):
    with pytest.raises(InputError, match="must be"):
        Choice(sources=("x",), **settings)


def test_overlap_knows_runs_and_short_texts():
    """A law in both directions: any 13 words in a row are found, no 12 are."""
    words = [f"w{i}" for i in range(40)]
    overlap = Overlap([" ".join(words), "tiny one", ""])
    for start, length in itertools.product(range(0, 26, 5), (12, 13, 14)):
        inside = ["x", "y", *words[start : start + length], "z"]
        assert (" ".join(inside) in overlap) == (length >= 13)
    shuffled = random.Random(0).sample(words, 40)
    assert " ".join(shuffled) not in overlap and "Tiny  ONE!" in overlap and "tiny one more" not in overlap
    assert "" not in overlap and "" not in Overlap([])
