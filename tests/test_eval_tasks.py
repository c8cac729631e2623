"""Tasks: the benchmarks' prompts word for word, files, and conversations that hold the model's own answers."""

import json

import pytest

from deepspec.checked import InputError
from deepspec.data.prompts import load_prompts
from deepspec.eval.benchmarks import BENCHMARKS, domain
from deepspec.eval.tasks import Conversation, find_tasks

TESTS = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
EXPERT = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program\n\n### Question:\nAdd {a}.\n\n### Format: "
)
ANSWER = "\n```\n\n### Answer: (use the provided format with backticks)"
CASES = [
    ("gsm8k", 500, {"question": "How many {x}?", "answer": "5"}, ["How many {x}?" + BOXED]),
    ("math500", 500, {"problem": "Find $x$."}, ["Find $x$." + BOXED]),
    ("aime25", 30, {"problem": "Find $y$.", "answer": "70"}, ["Find $y$." + BOXED]),
    ("mbpp", 256, {"prompt": "Write a function.", "code": "x"}, ["Write a function."]),
    ("humaneval", 164, {"prompt": "def f():\n"}, [TESTS + "def f():\n\n```"]),
    (
        "livecodebench", 500, {"question_content": "Add {a}.", "starter_code": ""},
        [EXPERT + "Write your code in the following format:\n```python\n# YOUR CODE HERE" + ANSWER],
    ),
    (
        "livecodebench", 500, {"question_content": "Add {a}.", "starter_code": "class S:\n    "},
        [EXPERT + "Use the following code structure:\n```python\nclass S:\n    " + ANSWER],
    ),
    ("mt-bench", 80, {"prompt": ["Write.", "Rewrite."]}, ["Write.", "Rewrite."]),
    ("alpaca", 500, {"instruction": "Sum up.", "input": "A text."}, ["Sum up.\n\nA text."]),
    ("alpaca", 500, {"instruction": "Name three.", "input": ""}, ["Name three."]),
    ("arena-hard-v2", 500, {"prompt": "Hard one.", "uid": "u"}, ["Hard one."]),
]  # fmt: skip


@pytest.mark.parametrize("name, samples, record, turns", CASES)
def test_a_benchmark_becomes_a_file_of_the_papers_size_and_wording(name, samples, record, turns, tmp_path, monkeypatch):
    import datasets

    asked = []

    def load_dataset(*source, split, streaming, **files):
        asked.append((source, split, files))
        return iter([record] * 600)

    monkeypatch.setenv("DEEPSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for _ in range(2):  # the second time from the cache
        (task,) = find_tasks([name])
        records = [json.loads(line) for line in task.path.read_text().splitlines()]
        assert task.name == name and len(records) == samples == BENCHMARKS[name].samples
        assert records[0] == {"id": f"{name}-0", "turns": turns}
    assert len(asked) == 1
    source, split, files = asked[0]
    assert (source == ("json",)) == bool(files) and split in ("test", "train")
    if files:
        assert set(files["data_files"]) == {split}


def test_there_are_nine_benchmarks_in_three_domains():
    assert {domain(name) for name in BENCHMARKS} == {"math", "code", "chat"} and len(BENCHMARKS) == 9
    assert domain("my_file") == "my_file"


def test_offline_the_way_out_is_said(tmp_path, monkeypatch):
    import datasets

    def offline(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setenv("DEEPSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(InputError, match=r"math500.*no route.*pass a JSONL"):
        find_tasks(["math500"])
    assert not list(tmp_path.iterdir())


class Tokenizer:
    """A character a token; renders messages as role:content; refuses an answer that holds '!'."""

    chat_template = "a template"

    def apply_chat_template(self, messages, tools, tokenize, add_generation_prompt, **switch):
        if any("!" in m["content"] for m in messages if m["role"] == "assistant"):
            raise ValueError("refused")
        head = "".join(f"{k}={v};" for k, v in switch.items())
        return head + "".join(f"{m['role'][0]}:{m['content']}|" for m in messages) + "a:"

    def __call__(self, text, **_):
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        assert skip_special_tokens and not clean_up_tokenization_spaces
        return "".join(map(chr, ids))


STOP = ord("#")


def talk(tmp_path, turns, how="all", thinking="auto", **more):
    file = tmp_path / "task.jsonl"
    file.write_text(json.dumps({"turns": turns, **more}) + "\n")
    (prompt,) = load_prompts(file, Tokenizer(), thinking)
    return Conversation(prompt, Tokenizer(), thinking, how)


def said(conversation):
    return None if conversation.prompt_ids is None else "".join(map(chr, conversation.prompt_ids))


def answer(conversation, text, room=1000):
    conversation.answer([ord(c) for c in text], [STOP], room)


def test_the_next_prompt_holds_the_models_own_answer_without_its_stop_id(tmp_path):
    c = talk(tmp_path, ["one", "two", "three"], thinking="off")
    assert said(c) == "enable_thinking=False;u:one|a:"
    answer(c, "A#")
    assert said(c) == "enable_thinking=False;u:one|a:A|u:two|a:"
    answer(c, "B")  # ended by its budget: nothing to take off
    assert said(c) == "enable_thinking=False;u:one|a:A|u:two|a:B|u:three|a:"
    answer(c, "C#")
    assert said(c) is None


@pytest.mark.parametrize(
    "how, text, room", [("first", "A#", 1000), ("all", "A!", 1000), ("all", "A#", len("u:one|a:A|u:two|a:") - 1)]
)
def test_a_conversation_ends_early(how, text, room, tmp_path):
    """Where only first turns are asked, where the template refuses the answer, where the next prompt is too long."""
    c = talk(tmp_path, ["one", "two"], how)
    assert said(c) == "u:one|a:"
    answer(c, text, room)
    assert said(c) is None


def test_a_prompt_that_just_fits_is_asked(tmp_path):
    c = talk(tmp_path, ["one", "two"])
    answer(c, "A#", len("u:one|a:A|u:two|a:"))
    assert said(c) == "u:one|a:A|u:two|a:"
