"""Laws of chat -> tokens + loss mask, on stock tokenizers where they are at hand and on small ones everywhere."""

import functools
import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from deepspec.checked import InputError
from deepspec.config import DataConfig
from deepspec.data.chat import Row, render_prompt, together, training_rows
from deepspec.data.loader import load_rows
from deepspec.data.records import Skip, conversation

SHARED = Path(os.environ.get("DEEPSPEC_SHARED", Path(__file__).parents[2] / "shared"))
STOCK = ("qwen3", "gemma3", "llama3_1", "smollm2")
THINKING = ("on", "off", "auto")

# The shapes of the stock templates, small: Qwen3 (think pair, dropped history), Gemma (strict, trims), Llama (plain).
SPECIAL = ["<s>", "<e>", "<think>", "</think>"]
SMALL = {
    "small-qwen3": """{%- if tools %}{{ '<s>system\n' + (tools | tojson) + '<e>\n' }}{% endif -%}
{%- for m in messages -%}{%- set body = m.content -%}
{%- if m.role == 'assistant' -%}
  {%- set thought = m.reasoning_content if m.reasoning_content else '' -%}
  {%- if '</think>' in body -%}
    {%- set thought = body.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
    {%- set body = body.split('</think>')[-1].lstrip('\n') -%}{%- endif -%}
  {%- if loop.last -%}{%- set body = '<think>\n' + thought + '\n</think>\n\n' + body -%}{%- endif -%}
{%- endif -%}
{{ '<s>' + m.role + '\n' + body + '<e>\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<s>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{%- endif -%}""",
    "small-gemma3": """{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif -%}
{{ '<s>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<e>\n' }}{%- endfor -%}
{%- if add_generation_prompt %}{{ '<s>model\n' }}{% endif -%}""",
    "small-llama3_1": """{%- for m in messages %}{{ '<s>' + m.role + '\n\n' + m.content | trim + '<e>' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '<s>assistant\n\n' }}{% endif -%}""",
}


@functools.cache
def load(name):
    if name in STOCK:
        # SmolLM2's comes with its weights, by scripts/get_smollm2.py
        cached = Path.home() / ".cache" / "deepspec" / "smollm2-135m-instruct"
        folder = cached if name == "smollm2" else SHARED / "tokenizers" / name
        if not (folder / "tokenizer.json").is_file():
            pytest.skip(f"no stock tokenizer {name}")
        return AutoTokenizer.from_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    newlines = [("Ċ", "Ċ")]  # a merge that can straddle the border between prompt and answer
    vocab = {piece: i for i, piece in enumerate([*alphabet, "ĊĊ"])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=newlines))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<e>", additional_special_tokens=SPECIAL)
    tokenizer.chat_template = SMALL[name]
    return tokenizer


every = pytest.mark.parametrize("name", [*STOCK, *SMALL])
qwen3 = pytest.mark.parametrize("name", ["qwen3", "small-qwen3"])
gemma3 = pytest.mark.parametrize("name", ["gemma3", "small-gemma3"])


def text(tokenizer, ids):
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def parts(tokenizer, row):
    """(context, supervised) of a row as texts; the mask must be one suffix."""
    start = row.loss_mask.index(True)
    assert all(row.loss_mask[start:]) and len(row.tokens) == len(row.loss_mask)
    return text(tokenizer, row.tokens[:start]), text(tokenizer, row.tokens[start:])


def rows_of(tokenizer, messages, thinking="auto", **extra):
    return training_rows({"messages": messages, **extra}, tokenizer, {tokenizer.eos_token_id}, thinking)


