"""From a conversation to token ids and a loss mask, with the target's own chat template and nothing added to it.

Every assistant turn becomes a row of its own, because templates rewrite history (Qwen3 drops earlier thinking): only a
row per turn holds the context that inference would see.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import jinja2

from ..checked import InputError
from .records import Message, Skip, conversation, layout, record_id, text_of, token_ids

if TYPE_CHECKING:  # the import takes seconds, and token rows need no tokenizer
    from transformers import PreTrainedTokenizerBase as Tokenizer

Thinking = Literal["on", "off", "auto"]


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


def together(rows: list[Row]) -> list[Row]:
    """The rows of one conversation with every row merged into the next one whose context it is, token for token, which
    a template that rewrites no history allows: every turn still has the context that inference would see."""
    merged = rows[:1]
    for row in rows[1:]:
        before = merged[-1]
        if row.tokens[: len(before.tokens)] == before.tokens:
            merged[-1] = Row(before.id, row.tokens, before.loss_mask + row.loss_mask[len(before.tokens) :])
        else:
            merged.append(row)
    return merged


def needs_template(tokenizer: Tokenizer | None) -> Tokenizer:
    """`tokenizer` itself; InputError without one, or without a chat template."""
    if tokenizer is None or not tokenizer.chat_template:
        lacks = "the target has no tokenizer" if tokenizer is None else "the tokenizer has no chat template"
        raise InputError(f"{lacks}: use token rows (prompt_ids, answer_ids), or a tokenizer with a chat template")
    return tokenizer


def _split(
    tokenizer: Tokenizer, context: list[Message], turn: Message, thinking: Thinking, tools: list[Any] | None
) -> tuple[list[int], list[int]]:
    """Ids of the prompt that inference would show the target, and ids of the turn that follows it."""
    if not any(message["role"] == "user" for message in context):
        raise Skip("assistant turn before any user turn")
    prompt = _render(tokenizer, context, thinking, tools, prompt=True)
    whole = _render(tokenizer, [*context, turn], thinking, tools, prompt=False)
    for part in ("tool_calls", "reasoning_content"):  # what the target wrote, but this template leaves out
        without = [*context, {key: v for key, v in turn.items() if key != part}]
        if turn.get(part) and _render(tokenizer, without, thinking, tools, prompt=False) == whole:
            raise Skip(f"template: it does not render {part}")
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
    # A template writes its own BOS. Rows beyond the model's context are cut later, so no warning about them.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    try:
        if backend is None or backend.truncation or backend.padding:  # the call below takes these settings back
            return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        return list(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)  # a third less time
    except TypeError:  # JSON can escape half of a surrogate pair
        raise Skip("text that is not valid Unicode") from None


def _row(name: str, prompt: list[int], answer: list[int]) -> Row:
    return Row(name, prompt + answer, [False] * len(prompt) + [True] * len(answer))


def _squeeze(text: str) -> str:
    return "".join(text.split())
