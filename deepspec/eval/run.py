"""One evaluation, from names on a command line to files: what `python -m deepspec.eval` and the studies do."""

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from ..config import as_dict
from ..data.prompts import tokenizer_getter
from ..modeling.loading import load_tokenizer
from . import evaluator, plots, report
from .doubts import doubts
from .drafters import fingerprint, target_of
from .evaluator import Work, evaluate
from .output import output, write
from .profile import with_costs
from .records import Records
from .results import Row, collect
from .settings import EvalConfig
from .share import Share
from .tasks import find_tasks

PROGRESS = "progress"
"""Folder of the records in the output directory."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is evaluated, and where the results go."""

    drafters: dict[str, str]
    """Name -> directory."""
    target: str | None
    """None: the one that the drafters were trained for."""
    tasks: Sequence[str]
    out: Path
    dtype: str = "auto"
    """Of the timed runs."""
    device: str = "auto"
    resume: bool = False
    command: str
    """For the report."""


def evaluate_to_files(plan: Plan, config: EvalConfig) -> list[Row]:
    """Evaluate, write and print. Returns the rows that this process published last: all of them unless several
    processes share the work."""
    share = Share.from_environment()
    tasks = find_tasks(plan.tasks)
    target, revision = target_of(plan.drafters, plan.target)
    tokenizer = tokenizer_getter(functools.partial(load_tokenizer, target, revision=revision))
    records = Records(plan.out / PROGRESS, share.rank)
    rows: list[Row] = []
    with output(plan.out, records), Bar() as bar:
        tasks = [task.load(tokenizer, config.thinking, config.limit) for task in tasks]
        used = {"target": target, "target_revision": revision, "dtype": plan.dtype, "thinking": config.thinking}
        warnings = list(doubts(plan.drafters, tokenizer(), used))
        for line in warnings if share.rank == 0 else ():
            print(f"warning: {line}", file=sys.stderr)
        work = Work(tasks, config, config.contenders(list(plan.drafters)), records, share)
        decides = {
            **as_dict(config),
            "target": [target, revision],
            "dtype": plan.dtype,
            "drafters": {name: fingerprint(path) for name, path in plan.drafters.items()},
            "tasks": {task.name: task.fingerprint() for task in tasks},
        }
        share.first(lambda: records.begin(decides, plan.resume))
        device = share.device(plan.device)

        def load(dtype: str) -> evaluator.Models:
            models = evaluator.load_models(target, revision, plan.drafters, device, dtype)
            with FileLock(records.folder / "profile.lock"):  # all processes go by the same costs
                return with_costs(models, work, records.folder)

        for found in evaluate(load, plan.dtype, work, bar):
            settings = {
                **found,
                "paths": plan.drafters,
                "warnings": warnings,
                "processes": share.world,
                "command": plan.command,
            }
            rows = publish(plan.out, work, settings, tokenizer(), bar) or rows
    return rows


def publish(out: Path, work: Work, settings: Row, tokenizer: Any, bar: "Bar") -> list[Row]:
    """Write the results of every task that is complete, whoever did it, and print those that are new. Returns all rows,
    none where nothing is new."""
    with work.records.turn_to_publish() as published:
        rows, texts = collect(work, settings, None if tokenizer is None else tokenizer.decode)
        new = [r for r in rows if r["task"] not in published]
        if not new:
            return []
        pictures = write(out, rows, texts)
        bar.print(report.text(new))
        published |= {r["task"] for r in new}
        if published == {task.name for task in work.tasks}:
            work.records.finish()
            if not pictures:
                print(plots.MISSING, file=sys.stderr)
            overview = report.aligned(found) if (found := report.summary(rows)) else []
            bar.print("\n".join([*overview, report.LEGEND, f"written: {out}"]))
    return rows


class Bar:
    """A progress bar on stderr that appears when the work is known; called with how much of it is done and the total it
    gives what counts one more."""

    def __enter__(self) -> "Bar":
        self._bar: Any = None
        return self

    def __call__(self, done: int, total: int) -> Any:
        from tqdm import tqdm

        pause = 0.2 if sys.stderr.isatty() else 30.0  # a log file wants a line now and then
        self._bar = tqdm(
            initial=done, total=total, unit="prompt", desc="decoding", mininterval=pause, dynamic_ncols=True
        )
        return self._bar.update

    def print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        print(text, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
