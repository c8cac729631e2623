"""How a prompt is put to a server and its answer read, for each kind of server. No traffic here.

Ids where the server takes and gives them (vLLM, SGLang), text where it does not. Text is tokenised again, and the
number of tokens that the server counted says how often that went wrong.
"""

from __future__ import annotations

import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from ..checked import InputError
from ..sampling import Sampling
from .answers_file import refuses
from .chat import Thinking, training_rows
from .prompts import Prompt, hash_id
from .records import Skip, conversation, layout, to_answer

Body = dict[str, Any]


class BadReply(Exception):
    """A reply that does not hold what it should; the next try may."""


@dataclass(frozen=True)
class Ask:
    """What every request of a run shares."""

    tokenizer: Any
    stop_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    seed: int
    thinking: Thinking

    def seed_of(self, prompt: Prompt) -> int:
        """A request's seed, 31 bits: not the order's, not the server's."""
        return hash_id(prompt.id, f"answer {self.seed}") >> 33

    @functools.cached_property
    def end_of_turn(self) -> int:
        """The stop id that the template ends a turn with; text does not show it."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            last = training_rows({"messages": turns}, self.tokenizer, self.stop_ids, self.thinking)[0].tokens[-1]
        except (Skip, InputError):
            last = -1
        if last in self.stop_ids:
            return last
        own = self.tokenizer.eos_token_id
        return own if own in self.stop_ids else self.stop_ids[0]


class Protocol(ABC):
    """One way to ask."""

    name = ""
    """How --protocol calls it."""
    path = "/v1/completions"
    """Where requests are posted to, below the server's address."""

    def __init__(self, ask: Ask, model: str) -> None:
        self.ask, self.model = ask, model
        lost = [f"{k}={v}" for k, v, off in self.unheard() if v != off]
        if lost:
            raise InputError(f"a {self.name} server cannot be asked for {', '.join(lost)}")

    def unheard(self) -> list[tuple[str, Any, Any]]:
        """Settings that cannot be sent, each with its value and the value that needs no sending."""
        return []

    @abstractmethod
    def body(self, prompt: Prompt) -> Body:
        """The JSON object to post. InputError where the prompt cannot be put this way."""

    @abstractmethod
    def row(self, prompt: Prompt, reply: Any) -> dict[str, Any]:
        """The answer's row; BadReply where `reply` holds none."""

    def _common(self, prompt: Prompt) -> Body:
        sampling = self.ask.sampling
        return {
            "model": self.model,
            "max_tokens": self.ask.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": self.ask.seed_of(prompt),
        }

    def _row(self, prompt: Prompt, ids: list[int], finish: str, refusal: bool = False) -> dict[str, Any]:
        if not ids:
            raise BadReply("an answer without a token")
        row = {"id": prompt.id, "task": prompt.task, "prompt_ids": prompt.prompt_ids, "answer_ids": ids}
        row["finish"] = finish
        opening = self.ask.tokenizer.decode(ids[:64], skip_special_tokens=True)
        return {**row, "refusal": True} if refusal or finish == "content_filter" or refuses(opening) else row

    def _from_text(self, prompt: Prompt, text: str, finish: str, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The row of an answer that came as text."""
        if finish == "length":
            text = text.rstrip("\ufffd")  # half a character, cut by the budget: no token of the target's spells this
        ids = _encode(self.ask.tokenizer, text)
        if finish == "stop":
            ids = [*ids, self.ask.end_of_turn]
        return self._row(prompt, ids, finish) | self._drift(prompt, ids, usage)

    def _drift(self, prompt: Prompt, ids: list[int], usage: Mapping[str, Any]) -> dict[str, Any]:
        answered, asked = usage.get("completion_tokens"), usage.get("prompt_tokens")
        found: dict[str, Any] = {"drift": answered - len(ids) if isinstance(answered, int) else None}
        if isinstance(asked, int) and asked != len(prompt.prompt_ids):
            found["prompt_drift"] = asked - len(prompt.prompt_ids)
        return found


@final
class VLLM(Protocol):
    """Ids in, ids out (`return_token_ids`). Without ids in the reply, an older vLLM, its text is tokenised again."""

    name = "vllm"

    def body(self, prompt: Prompt) -> Body:
        sampling = self.ask.sampling
        # all that the model's own generation config would set is said, so that it decides nothing
        own: Body = {"top_k": sampling.top_k or -1, "min_p": sampling.min_p, "repetition_penalty": 1.0}
        own |= {"stop_token_ids": list(self.ask.stop_ids), "skip_special_tokens": False, "return_token_ids": True}
        return {**self._common(prompt), **own, "prompt": prompt.prompt_ids}

    def row(self, prompt: Prompt, reply: Any) -> dict[str, Any]:
        choice, finish = _choice(reply)
        ids = choice.get("token_ids")
        if ids is None:
            return self._from_text(prompt, _string(choice, "text"), finish, _usage(reply))
        return self._row(prompt, _ids(ids), finish)


@final
class SGLang(Protocol):
    """Ids in, ids out, by SGLang's own /generate."""

    name = "sglang"
    path = "/generate"

    def body(self, prompt: Prompt) -> Body:
        sampling = self.ask.sampling
        settings: Body = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or -1}
        settings |= {"min_p": sampling.min_p, "repetition_penalty": 1.0, "max_new_tokens": self.ask.max_new_tokens}
        settings |= {"stop_token_ids": list(self.ask.stop_ids), "skip_special_tokens": False}
        return {"input_ids": prompt.prompt_ids, "sampling_params": settings}

    def row(self, prompt: Prompt, reply: Any) -> dict[str, Any]:
        meta = _object(reply, "meta_info")
        reason = _object(meta, "finish_reason")
        finish = _finish(reason.get("type"))
        if reply.get("output_ids") is None:
            return self._from_text(prompt, _string(reply, "text"), finish, meta)
        ids, matched = _ids(reply["output_ids"]), reason.get("matched")
        if finish == "stop" and isinstance(matched, int) and ids[-1:] != [matched]:
            ids = [*ids, matched]  # the stop id was drawn, and trimmed from the output
        return self._row(prompt, ids, finish)


