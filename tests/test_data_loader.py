"""Laws of loading rows, of their order, of packing and of padding."""

import copy
import json
import time

import numpy as np
import pytest
import torch
from test_data_chat import load as chat_tokenizer
from test_data_prompts import assistant, user

from deepspec.checked import InputError
from deepspec.config import DataConfig
from deepspec.data.batches import Batches
from deepspec.data.chat import Row, training_rows
from deepspec.data.features import Features
from deepspec.data.loader import Loader, load_rows, sequences
from deepspec.data.packing import OPEN, pack
from deepspec.data.rows import Rows


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def token_row(prompt, answer, **extra):
    return {"prompt_ids": list(range(prompt)), "answer_ids": list(range(10, 10 + answer)), **extra}


def load(path, *, vocab_size=100, tokenizer=None, **settings):
    config = DataConfig(path=str(path), **{"min_supervised": 2, **settings})
    return load_rows(config.path, tokenizer, (), config, vocab_size)


def test_rows_in_are_rows_out_plus_counted_drops(tmp_path):
    path = write(
        tmp_path / "r.jsonl",
        token_row(3, 5, id="kept"),
        token_row(3, 1),
        token_row(3, 0),
        token_row(7, 5),
        {"prompt_ids": [1]},
        token_row(2, 9),
    )
    rows, dropped = load(path, max_length=8)
    assert dropped == {
        "fewer than 2 supervised tokens": 1,
        "fewer than 2 supervised tokens in the first 8": 1,
        "no answer": 2,
    }
    assert len(rows) + dropped.total() == 6
    assert rows[0] == Row("kept", [0, 1, 2, 10, 11, 12, 13, 14], [False] * 3 + [True] * 5)
    assert [(len(row.tokens), len(row.loss_mask), sum(row.loss_mask)) for row in rows] == [(8, 8, 5), (8, 8, 6)]


def test_several_files_follow_each_other(tmp_path):
    paths = [write(tmp_path / name, token_row(1, 2, id=name)) for name in ("b.jsonl", "a.jsonl")]
    config = DataConfig(path=tuple(map(str, paths)), min_supervised=2)
    assert [row.id for row in load_rows(config.path, None, (), config, 100)[0]] == ["b.jsonl", "a.jsonl"]


def test_nothing_left_supervised_is_an_error_that_counts(tmp_path):
    path = write(tmp_path / "r.jsonl", token_row(3, 1), token_row(3, 1, id=1), {"turns": ["q"], "prompt_ids": [1]})
    with pytest.raises(InputError, match=r"r\.jsonl; dropped: 2 fewer than 14 supervised tokens, 1 no answer"):
        load(path, min_supervised=14)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "empty line"),
        ("{", "not valid JSON"),
        ("3", "must be a JSON object"),
        ('{"text": "x"}', "none of the keys"),
        ('{"prompt_ids": [1], "answer_ids": [2, 100]}', "token id 100 is outside the target's vocabulary of 100"),
        ('{"prompt_ids": [1], "answer_ids": "2"}', "answer_ids must be"),
        ('{"messages": [{"role": "user", "content": "q"}]}', "use token rows"),
        ('{"turns": ["q"]}', "use token rows"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(token_row(2, 3)) + "\n" + line + "\n")
    with pytest.raises(InputError, match=rf"bad\.jsonl, line 2: .*{message}"):
        load(path, tokenizer=lambda: None)


def test_token_rows_never_ask_for_the_tokenizer(tmp_path):
    def refuse():
        raise AssertionError("asked")

    assert len(load(write(tmp_path / "r.jsonl", token_row(2, 3)), tokenizer=refuse)[0]) == 1


def rows(n):
    return [(i,) for i in range(n)]


@pytest.mark.parametrize(("n", "batch_size"), [(1, 1), (7, 3), (12, 4), (3, 8), (1, 5)])
@pytest.mark.parametrize("epochs", [1, 3])
def test_every_row_exactly_once_an_epoch(n, batch_size, epochs):
    loader = Loader(rows(n), batch_size, seed=1)
    batches = [loader.batch(step) for step in range(loader.steps(epochs))]
    assert all(len(batch) == batch_size for batch in batches)
    seen = [i for batch in batches for i, _ in batch]
    assert len(seen) - epochs * n in range(batch_size)
    for epoch in range(epochs):
        assert sorted(seen[epoch * n : (epoch + 1) * n]) == list(range(n))
    assert all(row == (i,) for batch in batches for i, row in batch)


