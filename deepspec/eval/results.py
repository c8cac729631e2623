"""The result rows of all tasks that are complete: a pure function of what is recorded."""

from collections.abc import Callable, Sequence
from typing import Any

from .evaluator import Work
from .figures import Row, Run, differences, equality, figures, head, timed_equality
from .settings import BASELINE, Contender
from .tasks import Task

Decode = Callable[[Sequence[int]], str]


def collect(work: Work, settings: Row, decode: Decode | None) -> tuple[list[Row], list[Row]]:
    """(result rows, generations) of every task of which nothing is missing, in the order of the tasks.

    `decode` turns token ids into text, special tokens included; None where the target has no tokenizer.
    """
    work.records.refresh()
    rows: list[Row] = []
    texts: list[Row] = []
    for task in work.tasks:
        if not work.records.missing(work.keys(task)):
            for temperature in work.config.temperatures:
                runs = _runs(work, task, temperature)
                rows += _rows(work, task, temperature, runs, settings, decode)
                texts += _texts(task, temperature, runs)
    return rows, texts


def _runs(work: Work, task: Task, temperature: float) -> dict[str, Run]:
    """Name -> what it did. The rotation of the turns does not matter here: units are in order for each contender."""
    runs = {contender.name: Run() for contender in work.contenders}
    for unit, contender, _, key in work.runs(task, temperature):
        runs[contender.name].add(unit.number, work.records[key])
    return runs


def _rows(
    work: Work, task: Task, temperature: float, runs: dict[str, Run], settings: Row, decode: Decode | None
) -> list[Row]:
    first = task.prompts[0].prompt_ids
    common = {
        **head(task.name, len(task.prompts), settings["target"]["name"]),
        "dropped": task.dropped,
        "later_turns": task.later_turns,
        "first_prompt": None if decode is None else decode(first),
    }
    drafted = [c for c in work.contenders if c.drafter is not None]
    others = {c.name: runs[c.name] for c in drafted}
    checked = [work.records[key]["samples"] for _, key in work.checks(task)]
    rows = []
    for contender in drafted:
        run, base = runs[contender.name], runs[BASELINE]
        rows.append(
            {
                **common,
                **_who(contender, temperature),
                **figures(run, base, settings["drafters"][contender.drafter]["slots"]),
                "turns": len(run.turns),
                "tau_differences": differences(contender.name, others),
                "greedy_equal": equality([sample for unit in checked for sample in unit[contender.name]]),
                "timed_greedy_equal": timed_equality(run, base, settings["dtype"]) if temperature == 0 else None,
                "settings": settings,
            }
        )
    return rows


def _who(contender: Contender, temperature: float) -> dict[str, Any]:
    return {
        "drafter": contender.name,
        "schedule": contender.schedule,
        "verify": contender.verify,
        "draft": contender.draft,
        "temperature": temperature,
    }


def _texts(task: Task, temperature: float, runs: dict[str, Run]) -> list[Row]:
    return [
        {"task": task.name, "id": task.prompts[number].id, "drafter": name, "temperature": temperature}
        | {"tokens": turn.tokens, "rounds": [list(r) for r in turn.rounds]}
        for name, run in runs.items()
        for number, turn in zip(run.sample, run.turns)
    ]
