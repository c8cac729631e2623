"""Records: one JSON object each, in one of four layouts, read without guessing.

Token rows (`prompt_ids`, `answer_ids`), `messages` (role, content), `conversations` (ShareGPT: from, value), `turns`
(user texts only: a prompt without an answer).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ..checked import InputError

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
    return messages, _objects(record.get("tools"), "tools")


def _message(raw: Message) -> Message:
    shape = ("from", "value") if "from" in raw else ("role", "content")
    role, content = (raw.get(key) for key in shape)
    if not isinstance(role, str) or not isinstance(content, str | list | None):
        raise Malformed(f"a message needs {shape[0]} (string) and {shape[1]} (string or list)", f", got {_short(raw)}")
    if role not in _ROLES:
        raise Skip(f"unknown role {role[:30]!r}")  # a guess could supervise text that the target never wrote
    rest = {key: v for key, v in raw.items() if key not in shape and v is not None}
    calls = _objects(rest.pop("tool_calls", None), "tool_calls")
    if calls is not None:
        rest["tool_calls"] = [_call(call) for call in calls]
    message = {"role": _ROLES[role], "content": "" if content is None else content, **rest}
    says = (
        text_of(message).strip() or rest.get("tool_calls") or rest.get("reasoning_content") or isinstance(content, list)
    )
    if message["role"] in ("user", "assistant") and not says:
        raise Skip(f"empty {message['role']} turn")
    return message


def _objects(value: Any, name: str) -> list[Any] | None:
    """A list of objects, the same as a JSON string, or nothing; files hold all three."""
    given = value
    if isinstance(value, str):
        try:
            value = json.loads(value or "null")
        except json.JSONDecodeError:
            raise Malformed(f"{name} is not valid JSON", f": {_short(given)}") from None
    if value is not None and not (isinstance(value, list) and all(isinstance(v, dict) for v in value)):
        raise Malformed(
            f"{name} must be a list of objects, the same as a JSON string, or null", f", got {_short(given)}"
        )
    return value or None


def _call(call: Message) -> Message:
    """A tool call with its arguments as an object: servers give a JSON string, which some templates quote again."""
    inner = call["function"] if isinstance(call.get("function"), dict) else call
    if isinstance(inner.get("arguments"), str):
        try:
            arguments = json.loads(inner["arguments"])
        except json.JSONDecodeError:  # the target wrote no JSON: its text is all there is
            return call
        inner = {**inner, "arguments": arguments} if isinstance(arguments, dict) else inner
    return {**call, "function": inner} if "function" in call else inner


def to_answer(messages: list[Message]) -> list[Message]:
    """What of a conversation the target is asked: all before the answer it ends with, all of it where it has none."""
    return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages


def text_of(message: Message) -> str:
    """The text of a message, whose content may come in parts."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