def test_order_depends_on_seed_and_epoch_only():
    """Two permutations of 50 rows agree with chance 1 / 50!."""
    first, second = (Loader(rows(50), 10, seed=3) for _ in range(2))
    assert [first.batch(step) for step in range(10)] == [second.batch(step) for step in (*range(9, -1, -1),)][::-1]
    order = lambda loader, size: [i for s in range(100 // size) for i, _ in loader.batch(s)]  # noqa: E731
    assert order(first, 10) == order(Loader(rows(50), 4, seed=3), 4)
    assert order(first, 10)[:50] != order(first, 10)[50:]
    assert order(first, 10) != order(Loader(rows(50), 10, seed=4), 10)


def test_the_order_is_pinned():
    """Runs that were started with an older version resume in the same order."""
    assert [i for i, _ in Loader(rows(8), 16, seed=42).batch(0)] == PINNED


PINNED = [4, 1, 3, 6, 0, 7, 2, 5, 1, 2, 5, 3, 6, 0, 4, 7]


def flat(*lengths):
    return Rows.of(
        Row(f"r{i}", list(range(100 * i, 100 * i + n)), [k % 3 > 0 for k in range(n)]) for i, n in enumerate(lengths)
    )


def test_rows_are_what_was_put_in():
    """Flat arrays give back each row; `keep` leaves the others as they were, keys included."""
    made = flat(3, 1, 5, 2)
    assert made[2] == Row("r2", [200, 201, 202, 203, 204], [False, True, True, False, True])
    assert made[-1] == made[3] and [r.id for r in made[1:3]] == ["r1", "r2"] and len(made) == 4
    with pytest.raises(IndexError):
        made[4]
    some = made.keep(np.array([True, False, False, True]))
    assert list(some) == [made[0], made[3]] and (some.keys() == made.keys()[[0, 3]]).all()
    assert made.supervising(2).tolist() == [True, True, False, True, False]


def test_a_row_s_key_depends_on_its_tokens_and_its_mask():
    base, mask = [1, 2, 3], [False, True, True]
    others = [([1, 2, 4], mask), (base, [True, True, True]), ([1, 2], [False, True])]
    keys = Rows.of(Row("x", t, m) for t, m in [(base, mask), *others, (base, mask)]).keys()
    assert len({*keys.tolist()}) == 4 and keys[0] == keys[4]


@pytest.mark.parametrize("budget", [40, 64, 1000])
def test_packs_hold_every_row_once_within_the_budget(budget):
    """And little room is left over: with rows of 1 to 40 tokens and a budget of 64, under 10 %."""
    lengths = (np.random.default_rng(0).integers(1, 41, 500)).tolist()
    order = np.random.default_rng(1).permutation(500).tolist()
    packs = pack(lengths, order, budget)
    assert sorted(i for p in packs for i in p) == list(range(500))
    sizes = [sum(lengths[i] for i in p) for p in packs]
    assert max(sizes) <= budget
    if budget == 64:
        assert sum(sizes) > 0.9 * budget * len(packs)
    # a pack is closed when more than OPEN have room: its rows stay near each other in the order
    place = {row: n for n, row in enumerate(order)}
    assert all(sorted(p, key=place.get) == list(p) for p in packs)
    assert pack([budget, 1, budget + 5, 2], range(4), budget) == [(0,), (1, 3), (2,)]
    # of more than OPEN packs with room the fullest is closed: the emptiest still takes a row that fills it
    lengths = [501 + i for i in range(OPEN + 1)] + [499, 1000 - 501 - OPEN]
    packs = pack(lengths, range(OPEN + 3), 1000)
    assert packs[0] == (0, OPEN + 1) and packs[OPEN] == (OPEN,) and packs[OPEN - 1] == (OPEN - 1, OPEN + 2)


def test_packing_depends_on_the_seed_alone():
    """Sequences are made of rows by (rows, budget, seed), so every process has the same."""
    made = flat(*[5 + i % 9 for i in range(60)])
    assert sequences(made, 32, 5) == sequences(made, 32, 5) != sequences(made, 32, 6)
    assert sequences(made, None, 5) == [(i,) for i in range(60)]


def zeros(index, made, usable=None):
    n = int(made.lengths[list(index)].sum())
    usable = torch.ones(len(index), dtype=torch.bool) if usable is None else usable
    return Features(torch.arange(n)[:, None].float(), torch.ones(n, 1), ~usable[:, None])


def test_a_batch_pads_right_and_unsupervised():
    made = flat(3, 1)
    batch = Batches(made, lambda index: zeros(index, made), torch.device("cpu")).batch([(5, (0,)), (2, (1,))])
    assert torch.equal(batch.tokens, torch.tensor([[0, 1, 2], [100, 0, 0]]))
    assert torch.equal(batch.loss_mask, torch.tensor([[False, True, True], [False, False, False]]))
    assert torch.equal(batch.features[..., 0], torch.tensor([[0.0, 1, 2], [3, 0, 0]]))
    assert torch.equal(batch.sample, torch.tensor([5, 2])) and batch.document is None and batch.position is None
    assert (batch.tokens.dtype, batch.loss_mask.dtype, batch.sample.dtype) == (torch.long, torch.bool, torch.long)


def test_a_packed_batch_keeps_its_rows_apart():
    """Positions start anew in each row, and a row that is not usable supervises nothing."""
    made = flat(3, 2, 4, 1)
    source = lambda index: zeros(index, made, torch.tensor([True, False, True, True]))  # noqa: E731
    batch = Batches(made, source, torch.device("cpu")).batch([(0, (2, 1)), (1, (3, 0))])
    assert batch.tokens.tolist() == [[200, 201, 202, 203, 100, 101], [300, 0, 1, 2, 0, 0]]
    assert batch.document.tolist() == [[0, 0, 0, 0, 1, 1], [0, 1, 1, 1, -1, -1]]
    assert batch.position.tolist() == [[0, 1, 2, 3, 0, 1], [0, 0, 1, 2, 0, 0]]
    assert batch.loss_mask.int().tolist() == [[0, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0]]


@pytest.mark.parametrize("truncates", [False, True])
def test_threads_change_neither_order_nor_rows_and_a_long_row_stalls_nothing(tmp_path, truncates):
    """120 chats and one of 40,000 tokens: rows in the file's order, as one thread makes them, the long one cut, each
    refusal counted; also with a tokenizer whose file asks for truncation."""
    tokenizer, alone_with = (copy.deepcopy(chat_tokenizer("small-qwen3")) for _ in range(2))
    if truncates:
        for one in (tokenizer, alone_with):
            one.backend_tokenizer.enable_truncation(3)
    chats = [[("user", f"q{i} " * (i % 7 + 1)), ("assistant", f"a{i} " * (i % 5 + 2))] for i in range(120)]
    chats[40] = [("user", "q"), ("assistant", "word " * 8_000)]
    chats[90] = [("user", "q"), ("robot", "a")]
    records = [{"id": i, "messages": [{"role": r, "content": c} for r, c in chat]} for i, chat in enumerate(chats)]
    began = time.perf_counter()
    found, dropped = load(write(tmp_path / "r.jsonl", *records), tokenizer=tokenizer, vocab_size=10**6, max_length=500)
    assert time.perf_counter() - began < 20 and dropped == {"unknown role 'robot'": 1}
    ids = [i for i in range(120) if i != 90]
    assert [row.id for row in found] == [f"{i}#0" for i in ids]
    assert len(found[40].tokens) == 500
    for row, i in zip(found, ids):
        (alone,) = training_rows(records[i], alone_with, (), "auto")
        assert len(alone.tokens) > 3 and row == Row(alone.id, alone.tokens[:500], alone.loss_mask[:500])
    assert len(load(tmp_path / "r.jsonl", tokenizer=tokenizer, vocab_size=10**6, max_length=500)[0]) == 119


def test_an_error_in_one_row_stops_the_others(tmp_path):
    """The first malformed record is named, whatever was being made beside it."""
    records = [token_row(2, 3, id=i) for i in range(500)]
    records[100]["answer_ids"] = "no"
    records[300]["answer_ids"] = "no"
    with pytest.raises(InputError, match=r"r\.jsonl, line 101: answer_ids must be"):
        load(write(tmp_path / "r.jsonl", *records))


def test_every_so_manieth_record(tmp_path):
    path = write(tmp_path / "r.jsonl", *[token_row(2, 3 + i, id=i) for i in range(10)])
    config = DataConfig(path=str(path), min_supervised=2)
    assert [row.id for row in load_rows(config.path, None, (), config, 100, every=4)[0]] == ["0", "4", "8"]


ANSWER = "word " * 14

DIRTY = [
    b"{",
    b'{"messages": [{"role": "user", "content": "\xff"}]}',
    b"[1, 2]",
    b"",
    b'{"text": "no layout"}',
    b'{"messages": "no list"}',
    *(
        json.dumps(record).encode()
        for record in (
            {"messages": [assistant(ANSWER), user("q"), assistant(ANSWER)], "id": "assistant first"},
            {"messages": [user("q"), user("q"), assistant(ANSWER)], "id": "double user"},
            {"messages": [user("q"), assistant(" ")], "id": "empty turn"},
            {"messages": [{"role": "developer", "content": "q"}, assistant(ANSWER)], "id": "unknown role"},
            {"messages": [user("word " * 40_000), assistant(ANSWER)], "id": "40k tokens"},
            {"messages": [user("q"), assistant("short")], "id": "short"},
            {"messages": [user("q"), assistant(ANSWER)], "id": "tools", "tools": "{"},
            {"messages": [user("q"), assistant(ANSWER)], "id": "good"},
            {"messages": [user("another"), assistant(ANSWER)], "id": "good"},
        )
    ),
]
REASONS = {
    "not valid JSON": 1,
    "not UTF-8": 1,
    "must be a JSON object": 1,
    "empty line": 1,
    "none of the keys prompt_ids, messages, conversations, turns": 1,
    "messages must be a list of objects": 1,
    "tools is not valid JSON": 1,
    "empty assistant turn": 1,
    "unknown role 'developer'": 1,
    "fewer than 14 supervised tokens": 1,
    "fewer than 14 supervised tokens in the first 4096": 1,
    "duplicate": 1,
    "duplicate id, other tokens": 1,
}


@pytest.mark.parametrize(("name", "strict"), [("small-gemma3", True), ("gemma3", True), ("small-llama3_1", False)])
def test_a_dirty_file_gives_good_rows_and_a_count_for_every_reason(tmp_path, name, strict):
    """Bad lines are read over only where that is asked for. Tools as list, string, null and absent are all good; two
    user turns in a row are for the template to refuse."""
    tokenizer = chat_tokenizer(name)
    tools = [{"name": "add"}]
    good = [
        {"messages": [user("q"), assistant(ANSWER)], "id": f"t{i}", "tools": t} for i, t in enumerate(("", None, tools))
    ]
    good += [{"messages": [user("q"), assistant(ANSWER)], "id": "t3", "tools": json.dumps(tools)}]
    lines = DIRTY + [DIRTY[-2]] + [json.dumps(r).encode() for r in good]
    path = tmp_path / "dirty.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(InputError, match=r"dirty\.jsonl, line 1: not valid JSON"):
        load(path, tokenizer=tokenizer, min_supervised=14, vocab_size=1 << 20)
    rows, dropped = load(path, tokenizer=tokenizer, min_supervised=14, vocab_size=1 << 20, malformed="skip")
    kept = ["good#0", "t0#0", "t1#0", "t2#0", "t3#0"]
    assert [row.id for row in rows] == (kept if strict else ["double user#0", *kept])
    alternate = {reason: n for reason, n in dropped.items() if "alternate" in reason}
    assert sum(alternate.values()) == strict
    expected = {**REASONS, "assistant turn before any user turn": 1}
    assert {reason: n for reason, n in dropped.items() if reason not in alternate} == expected
    assert len(rows) + dropped.total() == len(lines)


def test_a_file_with_nothing_usable_says_why(tmp_path):
    (tmp_path / "dirty.jsonl").write_bytes(b"\n".join(DIRTY[:6]) + b"\n")
    with pytest.raises(InputError, match=r"no training row in .*; dropped: 1 not valid JSON, 1 not UTF-8, 1 must be"):
        load(tmp_path / "dirty.jsonl", tokenizer=chat_tokenizer("small-gemma3"), malformed="skip")
