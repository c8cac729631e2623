"""Train several recipes on the same answers, for as many sequences each, and evaluate them on prompts held out.

    python scripts/compare_drafters.py --config config/{dspark,dflash,eagle3}/smollm2_135m.py --answers ANSWERS.jsonl \\
        --sequences 320 --out runs/compare/smollm2

    python scripts/compare_drafters.py --config config/dspark/smollm2_135m.py --answers ANSWERS.jsonl \\
        --sequences 160 320 640 --vary random:train.init=random target:train.init=target --out runs/compare/init

ANSWERS.jsonl holds token rows (deepspec.data answers). The prompts whose ids hash lowest are held out from every run;
each size of training data is the first so many of the others. Finished runs are kept and interrupted ones go on: the
same command continues. OUT/eval holds the table (results.md), the numbers and the picture; --set changes all runs.
"""

import argparse
import hashlib
import itertools
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import deepspec
from deepspec import cli
from deepspec.cache import write_text
from deepspec.checked import InputError
from deepspec.cli import number, whole
from deepspec.data.prompts import read_records


@dataclass(frozen=True)
class Run:
    """One drafter to train."""

    name: str
    recipe: Path
    settings: tuple[str, ...]
    """Overrides of the recipe."""
    sequences: int
    target: str


def main() -> None:
    parser = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", nargs="+", type=Path, required=True, help="recipes of one target")
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sequences", nargs="+", type=whole(1), default=[320], help="training sequences of a run")
    parser.add_argument("--epochs", type=whole(1), default=1, help="of those sequences")
    parser.add_argument("--vary", nargs="+", default=[], metavar="NAME:KEY=VALUE[,...]", help="each recipe in each way")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="in every run")
    parser.add_argument("--prompts", type=whole(1), default=60, help="held out and decoded")
    parser.add_argument("--max-new-tokens", type=whole(1), default=64)
    parser.add_argument("--temperature", nargs="+", type=number(0), default=[0.0])
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="of the target and the drafters when they are evaluated",
    )
    args = parser.parse_args()

    todo = runs(args)
    rows, held_out = split(args.answers, args.prompts, max(args.sequences))
    args.out.mkdir(parents=True, exist_ok=True)
    prompts = args.out / "prompts.jsonl"
    write_text(prompts, "".join(json.dumps({"id": r["id"], "prompt_ids": r["prompt_ids"]}) + "\n" for r in held_out))
    for size in args.sequences:
        write_text(args.out / f"train-{size}.jsonl", "".join(json.dumps(r) + "\n" for r in rows[:size]))
    for run in todo:
        train(run, args.out / run.name)
    drafters = [f"{r.name}={args.out / r.name}" for r in todo]
    command = [
        sys.executable, "-m", "deepspec.eval", "--target", todo[0].target, "--tasks", str(prompts), "--limit",
        str(args.prompts), "--max-new-tokens", str(args.max_new_tokens), "--temperature", *map(str, args.temperature),
        "--dtype", args.dtype, "--out", str(args.out / "eval"), "--drafter", *drafters,
    ]  # fmt: skip
    raise SystemExit(subprocess.run(command).returncode)


def split(answers: Path, prompts: int, most: int) -> tuple[list[dict], list[dict]]:
    """Rows to train on and `prompts` rows held out, both in the order of a hash of their ids, which no file's order
    and no size of the training data changes."""
    rows = []
    for where, row in read_records(answers):
        if not {"id", "prompt_ids", "answer_ids"} <= row.keys():
            raise InputError(
                f"{where}: no answer (id, prompt_ids, answer_ids); python -m deepspec.data answers writes them"
            )
        rows.append(row)
    rows.sort(key=lambda row: hashlib.sha256(str(row["id"]).encode()).digest())
    if len(rows) < prompts + most:
        raise InputError(f"{answers} holds {len(rows)} rows; {prompts} held out and {most} to train on are asked for")
    return rows[prompts:], rows[:prompts]


def runs(args: argparse.Namespace) -> list[Run]:
    """Every recipe in every way with every size, under a name that tells them apart. InputError where one of them is
    not right, before the first is trained."""
    ways: list[tuple[str, list[str]]] = []
    for text in args.vary or [""]:
        name, _, changes = text.partition(":")
        ways.append((name, [c for c in changes.split(",") if c]))
    found = []
    for recipe, (way, changes), size in itertools.product(args.config, ways, args.sequences):
        name = "-".join(p for p in (recipe.parent.name, way, str(size) if len(args.sequences) > 1 else "") if p)
        here = (
            f'data.path=("{args.out / f"train-{size}.jsonl"}",)',
            f"out={args.out / name}",
            f"train.epochs={args.epochs}",
        )
        settings = (*args.set, *changes, *here)
        found.append(Run(name, recipe, settings, size, deepspec.load_config(recipe, *settings).target))
    if len({r.name for r in found}) < len(found):
        raise InputError(f"two runs would have one name: {', '.join(r.name for r in found)}")
    if len(targets := {r.target for r in found}) > 1:
        raise InputError(f"--config: recipes of one target can be compared, not of {', '.join(sorted(targets))}")
    return found


def train(run: Run, folder: Path) -> None:
    """Train one drafter, or go on with it, or find it finished."""
    finished = folder / "drafter" / "config.json"
    if not finished.is_file():
        print(f"== {run.name}: {run.sequences} sequences", flush=True)
        command = [sys.executable, "-m", "deepspec.train", "--config", str(run.recipe), "--set", *run.settings]
        code = subprocess.run(command).returncode
        if code or not finished.is_file():  # stopped by Ctrl-C, it has saved what it did
            raise SystemExit(code or 130)


if __name__ == "__main__":
    cli.main(main)
