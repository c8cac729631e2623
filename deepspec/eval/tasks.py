"""A task is a JSONL file of prompts, or the name of a public benchmark that becomes one."""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..cache import cache_dir, write_text
from ..checked import InputError
from ..data.chat import Thinking, render_prompt
from ..data.prompts import Prompt, TokenizerSource, load_prompts, read_records, take
from ..data.records import Skip, conversation
from .benchmarks import BENCHMARKS


@dataclass(frozen=True)
class Task:
    """A name for the tables, the file that holds the prompts, and the prompts once they are loaded."""

    name: str
    path: Path
    prompts: list[Prompt] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    """Records that gave no prompt, counted by reason."""

    def load(self, tokenizer: TokenizerSource, thinking: Thinking = "auto", limit: int | None = None) -> "Task":
        """The same task with its prompts, at most `limit` of them, spread over the file."""
        dropped: Counter[str] = Counter()
        prompts = load_prompts(self.path, tokenizer, thinking, dropped=dropped)
        prompts = prompts if limit is None else take(prompts, limit)
        return dataclasses.replace(self, prompts=prompts, dropped=dict(dropped))

    def check(self, new_tokens: int, vocabulary: int, limit: int) -> None:
        """InputError for a prompt that a target of this vocabulary and this many positions cannot answer."""
        for p in self.prompts:
            if not 0 <= min(p.prompt_ids) <= max(p.prompt_ids) < vocabulary:
                raise InputError(f"{self.path}: prompt {p.id} holds a token id outside 0 to {vocabulary - 1}")
            if len(p.prompt_ids) + new_tokens > limit:
                raise InputError(
                    f"{self.path}: prompt {p.id} has {len(p.prompt_ids)} tokens; with {new_tokens} new ones it passes "
                    f"the target's {limit} positions; pass a smaller --max-new-tokens or leave it out"
                )

    def fingerprint(self) -> str:
        """Changes where a prompt, its order or its turns do."""
        said = json.dumps([[p.id, p.prompt_ids, later_turns(p)] for p in self.prompts])
        return hashlib.sha256(said.encode()).hexdigest()

    @property
    def later_turns(self) -> int:
        """User turns after the first ones."""
        return sum(len(later_turns(p)) for p in self.prompts)


def later_turns(prompt: Prompt) -> list[str]:
    """What the user says after the first answer; only a record of `turns` says more."""
    turns = prompt.record.get("turns")
    return list(turns[1:]) if isinstance(turns, list) else []


class Conversation:
    """A sample that may have several turns: each answer becomes part of the next prompt."""

    def __init__(self, prompt: Prompt, tokenizer: Any, thinking: Thinking, turns: str) -> None:
        """turns: 'all', or 'first', which ends it after the first answer."""
        self.prompt_ids: list[int] | None = prompt.prompt_ids
        """What the target has to answer next; None when the conversation is over."""
        self._later = iter(later_turns(prompt) if turns == "all" else ())
        self._tokenizer, self._thinking = tokenizer, thinking
        if "turns" in prompt.record:
            self._messages, self._tools = conversation(prompt.record)

    def answer(self, tokens: Sequence[int], stop_ids: Sequence[int], room: int) -> None:
        """The target's own answer; the next prompt, if there is one and it has at most `room` tokens."""
        self.prompt_ids = None
        turn = next(self._later, None)
        if turn is None:
            return
        said = list(tokens[:-1] if tokens and tokens[-1] in stop_ids else tokens)
        content = self._tokenizer.decode(said, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self._messages += [{"role": "assistant", "content": content}, {"role": "user", "content": turn}]
        try:
            ids = render_prompt(self._tokenizer, self._messages, self._thinking, self._tools)
        except Skip:  # a template that refuses what the target said: the conversation ends here
            return
        self.prompt_ids = ids if len(ids) <= room else None


def find_tasks(names: Sequence[str]) -> list[Task]:
    """Benchmarks and JSONL files by name or path, in the order given; InputError for a missing or broken one."""
    if not names:
        raise InputError("no task given; pass --tasks with a JSONL file of `turns`")
    if twice := [n for n in dict.fromkeys(names) if names.count(n) > 1]:
        raise InputError(f"task {twice[0]!r} is given twice")
    paths = [_benchmark(n) if n in BENCHMARKS and not Path(n).exists() else _file(n) for n in names]
    stems = [p.stem for p in paths]
    return [Task(n if stems.count(s) > 1 else s, p) for n, s, p in zip(names, stems, paths)]


def _file(name: str) -> Path:
    path = Path(name)
    if not path.is_file():
        known = ", ".join(BENCHMARKS)
        raise InputError(f"task {name!r} is neither a file nor one of {known}; pass a JSONL file of `turns`")
    for _ in read_records(path):  # a broken line is found before a model is loaded
        pass
    return path


def _benchmark(name: str) -> Path:
    """The benchmark's prompts as a JSONL of `turns`, fetched once into the cache."""
    path = cache_dir("tasks", f"{name}.jsonl")
    if path.is_file():
        return path
    try:
        samples = BENCHMARKS[name].load()
    except Exception as error:  # offline, renamed, gated...: whatever it is, the way out is the same
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(
            f"task {name!r} could not be fetched from the hub ({reason}); pass a JSONL file of `turns` instead"
        ) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(_lines(name, samples)))
    return path


def _lines(name: str, samples: Sequence[list[str]]) -> Iterator[str]:
    for i, turns in enumerate(samples):
        yield json.dumps({"id": f"{name}-{i}", "turns": turns}) + "\n"
