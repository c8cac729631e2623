"""Laws of prompts that the target writes: each once, whole, the same after any interruption, never an answer's."""

import dataclasses
import json
import sys
import types

import pytest

from deepspec.checked import InputError
from deepspec.data.__main__ import command
from deepspec.data.magpie import opening, write_prompts
from deepspec.modeling.target import Target
from tests.test_data_answers import Target as Stub

CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


class Letters:
    """A tokenizer of single characters with two special tokens."""

    special = ("<|im_start|>", "<|im_end|>")

    def __init__(self, chat_template=CHAT):
        self.chat_template = chat_template

    def apply_chat_template(self, messages, tokenize):
        assert not tokenize
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return text if self.chat_template == CHAT else self.chat_template.replace("TEXT", messages[0]["content"])

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        for i, token in enumerate(self.special):
            text = text.replace(token, chr(i))
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, ids, skip_special_tokens=False):
        return "".join("" if skip_special_tokens and i < 2 else (self.special[i] if i < 2 else chr(i)) for i in ids)


@pytest.fixture
def target(monkeypatch):
    """Writes one of five texts, by seed: one without an end, one of spaces, three to keep."""

    def stream(target, drafter, prompts, *, max_new_tokens, sampling, stop_ids, seeds, concurrency):
        for i in reversed(range(len(prompts))):
            text = ("no end", "  ", "one?", "two?", " three? ")[seeds[i] % 5]
            ids = [ord(c) for c in text][:max_new_tokens]
            end = text != "no end"
            yield i, types.SimpleNamespace(tokens=[*ids, 1] if end else ids, finish="stop" if end else "length")
            served.append(i)
            if len(served) == made.die_after:
                raise KeyboardInterrupt

    served = []
    module = types.ModuleType("deepspec.eval.generate")
    module.stream = stream
    monkeypatch.setitem(sys.modules, "deepspec.eval.generate", module)
    vocab = types.SimpleNamespace(size=1000)
    made = dataclasses.replace(Stub(), stop_ids=(1,), tokenizer=Letters(), vocab=vocab)
    made.die_after, made.served = None, served
    return made


def texts(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows) and {row["task"] for row in rows} <= {"magpie"}
    return [row["turns"] for row in rows]


def test_the_target_writes_on_where_a_user_would_begin():
    assert Letters().decode(opening(Letters(), (1,))) == "<|im_start|>user\n"


@pytest.mark.parametrize(
    ("tokenizer", "stop_ids", "said"),
    [
        (None, (1,), "no tokenizer"),
        (Letters(None), (1,), "no chat template"),
        (Letters(), (7,), "ends a user's turn with '<|im_end|>', which is no stop token"),
        (Letters("<|im_start|>user\nalways the same<|im_end|>"), (1,), "between tokens of its own"),
        (Letters("TEXT<|im_end|>"), (1,), "between tokens of its own"),
        (Letters("<|im_start|>TEXT"), (1,), "between tokens of its own"),
    ],
)
def test_a_template_that_cannot_serve_is_refused(tokenizer, stop_ids, said):
    with pytest.raises(InputError, match=said.replace("|", r"\|")):
        opening(tokenizer, stop_ids)


def test_whole_texts_once_each_and_what_was_left_out_counted(tmp_path, target):
    out = tmp_path / "p.jsonl"
    dropped = write_prompts(target, 60, out, max_new_tokens=10)
    assert sorted(texts(out)) == [["one?"], ["three?"], ["two?"]]
    assert dropped.total() == 57 and set(dropped) == {"no end", "empty", "repeated"}


def test_a_killed_run_goes_on_and_a_larger_one_adds(tmp_path, target):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    write_prompts(target, 9, whole, max_new_tokens=10)
    target.served.clear()
    target.die_after = 4
    with pytest.raises(KeyboardInterrupt):
        write_prompts(target, 9, out, max_new_tokens=10)
    assert not out.exists()
    target.die_after = None
    target.served.clear()
    write_prompts(target, 9, out, max_new_tokens=10)
    assert out.read_text() == whole.read_text()
    assert len(target.served) == 5  # what was finished is not done again
    target.served.clear()
    write_prompts(target, 12, out, max_new_tokens=10)
    assert len(target.served) == 3 and texts(out)[: len(texts(whole))] == texts(whole)


def test_a_file_of_another_is_not_overwritten(tmp_path, target):
    out = tmp_path / "mine.jsonl"
    out.write_text("precious\n")
    with pytest.raises(InputError, match=r"was not made by this command"):
        write_prompts(target, 3, out)
    assert out.read_text() == "precious\n" and list(tmp_path.iterdir()) == [out]


def test_the_command_says_how_many_and_refuses_greedy(tmp_path, target, monkeypatch, capsys):
    monkeypatch.setattr(Target, "load", lambda *args, **kwargs: target)
    out = tmp_path / "p.jsonl"
    command(["magpie", "--target", "x", "--number", "60", "--out", str(out), "--max-new-tokens", "10"])
    assert f"{out}: 3 prompts" in capsys.readouterr().out
    with pytest.raises(InputError, match="--temperature must be > 0"):
        command(["magpie", "--target", "x", "--temperature", "0", "--out", str(out)])
