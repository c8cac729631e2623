"""Laws of loading rows, of their order and of padding."""

import json

import pytest
import torch

from deepspec.checked import InputError
from deepspec.config import DataConfig
from deepspec.data.chat import Row
from deepspec.data.loader import Loader, collate, load_rows


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
    return [Row(str(i), [i], [True]) for i in range(n)]


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
    assert all(row is loader.rows[i] for batch in batches for i, row in batch)


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


def test_collate_pads_right_and_unsupervised():
    batch = [(5, Row("a", [1, 2, 3], [False, True, True])), (2, Row("b", [4], [True]))]
    tokens, loss_mask, lengths, sample = collate(batch, pad_id=9)
    assert torch.equal(tokens, torch.tensor([[1, 2, 3], [4, 9, 9]]))
    assert torch.equal(loss_mask, torch.tensor([[False, True, True], [True, False, False]]))
    assert lengths == [3, 1] and torch.equal(sample, torch.tensor([5, 2]))
    assert (tokens.dtype, loss_mask.dtype, sample.dtype) == (torch.long, torch.bool, torch.long)
    wide = collate(batch, pad_id=9, multiple=8)[0]
    assert wide.shape == (2, 8) and torch.equal(wide[:, :3], tokens) and (wide[:, 3:] == 9).all()