def chat(*contents):
    """Messages that alternate user, assistant, ..."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


@every
@pytest.mark.parametrize("thinking", THINKING)
def test_supervised_is_exactly_what_the_assistant_wrote(name, thinking):
    tokenizer = load(name)
    messages = chat("Say\n hello", "Hello there,  you!", "again ünï", "Ünïcode 你好 {x}\n```py\n  pass\n```")
    rows = rows_of(tokenizer, messages, thinking)
    assert len(rows) == 2
    for row, turn in zip(rows, (1, 3)):
        context, supervised = parts(tokenizer, row)
        assert supervised == messages[turn]["content"] + tokenizer.eos_token
        assert messages[turn]["content"] not in context and messages[turn - 1]["content"] in context
        prompt = render_prompt(tokenizer, messages[:turn], thinking)
        assert row.tokens[: len(prompt)] == prompt


@every
@pytest.mark.parametrize("thinking", THINKING)
def test_prompt_is_what_the_tokenizer_itself_renders(name, thinking):
    tokenizer = load(name)
    switch = {} if thinking == "auto" else {"enable_thinking": thinking == "on"}
    for messages in (chat("hi"), chat("hi", "hello", " and\n\n")):
        own = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, **switch)[
            "input_ids"
        ]
        assert render_prompt(tokenizer, messages, thinking) == own


@every
def test_no_system_prompt_is_added_and_a_given_one_is_context(name):
    tokenizer = load(name)
    context = parts(tokenizer, rows_of(tokenizer, chat("hi", "hello"))[0])[0]
    own = tokenizer.apply_chat_template(chat("hi"), add_generation_prompt=True, tokenize=False)
    assert context.removesuffix("<think>\n\n</think>\n\n") == own  # what the template itself writes stays, unsupervised
    if name != "small-gemma3":
        system = {"role": "system", "content": "Be brief."}
        context, supervised = parts(tokenizer, rows_of(tokenizer, [system, *chat("hi", "hello")])[0])
        assert "Be brief." in context and supervised == "hello" + tokenizer.eos_token


@qwen3
def test_reasoning_is_supervised_and_a_supplied_think_pair_is_not(name):
    tokenizer = load(name)
    thought = "<think>\nhm, 2\n</think>\n\nTwo"
    for record in (chat("1+1?", thought), [*chat("1+1?"), {**chat("", "Two")[1], "reasoning_content": "hm, 2"}]):
        for thinking in ("on", "auto"):
            row = rows_of(tokenizer, record, thinking)[0]
            assert parts(tokenizer, row)[1] == thought + tokenizer.eos_token
        with pytest.raises(Skip, match="thinking is off"):
            rows_of(tokenizer, record, "off")
    plain = [rows_of(tokenizer, chat("1+1?", "Two"), thinking)[0] for thinking in THINKING]
    assert plain[0] == plain[1] == plain[2]  # such an answer is the target's own only with thinking off
    assert parts(tokenizer, plain[0])[0].endswith("<think>\n\n</think>\n\n")
    written = rows_of(tokenizer, chat("1+1?", "<think>\n\n</think>\n\nTwo"), "auto")[
        0
    ]  # the target wrote the pair itself
    assert parts(tokenizer, written)[1] == "<think>\n\n</think>\n\nTwo" + tokenizer.eos_token


@qwen3
def test_each_turn_has_the_context_that_inference_would_see(name):
    """Earlier thinking is dropped by the template, so one packed row would be wrong."""
    tokenizer = load(name)
    messages = chat("a?", "<think>\nfirst\n</think>\n\nA", "b?", "<think>\nsecond\n</think>\n\nB")
    rows = rows_of(tokenizer, messages)
    for row, turn in zip(rows, (1, 3)):
        seen = tokenizer.apply_chat_template(messages[:turn], add_generation_prompt=True, tokenize=False)
        context, supervised = parts(tokenizer, row)
        assert context == seen and supervised == messages[turn]["content"] + tokenizer.eos_token
    assert "first" not in text(tokenizer, rows[1].tokens)


def test_a_token_never_straddles_the_border():
    tokenizer = load("small-llama3_1")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<e>")
    tokenizer.chat_template = (
        SMALL["small-llama3_1"]
        .replace("<s>assistant\n\n", "<s>assistant\n")
        .replace("m.role + '\n\n' + m.content | trim", "m.role + '\n' + m.content")
    )
    assert len(tokenizer("\n\n")["input_ids"]) == 1
    row = rows_of(tokenizer, chat("x", "\nindented"))[0]  # "\n\n" is one token of the whole text
    assert parts(tokenizer, row) == ("<s>user\nx<e><s>assistant\n", "\nindented<e>")
    assert row.tokens[: row.loss_mask.index(True)] == render_prompt(tokenizer, chat("x"), "auto")


@every
def test_the_row_ends_with_the_first_stop_id(name):
    tokenizer = load(name)
    row = rows_of(tokenizer, chat("hi", f"one{tokenizer.eos_token}two"))[0]
    assert parts(tokenizer, row)[1] == "one" + tokenizer.eos_token


@gemma3
def test_a_strict_template_skips_the_record(name):
    tokenizer = load(name)
    user, assistant = chat("q", "a")
    for messages in ([assistant, user, assistant], [user, user, assistant], [user, assistant, assistant]):
        with pytest.raises(Skip):
            rows_of(tokenizer, messages)
    with pytest.raises(Skip, match="alternate"):
        render_prompt(tokenizer, [user, user], "auto")


@pytest.mark.parametrize("role", ["chatgpt", "developer", "function_call", "Assistant", ""])
@pytest.mark.parametrize("key", ["role", "from"])
def test_an_unknown_role_is_refused(role, key):
    messages = [{"role": "user", "content": "q"}, {key: role, ("value" if key == "from" else "content"): "a"}]
    with pytest.raises(Skip, match="unknown role"):
        rows_of(load("small-llama3_1"), messages)


def test_layouts_of_one_conversation_give_one_row():
    tokenizer = load("small-qwen3")
    messages = chat("q", "a", "r", "b")
    sharegpt = [{"from": ("human", "gpt")[i % 2], "value": m["content"]} for i, m in enumerate(messages)]
    rows = rows_of(tokenizer, messages)
    for record in ({"conversations": sharegpt}, {"conversations": messages}, {"messages": sharegpt}):
        assert training_rows(record, tokenizer, {tokenizer.eos_token_id}, "auto") == rows
    assert [row.id for row in rows_of(tokenizer, messages, id=7)] == ["7#0", "7#1"]
    assert len({row.id for row in rows + rows_of(tokenizer, chat("q", "other"))}) == 3
    assert conversation({"turns": ["q", "later"]}) == ([{"role": "user", "content": "q"}], None)


@qwen3
def test_tools_as_list_string_null_or_absent(name):
    tokenizer = load(name)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    with_tools = [rows_of(tokenizer, chat("q", "a"), tools=t)[0].tokens for t in (tools, json.dumps(tools))]
    without = [rows_of(tokenizer, chat("q", "a"), tools=t)[0].tokens for t in (None, "", "null", [], "[]")]
    assert with_tools[0] == with_tools[1] and '"add"' in text(tokenizer, with_tools[0])
    assert all(tokens == rows_of(tokenizer, chat("q", "a"))[0].tokens for tokens in without)
    for bad in (5, "{", '"x"', {"name": "add"}, ["add"]):
        with pytest.raises(InputError, match="tools"):
            rows_of(tokenizer, chat("q", "a"), tools=bad)


def test_tool_calls_and_results():
    tokenizer = load("qwen3")
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    messages = [*chat("1+1?"), call, {"role": "tool", "content": "2"}, {"role": "assistant", "content": "It is 2."}]
    called, answered = rows_of(tokenizer, messages, "off")
    assert parts(tokenizer, called)[1] == '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    context, supervised = parts(tokenizer, answered)
    assert "<tool_response>\n2\n" in context and supervised == "It is 2.<|im_end|>"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"messages": []}, "empty conversation"),
        ({"messages": chat("q")}, "no assistant turn"),
        ({"turns": ["q"]}, "no assistant turn"),
        ({"messages": chat("q", " ")}, "empty assistant turn"),
        ({"messages": chat("", "a")}, "empty user turn"),
        ({"messages": chat("q", "a")[::-1]}, "before any user turn"),
        ({"messages": chat("q", "\ud800")}, "not valid Unicode"),
        ({"messages": [*chat("q"), {"role": "assistant", "content": ["x"]}]}, "template"),
        ({"prompt_ids": [1]}, "no answer"),
        ({"prompt_ids": [1], "answer_ids": []}, "no answer"),
    ],
)
def test_what_is_skipped(record, reason):
    tokenizer = load("small-qwen3")
    with pytest.raises(Skip, match=reason):
        training_rows(record, tokenizer, {tokenizer.eos_token_id}, "auto")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "x"}, "none of the keys prompt_ids, messages, conversations, turns; it has: text"),
        ({"messages": "hello"}, "messages must be a list of objects, got 'hello'"),
        ({"messages": ["hello"]}, "messages must be a list of objects"),
        ({"messages": [{"content": "x"}]}, "a message needs role"),
        ({"messages": [{"role": "user", "content": 5}]}, "a message needs role"),
        ({"conversations": [{"from": "human", "value": 5}]}, "a message needs from"),
        ({"turns": [1]}, "turns must be a list of strings"),
        ({"prompt_ids": [1, 2.0], "answer_ids": [3]}, "prompt_ids must be a non-empty list of token ids"),
        ({"prompt_ids": [1, True], "answer_ids": [3]}, "prompt_ids must be"),
        ({"prompt_ids": [1], "answer_ids": [-3]}, "answer_ids must be"),
        ({"prompt_ids": [], "answer_ids": [3]}, "prompt_ids must be"),
        ({"messages": chat("q", "a"), "id": 1.5}, "id must be"),
    ],
)
def test_a_malformed_record_is_an_input_error(record, message):
    with pytest.raises(InputError, match=message):
        training_rows(record, load("small-qwen3"), (), "auto")


def test_token_rows_are_kept_as_generated():
    (row,) = training_rows({"id": "x", "prompt_ids": [5, 6], "answer_ids": [7, 2]}, None, {2}, "auto")
    assert (row.id, row.tokens, row.loss_mask) == ("x", [5, 6, 7, 2], [False, False, True, True])


def test_without_a_template_the_error_names_the_way_out():
    tokenizer = load("small-llama3_1")
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    for record in ({"messages": chat("q", "a")}, {"turns": ["q"]}):
        for none in (bare, None):
            with pytest.raises(InputError, match="use token rows"):
                training_rows(record, none, (), "auto")


CALL = {"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}


def called(call, **more):
    """A chat in which the assistant calls a tool."""
    return [*chat("1+1?"), {"role": "assistant", "content": None, "tool_calls": call, **more}]


def test_tool_calls_as_list_string_null_or_absent():
    """OpenAI's form and the bare one, arguments as an object and as JSON: one row. Null and absent are no call."""
    tokenizer = load("qwen3")
    text_of_it = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}\n</tool_call><|im_end|>'
    quoted = {**CALL, "arguments": json.dumps(CALL["arguments"])}
    wrapped = [{"type": "function", "id": "1", "function": call} for call in (CALL, quoted)]
    for call in (CALL, quoted, *wrapped):
        for calls in ([call], json.dumps([call])):
            row = rows_of(tokenizer, called(calls), "off")[0]
            assert parts(tokenizer, row)[1] == text_of_it
    plain = rows_of(tokenizer, chat("q", "a"), "off")
    for nothing in ({"tool_calls": None}, {"tool_calls": []}, {"tool_calls": "null"}, {"tool_calls": ""}, {}):
        assert rows_of(tokenizer, [*chat("q"), {"role": "assistant", "content": "a", **nothing}], "off") == plain
    for nothing in (None, [], "[]"):
        with pytest.raises(Skip, match="empty assistant turn"):
            rows_of(tokenizer, called(nothing), "off")
    for wrong in (5, "{", ["add"], {"name": "add"}):
        with pytest.raises(InputError, match="tool_calls"):
            rows_of(tokenizer, called(wrong), "off")


