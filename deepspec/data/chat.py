"""From a conversation to token ids and a loss mask, with the target's own chat template and nothing added to it.

A record is one JSON object in one of four layouts: token rows (`prompt_ids`, `answer_ids`), `messages` (role, content),
`conversations` (ShareGPT: from, value), `turns` (user texts only: a prompt without an answer).

Every assistant turn becomes a row of its own, because templates rewrite history (Qwen3 drops earlier thinking): only a
row per turn holds the context that inference would see.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import jinja2

from ..checked import InputError

if TYPE_CHECKING:  # the import takes seconds, and token rows need no tokenizer
    from transformers import PreTrainedTokenizerBase as Tokenizer

Thinking = Literal["on", "off", "auto"]
Message = dict[str, Any]

LAYOUTS = ("prompt_ids", "messages", "conversations", "turns")
"""The keys that hold a record's text, the first one present counting."""

_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
}


class Skip(Exception):
    """A record that cannot become a row, through no mistake of form: it is counted by this reason and left out."""


class Malformed(InputError):
    """A record whose form is wrong. `reason` is what it is counted by where such records are read over."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason + detail)
        self.reason = reason


@dataclass(frozen=True)
class Row:
    """One training sequence."""

    id: str
    tokens: list[int]
    """T token ids."""
    loss_mask: list[bool]
    """T flags; True where the target wrote the token."""


def training_rows(
    record: Message, tokenizer: Tokenizer | None, stop_ids: Collection[int], thinking: Thinking
) -> list[Row]:
    """One row for every assistant turn of `record`, or the one row of a token row (which needs no tokenizer).

    Supervised is what the target writes after its prompt, up to and with its first stop id. Skip says why a record
    cannot be used; InputError says what is wrong with its form.
    """
    if layout(record) == "prompt_ids":
        prompt = token_ids(record, "prompt_ids")
        if record.get("answer_ids") in (None, []):
            raise Skip("no answer")
        answer = token_ids(record, "answer_ids")
        return [_row(record_id(record, [prompt, answer]), prompt, answer)]
    tokenizer = needs_template(tokenizer)
    messages, tools = conversation(record)
    name = record_id(record, [messages, tools])
    answered = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answered:
        raise Skip("no assistant turn")
    rows = []
    for turn, i in enumerate(answered):
        prompt, answer = _split(tokenizer, messages[:i], messages[i], thinking, tools)
        rows.append(_row(f"{name}#{turn}", prompt, answer[: _end(answer, stop_ids, tokenizer)]))
    return rows


def _end(answer: list[int], stop_ids: Collection[int], tokenizer: Tokenizer) -> int:
    """How much of a turn the target would write: up to and with its first stop id.

    Without one (the target's files name another end of turn than its template writes), up to and with a special token
    that only space follows: what a template writes after the end of a turn, the target never generates.
    """
    for n, token in enumerate(answer, 1):
        if token in stop_ids:
            return n
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    last = next((n for n in range(len(answer), 0, -1) if answer[n - 1] in special), len(answer))
    return last if not str(tokenizer.decode(answer[last:])).strip() else len(answer)


def render_prompt(
    tokenizer: Tokenizer | None, messages: list[Message], thinking: Thinking, tools: list[Any] | None = None
) -> list[int]:
    """Token ids of the conversation so far and the generation prompt: what the target sees before it answers.

    Skip where the template refuses the conversation, InputError where there is no template.
    """
    tokenizer = needs_template(tokenizer)
    return _encode(tokenizer, _render(tokenizer, messages, thinking, tools, prompt=True))


def to_answer(messages: list[Message]) -> list[Message]:
    """What of a conversation the target is asked: all before the answer it ends with, all of it where it has none."""
    return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages


def needs_template(tokenizer: Tokenizer | None) -> Tokenizer:
    """`tokenizer` itself; InputError without one, or without a chat template."""
    if tokenizer is None or not tokenizer.chat_template:
        lacks = "the target has no tokenizer" if tokenizer is None else "the tokenizer has no chat template"
        raise InputError(f"{lacks}: use token rows (prompt_ids, answer_ids), or a tokenizer with a chat template")
    return tokenizer


def layout(record: Message) -> str:
    """Which of LAYOUTS `record` has; InputError where it has none."""
    for key in LAYOUTS:
        if key in record:
            return key
    raise Malformed(f"none of the keys {', '.join(LAYOUTS)}", f"; it has: {', '.join(map(str, record)) or 'no keys'}")


def record_id(record: Message, content: Any) -> str:
    """The record's own `id`, or 16 hexadecimal digits of a hash of its content."""
    own = record.get("id")
    if isinstance(own, str | int) and not isinstance(own, bool) and own != "":
        return str(own)
    if own is not None:
        raise Malformed("id must be a non-empty string or an integer", f", got {own!r}")
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def token_ids(record: Message, key: str) -> list[int]:
    """record[key], a non-empty list of ids >= 0."""
    value = record.get(key)
    if not isinstance(value, list) or not value or set(map(type, value)) != {int} or min(value) < 0:
        raise Malformed(f"{key} must be a non-empty list of token ids (integers >= 0)", f", got {_short(value)}")
    return value


def conversation(record: Message) -> tuple[list[Message], list[Any] | None]:
    """Messages (role, content and whatever else they carry) and tools of a record that is no token row.

    Of `turns` only the first: the next ones would need the answers. Unknown roles and empty turns raise Skip.
    """
    key = layout(record)
    value = record[key]
    if not isinstance(value, list) or not all(isinstance(v, str if key == "turns" else dict) for v in value):
        kind = "strings" if key == "turns" else "objects"
        raise Malformed(f"{key} must be a list of {kind}", f", got {_short(value)}")
    if not value:
        raise Skip("empty conversation")
    messages = [_message({"role": "user", "content": value[0]})] if key == "turns" else [_message(v) for v in value]
    return messages, _tools(record.get("tools"))


def _message(raw: Message) -> Message:
    shape = ("from", "value") if "from" in raw else ("role", "content")
    role, content = (raw.get(key) for key in shape)
    if not isinstance(role, str) or not isinstance(content, str | list | None):
        raise Malformed(f"a message needs {shape[0]} (string) and {shape[1]} (string or list)", f", got {_short(raw)}")
    if role not in _ROLES:
        raise Skip(f"unknown role {role[:30]!r}")  # a guess could supervise text that the target never wrote
    rest = {key: v for key, v in raw.items() if key not in shape and v is not None}
    message = {"role": _ROLES[role], "content": "" if content is None else content, **rest}
    says = (
        text_of(message).strip() or rest.get("tool_calls") or rest.get("reasoning_content") or isinstance(content, list)
    )
    if message["role"] in ("user", "assistant") and not says:
        raise Skip(f"empty {message['role']} turn")
    return message


def _tools(value: Any) -> list[Any] | None:
    """A list, the same as a JSON string, or nothing; files hold all three."""
    given = value
    if isinstance(value, str):
        try:
            value = json.loads(value or "null")
        except json.JSONDecodeError:
            raise Malformed("tools is not valid JSON", f": {_short(given)}") from None
    if value is not None and not (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
        raise Malformed("tools must be a list of objects, the same as a JSON string, or null", f", got {_short(given)}")
    return value or None


def _split(
    tokenizer: Tokenizer, context: list[Message], turn: Message, thinking: Thinking, tools: list[Any] | None
) -> tuple[list[int], list[int]]:
    """Ids of the prompt that inference would show the target, and ids of the turn that follows it."""
    if not any(message["role"] == "user" for message in context):
        raise Skip("assistant turn before any user turn")
    prompt = _render(tokenizer, context, thinking, tools, prompt=True)
    whole = _render(tokenizer, [*context, turn], thinking, tools, prompt=False)
    if thinking != "off":
        # Qwen3 puts an empty think pair before an answer without reasoning. The target wrote such an answer with
        # thinking off, where the generation prompt holds that pair; so it is context here too, not the target's words.
        bare = _render(tokenizer, context, "off", tools, prompt=True)
        supplied = _squeeze(bare.removeprefix(prompt))
        if bare.startswith(prompt) and whole.startswith(bare) and not _squeeze(text_of(turn)).startswith(supplied):
            prompt = bare
    elif not whole.startswith(prompt) and whole.startswith(_render(tokenizer, context, "auto", tools, prompt=True)):
        raise Skip("a turn with reasoning, but thinking is off")
    if not whole.startswith(prompt):
        raise Skip("template: the turn does not continue its prompt")
    before, all_ids = _encode(tokenizer, prompt), _encode(tokenizer, whole)
    if all_ids[: len(before)] == before:
        return before, all_ids[len(before) :]
    # A token would straddle the border. Inference cannot draw it: the prompt's tokens are fixed before the first draw.
    return before, _encode(tokenizer, whole[len(prompt) :])


def _render(
    tokenizer: Tokenizer, messages: list[Message], thinking: Thinking, tools: list[Any] | None, *, prompt: bool
) -> str:
    switch: dict[str, Any] = {} if thinking == "auto" else {"enable_thinking": thinking == "on"}
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **switch
        )
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise Skip(f"template: {' '.join(str(error).split())[:100]}") from None
    return str(text)


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    # A template writes its own BOS. verbose=False: no warning about rows beyond the context, they are cut later.
    try:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    except TypeError:  # JSON can escape half of a surrogate pair
        raise Skip("text that is not valid Unicode") from None


def text_of(message: Message) -> str:
    """The text of a message, whose content may come in parts."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))


def _row(name: str, prompt: list[int], answer: list[int]) -> Row:
    return Row(name, prompt + answer, [False] * len(prompt) + [True] * len(answer))


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
