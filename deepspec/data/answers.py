"""Answers of the target, as token ids, in a file that a killed run goes on with: from the target itself, or from
servers of it.

Beside the file stands a manifest with all that decides what is in it: answers of two settings never share a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ..checked import InputError, require
from ..sampling import Sampling
from .answers_file import AnswersFile, answers_file, refuses
from .chat import Thinking
from .manifest import template_hash
from .prompts import Prompt, hash_id, reasons, unique

if TYPE_CHECKING:  # it needs httpx, an extra
    from .servers import Patience


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answering:
    """What decides the answers, whoever gives them."""

    target: str
    revision: str | None = None
    dtype: str | None = None
    """Of the weights, such as 'bfloat16'; None where a server does not say."""
    tokenizer: Any = dataclasses.field(default=None, repr=False)
    stop_ids: tuple[int, ...]
    vocab_size: int
    max_positions: int
    """Most tokens of prompt and answer."""
    max_new_tokens: int
    sampling: Sampling
    seed: int = 0
    thinking: Thinking = "auto"

    def __post_init__(self) -> None:
        require(self.max_new_tokens >= 1, f"max_new_tokens must be >= 1, got {self.max_new_tokens}")

    def settings(self) -> dict[str, Any]:
        """As the manifest records them."""
        return {
            "target": self.target,
            "target_revision": self.revision,
            "dtype": self.dtype,
            "sampling": dataclasses.asdict(self.sampling),
            "seed": self.seed,
            "max_new_tokens": self.max_new_tokens,
            "thinking": self.thinking,
            "chat_template_sha256": template_hash(self.tokenizer),
            "stop_ids": sorted(self.stop_ids),
        }


def regenerate(
    target: Any,
    prompts: Sequence[Prompt],
    out_path: str | Path,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    concurrency: int = 32,
    thinking: Thinking = "auto",
    dropped: Counter[str] | None = None,
) -> dict[str, Any]:
    """Let `target` answer every prompt whose id is not yet in the file, one row an answer (see AnswersFile) as it
    finishes.

    An answer depends on (seed, id) and its prompt, not on order, limit or interruption. `thinking` and `dropped` are
    only recorded. Returns the manifest. InputError where the file cannot be written, or was made with other settings.
    """
    from ..eval.generate import stream  # here, because it imports the engine
    from ..modeling.devices import dtype_name

    answering = Answering(
        target=target.name,
        revision=target.revision,
        dtype=dtype_name(target.dtype),
        tokenizer=target.tokenizer,
        stop_ids=tuple(target.stop_ids),
        vocab_size=target.vocab.size,
        max_positions=target.spec.max_positions,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=seed,
        thinking=thinking,
    )
    with _open(answering, prompts, out_path, concurrency, dropped) as (file, todo, add):
        if not todo:
            return file.manifest()
        for index, generation in stream(
            target,
            None,
            [prompt.prompt_ids for prompt in todo],
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_ids=target.stop_ids,
            seeds=[hash_id(prompt.id, f"answer {seed}") >> 1 for prompt in todo],  # >> 1: they travel as int64
            concurrency=concurrency,
        ):
            prompt = todo[index]
            row: dict[str, Any] = {"id": prompt.id, "task": prompt.task, "prompt_ids": prompt.prompt_ids}
            row |= {"answer_ids": list(generation.tokens), "finish": generation.finish}
            if target.tokenizer is not None and refuses(target.tokenizer.decode(generation.tokens[:64])):
                row["refusal"] = True
            add(row)
    return file.manifest()


def collect(
    urls: Sequence[str],
    answering: Answering,
    prompts: Sequence[Prompt],
    out_path: str | Path,
    *,
    concurrency: int = 32,
    model: str | None = None,
    protocol: str | None = None,
    key: str | None = None,
    patience: Patience | None = None,
    dropped: Counter[str] | None = None,
) -> dict[str, Any]:
    """As `regenerate`, but servers at `urls` answer, `concurrency` requests in flight at each (see `ask_servers`).

    Ids are kept as generated where a server returns them; the manifest's `drift` says how often the text of the others
    was tokenised to another length. InputError also where prompts were given up; what was answered is kept.
    """
    from .protocols import Ask
    from .servers import ask_servers

    require(len(urls) > 0, "no server given")
    if answering.tokenizer is None or not answering.stop_ids:
        lacks = "no tokenizer" if answering.tokenizer is None else "no stop id"
        raise InputError(f"target {answering.target!r} has {lacks}, which answers of a server need")
    ask = Ask(
        tokenizer=answering.tokenizer,
        stop_ids=answering.stop_ids,
        max_new_tokens=answering.max_new_tokens,
        sampling=answering.sampling,
        seed=answering.seed,
        thinking=answering.thinking,
    )
    with _open(answering, prompts, out_path, concurrency, dropped) as (file, todo, add):
        if not todo:
            return file.manifest()

        def met(kinds: list[str]) -> None:
            file.servers += kinds
            file.write_manifest()  # before the first answer, as everything that it says

        outcome = ask_servers(
            urls,
            ask,
            todo,
            add,
            concurrency=concurrency,
            met=met,
            model=model,
            protocol=protocol,
            key=key,
            patience=patience,
        )
        if outcome.too_long:
            file.dropped["longer than a server's context"] += outcome.too_long
    if outcome.given_up:
        name, said = outcome.given_up[-1]
        raise InputError(
            f"{len(outcome.given_up)} of {len(todo)} prompts were given up, the last {name!r}: {said}; "
            f"{len(file.done)} answers are kept in {file.path}, run again to try the others"
        )
    return file.manifest()


@contextlib.contextmanager
def _open(
    answering: Answering,
    prompts: Sequence[Prompt],
    out_path: str | Path,
    concurrency: int,
    dropped: Counter[str] | None,
) -> Iterator[tuple[AnswersFile, list[Prompt], Callable[[dict[str, Any]], None]]]:
    """The file, the prompts it lacks, and a function that adds a row and moves the bar."""
    require(concurrency >= 1, f"concurrency must be >= 1, got {concurrency}")
    dropped = Counter() if dropped is None else dropped
    prompts = unique(prompts, dropped)
    for prompt in prompts:
        if max(prompt.prompt_ids) >= answering.vocab_size:
            raise InputError(
                f"prompt {prompt.id!r}: token id {max(prompt.prompt_ids)} is outside the target's vocabulary"
            )
    room = answering.max_positions - answering.max_new_tokens
    fit = [prompt for prompt in prompts if len(prompt.prompt_ids) <= room]
    if len(fit) < len(prompts):
        dropped["longer than the target's context"] += len(prompts) - len(fit)
        prompts = fit
    if not prompts:
        raise InputError(
            f"no prompt leaves room for {answering.max_new_tokens} new tokens in {answering.max_positions} positions; "
            f"dropped: {reasons(dropped)}"
        )
    with answers_file(out_path, answering.settings()) as file:
        file.dropped.update(dropped)
        todo = file.missing(prompts)
        bar = tqdm(total=len(prompts), initial=len(prompts) - len(todo), unit="answer", desc="answers", disable=None)
        started, tokens = time.monotonic(), 0

        def add(row: dict[str, Any]) -> None:
            nonlocal tokens
            if row["id"] in file.done:
                return
            file.add(row)
            tokens += len(row["answer_ids"])
            bar.set_postfix_str(f"{tokens / (time.monotonic() - started + 1e-9):.0f} tok/s", refresh=False)
            bar.update()

        with bar:
            yield file, todo, add
