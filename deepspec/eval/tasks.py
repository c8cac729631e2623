"""A task is a JSONL file of prompts, or the name of a public benchmark that becomes one.

`datasets` is only asked for the benchmarks in `HUB`; the others of the paper's nine have to come as a file for now.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..cache import cache_dir, write_text
from ..checked import InputError
from ..data.chat import Thinking
from ..data.prompts import Prompt, TokenizerSource, load_prompts, read_records, take

BENCHMARKS = ("gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt-bench", "alpaca", "arena-hard-v2")


@dataclass(frozen=True)
class Hub:
    """Where a benchmark's prompts are on the Hugging Face hub, and how many the paper used."""

    dataset: str
    config: str | None
    split: str
    column: str
    samples: int


HUB = {
    "gsm8k": Hub("openai/gsm8k", "main", "test", "question", 500),
    "math500": Hub("HuggingFaceH4/MATH-500", None, "test", "problem", 500),
    "humaneval": Hub("openai/openai_humaneval", None, "test", "prompt", 164),
}


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


def find_tasks(names: Sequence[str]) -> list[Task]:
    """Benchmarks and JSONL files by name or path, in the order given; InputError for a missing or broken one."""
    if not names:
        raise InputError("no task given; pass --tasks with a JSONL file of `turns`")
    if twice := [n for n in dict.fromkeys(names) if names.count(n) > 1]:
        raise InputError(f"task {twice[0]!r} is given twice")
    paths = [_benchmark(n) if n in HUB and not Path(n).exists() else _file(n) for n in names]
    stems = [p.stem for p in paths]
    return [Task(n if stems.count(s) > 1 else s, p) for n, s, p in zip(names, stems, paths)]


def _file(name: str) -> Path:
    path = Path(name)
    if name in BENCHMARKS and not path.exists():
        raise InputError(f"task {name!r} is not built in yet; pass a JSONL file with a `turns` list a line")
    if not path.is_file():
        raise InputError(f"task {name!r} is neither a file nor one of {', '.join(HUB)}; pass a JSONL file of `turns`")
    for _ in read_records(path):  # a broken line is found before a model is loaded
        pass
    return path


def _benchmark(name: str) -> Path:
    """The benchmark's first prompts as a JSONL of `turns`, fetched once into the cache."""
    hub = HUB[name]
    path = cache_dir("tasks", f"{name}.jsonl")
    if path.is_file():
        return path
    import datasets  # slow to import, and needed only the first time

    try:
        rows = datasets.load_dataset(hub.dataset, hub.config, split=hub.split)
        prompts = [row[hub.column] for row in rows.select(range(min(hub.samples, len(rows))))]
    except Exception as error:  # offline, renamed, gated...: whatever it is, the way out is the same
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(
            f"task {name!r}: {hub.dataset} could not be fetched ({reason}); pass a JSONL file of `turns` instead"
        ) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(json.dumps({"id": f"{name}-{i}", "turns": [p]}) + "\n" for i, p in enumerate(prompts)))
    return path
