"""Reading JSONL files, and the prompts in them: what the target sees before it answers."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checked import InputError
from .chat import Thinking, render_prompt
from .records import Malformed, Message, Skip, conversation, layout, record_id, to_answer, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

TokenizerSource = Any
"""A tokenizer, None, or a function without arguments that returns either; called only where a record needs it."""


@dataclass(frozen=True)
class Prompt:
    """One request to the target."""

    id: str
    task: str
    """The record's `task`, or the name of its file without the ending."""
    prompt_ids: list[int]
    """Token ids, generation prompt included."""
    record: Message
    """The record it was made from."""


def load_prompts(
    path: str | Path,
    tokenizer: TokenizerSource = None,
    thinking: Thinking = "auto",
    *,
    dropped: Counter[str] | None = None,
    skip_malformed: bool = False,
) -> list[Prompt]:
    """The prompts of a JSONL file, in its order: of `turns` the first, of `messages` and `conversations` all before the
    answer that they end with, of token rows `prompt_ids`.

    Records that the template refuses are left out and counted in `dropped` by reason; so is a second record with an id
    seen before in this file. InputError names file and line where a record is malformed (`skip_malformed` counts and
    drops it instead), and the reasons where no prompt is left.
    """
    dropped = Counter() if dropped is None else dropped
    get = tokenizer_getter(tokenizer)
    found: list[Prompt] = []
    here: Counter[str] = Counter()
    skipped = here if skip_malformed else None
    for where, record in read_records(path, skipped):
        with counted(where, here, skipped):
            found.append(_prompt(record, get, thinking, Path(path).stem))
    found = unique(found, here)
    dropped.update(here)
    if not found:
        raise InputError(f"{path}: no usable prompt; dropped: {reasons(here)}")
    return found


class Seen:
    """Which ids came by, and with which tokens."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}

    def again(self, id: str, tokens: list[int]) -> str | None:
        """None for a new id; else why this one is too many: 'duplicate', or another reason where the tokens differ."""
        now = hash(tuple(tokens))
        if id not in self._tokens:
            self._tokens[id] = now
            return None
        return "duplicate" if self._tokens[id] == now else "duplicate id, other tokens"


def unique(prompts: Iterable[Prompt], dropped: Counter[str]) -> list[Prompt]:
    """Every id once, its first prompt; the others are counted in `dropped`, apart when their tokens differ."""
    seen, first = Seen(), []
    for prompt in prompts:
        if repeated := seen.again(prompt.id, prompt.prompt_ids):
            dropped[repeated] += 1
        else:
            first.append(prompt)
    return first


def held_out(id: str, fraction: float, seed: int = 0) -> bool:
    """Whether the prompt `id` belongs to the held-out part, about `fraction` of all prompts.

    It depends on nothing else, so the two parts are disjoint and complete in any file, order, size or subset, and a
    larger fraction holds out a superset.
    """
    if not 0 <= fraction <= 1:
        raise InputError(f"the held-out fraction must be in [0, 1], got {fraction}")
    return hash_id(id, f"hold-out {seed}") < fraction * 2.0**64


def take(prompts: list[Prompt], limit: int) -> list[Prompt]:
    """`limit` prompts spread over all of them, in their order: the same whatever the order, and a larger limit takes a
    superset. Without this, a limit over several files would take the first file only."""
    if limit < 1:
        raise InputError(f"the limit must be >= 1, got {limit}")
    chosen = {p.id for p in sorted(prompts, key=lambda p: hash_id(p.id, "take"))[:limit]}
    return [p for p in prompts if p.id in chosen]


def hash_id(id: str, purpose: str) -> int:
    """64 bits of `id`, independent from one `purpose` to another."""
    return int.from_bytes(hashlib.sha256(f"{purpose}\0{id}".encode(errors="surrogatepass")).digest()[:8], "big")


def read_records(path: str | Path, skipped: Counter[str] | None = None) -> Iterator[tuple[str, Message]]:
    """The objects of a JSONL file, each with where it stands ('file.jsonl, line 3').

    A line that is no JSON object is an InputError that names it; with `skipped` it is counted there and left out.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"no data file {str(path)!r}")
    number = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            with counted(where, Counter(), skipped):
                yield where, _parse(line)
    if number == 0:
        raise InputError(f"{path} is empty: it needs one JSON object a line")


def parse_line(line: bytes, where: str) -> Message:
    """The JSON object on a line; InputError begins with `where`."""
    try:
        return _parse(line)
    except Malformed as error:
        raise InputError(f"{where}: {error}") from None


def _parse(line: bytes) -> Message:
    if not line.strip():
        raise Malformed("empty line", "; it must be a JSON object")
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise Malformed("not UTF-8", f" (byte {error.start + 1})") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise Malformed("not valid JSON", f": {error}") from None
    if not isinstance(record, dict):
        raise Malformed("must be a JSON object", f", found {type(record).__name__}")
    return record


@contextlib.contextmanager
def counted(where: str, dropped: Counter[str], skipped: Counter[str] | None) -> Iterator[None]:
    """What is done with a record that cannot be used: a Skip is counted in `dropped`; a Malformed one is counted in
    `skipped`, or an InputError that begins with `where` if that is None."""
    try:
        yield
    except Skip as skip:
        dropped[str(skip)] += 1
    except Malformed as error:
        if skipped is None:
            raise InputError(f"{where}: {error}") from None
        skipped[error.reason] += 1
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def reasons(dropped: Counter[str]) -> str:
    """'12 no answer, 3 empty user turn', the most frequent first."""
    return ", ".join(f"{count} {reason}" for reason, count in dropped.most_common()) or "nothing"


def tokenizer_getter(source: TokenizerSource) -> Callable[[], Tokenizer | None]:
    """A function that gives the tokenizer and asks `source` at most once."""
    if source is None or hasattr(source, "apply_chat_template"):  # a tokenizer is callable too
        return lambda: source
    found: list[Any] = []

    def get() -> Any:
        if not found:
            found.append(source())
        return found[0]

    return get


def _prompt(record: Message, tokenizer: Callable[[], Tokenizer | None], thinking: Thinking, stem: str) -> Prompt:
    task = record.get("task", stem)
    if not isinstance(task, str):
        raise Malformed("task must be a string", f", got {task!r}")
    if layout(record) == "prompt_ids":
        ids = token_ids(record, "prompt_ids")
        return Prompt(record_id(record, ids), task, ids, record)
    messages, tools = conversation(record)
    messages = to_answer(messages)
    if not any(message["role"] == "user" for message in messages):
        raise Skip("no user turn to answer")
    return Prompt(
        record_id(record, [messages, tools]), task, render_prompt(tokenizer(), messages, thinking, tools), record
    )