@every
def test_what_a_template_does_not_render_is_not_supervised_as_nothing(name):
    """A template without tools or thinking would make an empty turn of a tool call, and drop a thought."""
    tokenizer = load(name)
    for part, messages in (
        ("tool_calls", called([CALL])),
        ("reasoning_content", [*chat("q"), {"role": "assistant", "content": "a", "reasoning_content": "hm"}]),
    ):
        if "qwen3" in name and (part == "reasoning_content" or name == "qwen3"):
            assert rows_of(tokenizer, messages, "on")
        else:
            with pytest.raises(Skip, match=f"does not render {part}"):
                rows_of(tokenizer, messages, "on")


@every
def test_turns_together_are_the_same_turns(name):
    """One row where the template rewrites no history: the same supervised tokens, each after the same ones as in its
    row apart. Where it rewrites, the rows stay apart."""
    tokenizer = load(name)
    apart = rows_of(tokenizer, chat("a?", "First.", "b?", "Second one.", "c?", "Third"))
    merged = together(apart)
    assert len(merged) == (3 if "qwen3" in name else 1) and merged[-1].tokens == apart[-1].tokens
    seen = {tuple(row.tokens[:i]) for row in apart for i, flag in enumerate(row.loss_mask) if flag}
    assert {tuple(row.tokens[:i]) for row in merged for i, flag in enumerate(row.loss_mask) if flag} == seen
    assert sum(sum(row.loss_mask) for row in merged) == sum(sum(row.loss_mask) for row in apart)


