"""Laws of reading JSONL files, of prompts, and of the hold-out."""

import itertools
import json
import os
from collections import Counter
from pathlib import Path

import jinja2
import pytest

from deepspec.checked import InputError
from deepspec.data.prompts import Prompt, held_out, load_prompts, read_records, take, unique

SHARED = Path(os.environ.get("DEEPSPEC_SHARED", Path(__file__).parents[2] / "shared"))


class Spelling:
    """Stands in for a tokenizer: a token is a character; its template refuses two user turns in a row."""

    chat_template = "x"

    def apply_chat_template(self, messages, *, tools, tokenize, add_generation_prompt, **switch):
        roles = [message["role"] for message in messages]
        if ("user", "user") in itertools.pairwise(roles):
            raise jinja2.TemplateError("roles must alternate")
        turns = "".join(f"{m['role'][0]}:{m['content']};" for m in messages)
        return f"{switch}{turns}" + ("a:" if add_generation_prompt else "")

    def __call__(self, text, *, add_special_tokens, verbose):
        return {"input_ids": [ord(c) for c in text]}


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def texts(prompts):
    return ["".join(map(chr, p.prompt_ids)) for p in prompts]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_every_layout_gives_what_the_target_sees_before_it_answers(tmp_path):
    path = write(
        tmp_path / "mixed.jsonl",
        {"turns": ["q", "later"]},
        {"messages": [user("m")], "task": "math"},
        {"messages": [user("a"), assistant("b"), user("c"), assistant("d"), user("next")]},
        {"conversations": [{"from": "human", "value": "s"}, {"from": "gpt", "value": "t"}], "id": 3},
        {"prompt_ids": [104, 105], "answer_ids": [1], "id": "tokens"},
    )
    prompts = load_prompts(path, Spelling(), "off")
    off = "{'enable_thinking': False}"
    assert texts(prompts) == [off + "u:q;a:", off + "u:m;a:", off + "u:a;a:b;u:c;a:d;u:next;a:", off + "u:s;a:", "hi"]
    assert [p.task for p in prompts] == ["mixed", "math", "mixed", "mixed", "mixed"]
    assert [p.id for p in prompts[3:]] == ["3", "tokens"]
    assert prompts[0].record == {"turns": ["q", "later"]}
    assert [p.id for p in load_prompts(path, Spelling(), "on")] == [p.id for p in prompts]


def test_rows_in_are_prompts_out_plus_counted_drops(tmp_path):
    path = write(
        tmp_path / "p.jsonl",
        {"turns": ["q"]},
        {"turns": ["q"]},
        {"turns": ["r"], "id": "x"},
        {"turns": ["s"], "id": "x"},
        {"messages": [user("a"), user("b")]},
        {"messages": [assistant("a")]},
        {"messages": [{"role": "oracle", "content": "b"}]},
        {"turns": []},
    )
    dropped = Counter()
    prompts = load_prompts(path, lambda: Spelling(), dropped=dropped)
    assert texts(prompts) == ["{}u:q;a:", "{}u:r;a:"]
    assert dropped == {
        "duplicate": 1,
        "duplicate id, other tokens": 1,
        "template: roles must alternate": 1,
        "no user turn to answer": 1,
        "unknown role 'oracle'": 1,
        "empty conversation": 1,
    }
    assert len(prompts) + dropped.total() == 8


def test_the_tokenizer_is_asked_for_once_and_only_when_needed(tmp_path):
    asked = []
    source = lambda: asked.append(1) or Spelling()  # noqa: E731
    load_prompts(write(tmp_path / "t.jsonl", {"prompt_ids": [1]}), source)
    assert not asked
    load_prompts(write(tmp_path / "c.jsonl", {"turns": ["a"]}, {"turns": ["b"]}), source)
    assert len(asked) == 1