@final
class Transformers(Protocol):
    """`transformers serve`: text in, text out. A whole generation config travels along, for the model's own would fill
    in what is not said (whether to sample at all, top-k 50)."""

    name = "transformers"

    def body(self, prompt: Prompt) -> Body:
        sampling = self.ask.sampling
        generation: Body = {"max_new_tokens": self.ask.max_new_tokens, "eos_token_id": list(self.ask.stop_ids)}
        generation |= {"pad_token_id": self.ask.end_of_turn, "do_sample": sampling.temperature > 0}
        if sampling.temperature > 0:
            generation |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
            generation |= {"min_p": sampling.min_p} if sampling.min_p else {}
        text = as_text(self.ask.tokenizer, prompt.prompt_ids)
        body = {"model": self.model, "prompt": text, "max_tokens": self.ask.max_new_tokens}
        return {**body, "generation_config": json.dumps(generation)}

    def row(self, prompt: Prompt, reply: Any) -> dict[str, Any]:
        choice, finish = _choice(reply)
        return self._from_text(prompt, _string(choice, "text"), finish, _usage(reply))


class _Plain(Protocol):
    """What OpenAI's own interface can be told."""

    def unheard(self) -> list[tuple[str, Any, Any]]:
        return [("top_k", self.ask.sampling.top_k, 0), ("min_p", self.ask.sampling.min_p, 0.0)]


@final
class Completions(_Plain):
    """Any server with text completions: our rendered prompt in, text out."""

    name = "completions"

    def body(self, prompt: Prompt) -> Body:
        return {**self._common(prompt), "prompt": as_text(self.ask.tokenizer, prompt.prompt_ids)}

    def row(self, prompt: Prompt, reply: Any) -> dict[str, Any]:
        choice, finish = _choice(reply)
        return self._from_text(prompt, _string(choice, "text"), finish, _usage(reply))


