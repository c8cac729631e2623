"""The paper's nine benchmarks: where their prompts are, how they are put to the model, and what the paper measured.

Sources: DSpark (2607.05147), section 4 and Table 1; the wording of the prompts is that of the public evaluation files.
"""

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Domain = Literal["math", "code", "chat"]
Record = Mapping[str, Any]

_BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
_LIVECODEBENCH = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program\n\n### Question:\n{question}\n\n### Format: {format}\n```python\n{code}\n```\n\n"
    "### Answer: (use the provided format with backticks)"
)


@dataclass(frozen=True)
class Benchmark:
    """Where it is on the Hugging Face hub and how a row of it becomes the user's turns."""

    domain: Domain
    samples: int
    """How many the paper used; the first ones of the split are taken."""
    source: tuple[str, ...]
    """Dataset and, where it has several, the configuration; or 'json' with `files`."""
    turns: Callable[[Record], list[str]]
    split: str = "test"
    files: str | list[str] | None = None

    def load(self) -> list[list[str]]:
        """The user's turns of each sample, streamed, so that only what is needed is fetched."""
        import datasets  # slow to import, and needed only the first time

        files = {} if self.files is None else {"data_files": {self.split: self.files}}
        rows = datasets.load_dataset(*self.source, **files, split=self.split, streaming=True)
        return [self.turns(row) for row in itertools.islice(rows, self.samples)]


def _livecodebench(row: Record) -> list[str]:
    starter = row["starter_code"]
    how = "Use the following code structure:" if starter else "Write your code in the following format:"
    return [_LIVECODEBENCH.format(question=row["question_content"], format=how, code=starter or "# YOUR CODE HERE")]


def _humaneval(row: Record) -> list[str]:
    return [
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        f"```python\n{row['prompt']}\n```"
    ]


def _alpaca(row: Record) -> list[str]:
    return [f"{row['instruction']}\n\n{row['input']}" if row["input"] else row["instruction"]]


_LCB = "hf://datasets/livecodebench/code_generation_lite/"
_ARENA = "hf://datasets/lmarena-ai/arena-hard-auto/data/arena-hard-v2.0/question.jsonl"

BENCHMARKS = {
    "gsm8k": Benchmark("math", 500, ("openai/gsm8k", "main"), lambda row: [row["question"] + _BOXED]),
    "math500": Benchmark("math", 500, ("HuggingFaceH4/MATH-500",), lambda row: [row["problem"] + _BOXED]),
    "aime25": Benchmark("math", 30, ("math-ai/aime25",), lambda row: [row["problem"] + _BOXED]),
    "mbpp": Benchmark("code", 256, ("google-research-datasets/mbpp", "sanitized"), lambda row: [row["prompt"]]),
    "humaneval": Benchmark("code", 164, ("openai/openai_humaneval",), _humaneval),
    "livecodebench": Benchmark(
        "code", 500, ("json",), _livecodebench, files=[f"{_LCB}test{n}.jsonl" for n in ("", 2, 3, 4, 5, 6)]
    ),
    "mt-bench": Benchmark(
        "chat", 80, ("HuggingFaceH4/mt_bench_prompts",), lambda row: list(row["prompt"]), split="train"
    ),
    "alpaca": Benchmark("chat", 500, ("tatsu-lab/alpaca",), _alpaca, split="train"),
    "arena-hard-v2": Benchmark("chat", 500, ("json",), lambda row: [row["prompt"]], files=_ARENA),
}
"""In the order of the columns of Table 1."""

_TABLE_1 = {
    "Qwen3-4B": {
        "Eagle3": (5.14, 4.62, 3.92, 3.69, 4.16, 3.77, 2.39, 2.26, 2.55),
        "DFlash": (5.40, 4.85, 4.15, 4.40, 4.74, 4.18, 3.07, 2.96, 2.83),
        "DSpark": (6.11, 5.70, 4.89, 5.13, 5.38, 4.86, 3.64, 3.54, 3.29),
    },
    "Qwen3-8B": {
        "Eagle3": (5.30, 4.77, 3.91, 3.96, 4.33, 4.17, 2.66, 2.54, 2.54),
        "DFlash": (5.33, 4.91, 4.07, 4.36, 4.64, 4.39, 3.11, 2.98, 2.81),
        "DSpark": (6.17, 5.78, 5.01, 5.16, 5.52, 5.17, 3.72, 3.58, 3.21),
    },
    "Qwen3-14B": {
        "Eagle3": (5.24, 4.60, 3.71, 3.81, 4.14, 4.01, 2.62, 2.47, 2.48),
        "DFlash": (5.41, 4.84, 3.98, 4.44, 4.59, 4.33, 3.10, 2.94, 2.72),
        "DSpark": (6.21, 5.74, 4.94, 5.26, 5.43, 5.02, 3.70, 3.58, 3.13),
    },
    "gemma-4-12B-it": {
        "Eagle3": (5.87, 5.46, 4.83, 4.72, 5.37, 4.16, 3.19, 3.06, 2.72),
        "DFlash": (5.45, 5.04, 4.22, 4.39, 4.95, 3.70, 2.98, 2.84, 2.59),
        "DSpark": (6.05, 5.78, 5.12, 5.11, 5.64, 4.51, 3.49, 3.35, 2.92),
    },
}
"""tau at temperature 1, 2048 new tokens, first turn, thinking off, everything verified, a column a benchmark."""


def domain(task: str) -> str:
    """math, code or chat; a task that is none of the nine is a domain of its own."""
    return BENCHMARKS[task].domain if task in BENCHMARKS else task


def published(target: str, task: str) -> dict[str, float] | None:
    """tau of the paper's drafters on this target (hub id or directory) and task; None where it has no such row."""
    names = "|".join(map(re.escape, _TABLE_1))
    found = re.search(rf"(?:^|/|--)({names})(?:/|$)", target, re.IGNORECASE)
    if found is None or task not in BENCHMARKS:
        return None
    model = next(name for name in _TABLE_1 if name.lower() == found[1].lower())
    column = list(BENCHMARKS).index(task)
    return {drafter: taus[column] for drafter, taus in _TABLE_1[model].items()}