def test_a_file_without_usable_prompts_says_why(tmp_path):
    path = write(tmp_path / "p.jsonl", {"turns": []}, {"turns": []}, {"messages": [assistant("a")]})
    with pytest.raises(InputError, match=r"p\.jsonl: no usable prompt; dropped: 2 empty conversation, 1 no user turn"):
        load_prompts(path, Spelling())


BAD_LINES = [
    (b"\n", "empty line"),
    (b'{"turns": ["a"', "not valid JSON"),
    (b'["turns"]\n', "must be a JSON object, found list"),
    (b'{"turns": ["\xff"]}\n', "not UTF-8"),
    (b'{"question": "a"}\n', "none of the keys"),
    (b'{"turns": "a"}\n', "turns must be a list of strings"),
    (b'{"prompt_ids": ["a"]}\n', "prompt_ids must be a non-empty list of token ids"),
    (b'{"turns": ["a"], "task": 3}\n', "task must be a string"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"turns": ["fine"]}\n' + line)
    with pytest.raises(InputError, match=rf"bad\.jsonl, line 2: .*{message}"):
        load_prompts(path, Spelling())


def test_missing_and_empty_files_are_input_errors(tmp_path):
    with pytest.raises(InputError, match="no data file"):
        list(read_records(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(InputError, match="empty"):
        list(read_records(tmp_path / "empty.jsonl"))


def test_byte_order_mark_and_carriage_returns_are_read_over(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"turns": ["a"]}\r\n{"turns": ["b"]}\r\n')
    assert [record["turns"] for _, record in read_records(path)] == [["a"], ["b"]]


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.2, 1 / 3, 0.5, 1.0])
@pytest.mark.parametrize("n", [1, 10, 12501])
def test_hold_out_is_disjoint_complete_and_nested(fraction, n):
    """The hash is fixed: chance (6 standard deviations, 1e-8) was tried once for all."""
    ids = [f"row-{i}" for i in range(n)]
    held = {i for i in ids if held_out(i, fraction)}
    assert held == {i for i in reversed(ids) if held_out(i, fraction)} and len(held) in range(n + 1)
    assert held <= {i for i in ids if held_out(i, min(1.0, fraction + 0.1))}
    assert abs(len(held) - n * fraction) <= 6 * (n * fraction * (1 - fraction)) ** 0.5 + 1e-9
    if n > 1000 and 0 < fraction < 1:
        assert held != {i for i in ids if held_out(i, fraction, seed=1)}


@pytest.mark.parametrize("fraction", [-0.1, 1.1])
def test_a_fraction_outside_0_1_is_refused(fraction):
    with pytest.raises(InputError, match="must be in"):
        held_out("a", fraction)


def test_a_limit_takes_a_subset_that_does_not_depend_on_order():
    prompts = [Prompt(f"p{i}", "t", [i], {}) for i in range(100)]
    few, more = take(prompts, 10), take(prompts, 30)
    assert len(few) == 10 and set(map(id, few)) < set(map(id, more))
    assert {p.id for p in take(prompts[::-1], 10)} == {p.id for p in few}
    assert take(prompts, 1000) == prompts
    assert max(p.prompt_ids[0] for p in few) > 20  # not the first ones
    with pytest.raises(InputError, match="limit"):
        take(prompts, 0)


def test_unique_keeps_the_first():
    dropped = Counter()
    a, b = Prompt("x", "t", [1], {}), Prompt("x", "t", [2], {})
    assert unique([a, b, Prompt("x", "u", [1], {})], dropped) == [a]
    assert dropped == {"duplicate": 1, "duplicate id, other tokens": 1}


@pytest.mark.parametrize("name", ["gsm8k", "mt-bench"])
def test_benchmark_files_load_whole(name):
    path = SHARED / "eval_datasets" / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"no {path}")
    dropped = Counter()
    prompts = load_prompts(path, Spelling(), dropped=dropped)
    assert len(prompts) + dropped.total() == len(path.read_text().splitlines())
    assert {p.task for p in prompts} == {name} and not set(dropped) - {"duplicate"}