@final
class Chat(_Plain):
    """Any server with chat completions. The server renders the prompt, and the answer comes in parts (reasoning,
    content, tool calls); our template puts them together again."""

    name = "chat"
    path = "/v1/chat/completions"

    def body(self, prompt: Prompt) -> Body:
        messages, tools = self._before(prompt)
        body = {**self._common(prompt), "messages": messages} | ({"tools": tools} if tools else {})
        if self.ask.thinking != "auto":
            body["chat_template_kwargs"] = {"enable_thinking": self.ask.thinking == "on"}
        return body

    def row(self, prompt: Prompt, reply: Any) -> dict[str, Any]:
        choice, finish = _choice(reply)
        said = _object(choice, "message")
        turn = {key: said[key] for key in ("content", "reasoning_content", "tool_calls") if said.get(key)}
        if said.get("reasoning"):  # its newer name
            turn["reasoning_content"] = said["reasoning"]
        if not turn:  # nothing but the stop id, or OpenAI's way to refuse
            refused = isinstance(said.get("refusal"), str)
            ids = [*(_encode(self.ask.tokenizer, said["refusal"]) if refused else ()), self.ask.end_of_turn]
            return self._row(prompt, ids, finish, refused) | self._drift(prompt, ids, _usage(reply))
        if finish == "length" and isinstance(turn.get("content"), str):
            turn["content"] = turn["content"].rstrip("\ufffd")
        messages, tools = self._before(prompt)
        record = {"messages": [*messages, {"role": "assistant", "content": "", **turn}], "tools": tools}
        try:
            made = training_rows(record, self.ask.tokenizer, self.ask.stop_ids, self.ask.thinking)[-1]
        except (Skip, InputError) as error:
            raise BadReply(f"an answer that the template refuses ({error})") from None
        start = made.loss_mask.index(True)
        ids = made.tokens[start:]
        if finish == "length" and ids[-1] in self.ask.stop_ids:
            ids = ids[:-1]  # the template ends every turn; this one was cut
        row = self._row(prompt, ids, finish) | self._drift(prompt, ids, _usage(reply))
        return {**row, "prompt_ids": made.tokens[:start]}

    def _before(self, prompt: Prompt) -> tuple[list[Body], list[Any] | None]:
        if layout(prompt.record) == "prompt_ids":
            raise InputError(f"prompt {prompt.id!r} is token ids, and a chat server takes messages only")
        messages, tools = conversation(prompt.record)
        return to_answer(messages), tools


PROTOCOLS: Mapping[str, type[Protocol]] = {kind.name: kind for kind in (VLLM, SGLang, Transformers, Completions, Chat)}


def as_text(tokenizer: Any, ids: list[int]) -> str:
    """Text that a server tokenises to `ids`, as far as text can: without the BOS that the server's tokenizer adds."""
    text = str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    bos = tokenizer.bos_token
    if bos and text.startswith(bos) and list(tokenizer(text.removeprefix(bos))["input_ids"]) == ids:
        return text.removeprefix(bos)
    return text


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _choice(reply: Any) -> tuple[Body, str]:
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise BadReply("a reply without one choice")
    return choices[0], _finish(choices[0].get("finish_reason"))


def _finish(reason: Any) -> str:
    if not isinstance(reason, str) or reason in ("abort", "error"):
        raise BadReply(f"an answer that ended with {reason!r}")
    return reason


def _usage(reply: Body) -> Body:
    usage = reply.get("usage")
    return usage if isinstance(usage, dict) else {}


def _object(value: Any, key: str) -> Body:
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, dict):
        raise BadReply(f"a reply without {key}")
    return found


def _string(value: Body, key: str) -> str:
    if not isinstance(value.get(key), str):
        raise BadReply(f"an answer without {key}")
    return str(value[key])


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(v) is int for v in value):
        raise BadReply("token ids that are no list of integers")
    return value