def test_only_rows_that_continue_each_other_are_merged():
    a, b = Row("x#0", [1, 2, 3], [False, True, True]), Row("x#1", [1, 2, 3, 4, 5], [False] * 4 + [True])
    other = Row("x#2", [1, 9, 3, 4, 5, 6], [False] * 5 + [True])
    assert together([]) == [] and together([a]) == [a]
    assert together([a, b]) == [Row("x#0", b.tokens, [False, True, True, False, True])]
    assert together([a, b, other]) == [*together([a, b]), other] and together([a, other, b]) == [a, other, b]


@every
def test_the_end_of_turn_is_found_without_its_stop_id(name):
    """A target whose files name another stop id still supervises its template's end of turn, and nothing after it."""
    tokenizer = load(name)
    messages = chat("hi", "hello", "again", "there")
    for stop_ids in ((), (0,)):
        assert training_rows({"messages": messages}, tokenizer, stop_ids, "auto") == rows_of(tokenizer, messages)


@every
def test_zero_supervision_is_a_reason_and_no_row(name, tmp_path):
    """Failure kinds 1, 2 and 14: every kept row supervises something, prompts are never supervised, and a row whose
    answer lies beyond the cut is counted."""
    tokenizer = load(name)
    records = [{"messages": chat(f"q{i}", "word " * 20), "id": i} for i in range(4)]
    records += [{"messages": chat("word " * 40_000, "late answer " * 20), "id": "long"}, {"turns": ["q"], "id": "none"}]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    config = DataConfig(path=str(tmp_path / "r.jsonl"), max_length=128)
    rows, dropped = load_rows(config.path, tokenizer, {tokenizer.eos_token_id}, config, 1 << 20)
    assert len(rows) == 4 and all(row.loss_mask.index(True) > 0 and sum(row.loss_mask) > 14 for row in rows)
    assert dropped == {"fewer than 14 supervised tokens in the first 128": 1, "no assistant turn": 1}
