"""`python -m deepspec.eval.studies STUDY`: one command, one table, one picture for each question of the paper.

acceptance  how often slot g is accepted, by domain                    (Figure 2)
depth       tau against the number of draft layers; trains each        (Figure 3)
length      tau against the length of the proposal; trains each        (Figure 4)
threshold   drafts accepted and rejected, by confidence threshold      (Figure 5)
"""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..cli import Parser, main
from .options import add_run_options, eval_config, run_plan, task_names

LEVELS = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
VARIED = {"depth": "num_draft_layers", "length": "block_size"}
"""What a sweep changes in the drafter's settings."""


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m deepspec.eval.studies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    studies = p.add_subparsers(dest="study", required=True, metavar="STUDY")
    for name in ("acceptance", "threshold"):
        s = studies.add_parser(name)
        s.add("--drafter", nargs="+", action="extend", required=True, metavar="[NAME=]DIR", help="drafters")
        if name == "threshold":
            s.add("--levels", nargs="+", type=float, default=LEVELS, help="thresholds on the conditional confidence")
        add_run_options(s, equality="0")
    for name, field in VARIED.items():
        s = studies.add_parser(name)
        s.add(
            "--config", nargs="+", required=True, metavar="[NAME=]FILE.py", help="recipes; one line each in the picture"
        )
        s.add("--values", nargs="+", type=int, required=True, help=f"drafter.{field} of the drafters to train")
        s.add("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="for all recipes")
        add_run_options(s, equality="0")
    return p


def run(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)

    from ..cache import write_text
    from . import plots
    from .drafters import named
    from .report import aligned, markdown_table
    from .run import evaluate_to_files
    from .share import Share
    from .study_views import view
    from .tasks import find_tasks

    schedule = [f"threshold:{x:g}" for x in args.levels] if args.study == "threshold" else ["verify_all"]
    config = eval_config(args, schedule)
    tasks = find_tasks(task_names(args))  # before anything is trained
    trained = train(args) if args.study in VARIED else []
    drafters = {t.name: str(t.path) for t in trained} if trained else named(args.drafter)
    plan = run_plan(args, drafters, "deepspec.eval.studies", arguments)
    rows = evaluate_to_files(plan, config)
    if Share.from_environment().world > 1 and {r["task"] for r in rows} != {task.name for task in tasks}:
        return  # another process has the last word
    table, figure = view(args.study, rows, {t.name: (t.recipe, t.value) for t in trained})
    write_text(args.out / f"{args.study}.md", markdown_table(table) + "\n")
    print("\n".join(aligned(table)))
    if figure is not None:
        plots.save(figure, args.out / f"{args.study}.png")
    print(f"written: {args.out / args.study}.md" + ("" if figure is None else " and .png"))


@dataclass(frozen=True)
class Trained:
    """A drafter of a sweep."""

    name: str
    recipe: str
    value: int
    path: Path


def train(args: Any) -> list[Trained]:
    """Train a drafter of every recipe with every value, each in its own directory; what is trained already stays."""
    from tqdm import tqdm

    from ..checked import InputError
    from ..config import load_config
    from ..train.loop import fit
    from .drafters import named
    from .share import Share

    if Share.from_environment().world > 1:
        raise InputError(f"{args.study} trains its drafters in one process; start it without torchrun")
    field, found = VARIED[args.study], []
    for recipe, path in named(args.config, "--config").items():
        for value in dict.fromkeys(args.values):
            out = args.out / "drafters" / f"{recipe.replace('/', '-')}-{field}-{value}"
            config = dataclasses.replace(load_config(path, f"drafter.{field}={value}", *args.set), out=out)
            found.append((config, Trained(f"{recipe} {value}", recipe, value, out / "drafter")))
    for config, drafter in found:  # all are known to be right before the first is trained
        steps = iter(fit(config))
        if (first := next(steps, None)) is not None:
            with tqdm(total=first.total_steps, initial=first.step, unit="step", desc=f"training {drafter.name}") as bar:
                for _ in steps:
                    bar.update()
    return [drafter for _, drafter in found]


if __name__ == "__main__":
    main(run)
