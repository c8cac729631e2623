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
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import deepspec
from deepspec import cli
from deepspec.cache import write_text
from deepspec.checked import InputError


@dataclass(frozen=True)
class Run:
    """One drafter to train."""

    name: str
    recipe: Path
    overrides: tuple[str, ...]
    sequences: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", nargs="+", type=Path, required=True, help="recipes of one target")
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sequences", nargs="+", type=int, default=[320], help="training sequences of a run")
    parser.add_argument("--epochs", type=int, default=1, help="of those sequences")
    parser.add_argument("--vary", nargs="+", default=[], metavar="NAME:KEY=VALUE[,...]", help="each recipe in each way")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="in every run")
    parser.add_argument("--prompts", type=int, default=60, help="held out and decoded")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", nargs="+", default=["0"])
    parser.add_argument("--dtype", default="bfloat16", help="of the target and the drafters when they are evaluated")
    args = parser.parse_args()

    rows, held_out = split(args.answers, args.prompts, max(args.sequences))
    todo = runs(args.config, args.vary, args.set, args.sequences)
    args.out.mkdir(parents=True, exist_ok=True)
    prompts = args.out / "prompts.jsonl"
    write_text(prompts, "".join(json.dumps({"id": r["id"], "prompt_ids": r["prompt_ids"]}) + "\n" for r in held_out))
    for size in args.sequences:
        write_text(args.out / f"train-{size}.jsonl", "".join(json.dumps(r) + "\n" for r in rows[:size]))
    targets = {train(run, args.out, args.epochs) for run in todo}
    if len(targets) != 1:
        raise InputError(f"--config: recipes of one target can be compared, not of {', '.join(sorted(targets))}")
    command = [
        sys.executable, "-m", "deepspec.eval", "--target", targets.pop(), "--tasks", str(prompts), "--limit",
        str(args.prompts), "--max-new-tokens", str(args.max_new_tokens), "--temperature", *args.temperature, "--dtype",
        args.dtype, "--out", str(args.out / "eval"), "--drafter", *(f"{r.name}={args.out / r.name}" for r in todo),
    ]  # fmt: skip
    raise SystemExit(subprocess.run(command).returncode)


def split(answers: Path, prompts: int, most: int) -> tuple[list[dict], list[dict]]:
    """Rows to train on and `prompts` rows held out, both in the order of a hash of their ids, which no file's order
    and no size of the training data changes."""
    if not answers.is_file():
        raise InputError(f"--answers: no file {str(answers)!r}")
    rows = [json.loads(line) for line in answers.read_text().splitlines() if line.strip()]
    rows.sort(key=lambda row: hashlib.sha256(str(row["id"]).encode()).digest())
    if len(rows) < prompts + most:
        raise InputError(f"{answers} holds {len(rows)} rows; {prompts} held out and {most} to train on are asked for")
    return rows[prompts:], rows[:prompts]


def runs(recipes: list[Path], vary: list[str], common: list[str], sizes: list[int]) -> list[Run]:
    """Every recipe in every way with every size, under a name that tells them apart."""
    ways: list[tuple[str, list[str]]] = []
    for text in vary or [""]:
        name, _, changes = text.partition(":")
        ways.append((name, [c for c in changes.split(",") if c]))
    found = []
    for recipe in recipes:
        for way, changes in ways:
            for size in sizes:
                parts = [recipe.parent.name, way, str(size) if len(sizes) > 1 else ""]
                found.append(Run("-".join(p for p in parts if p), recipe, (*common, *changes), size))
    if len({r.name for r in found}) < len(found):
        raise InputError(f"two runs would have one name: {', '.join(r.name for r in found)}")
    return found


def train(run: Run, out: Path, epochs: int) -> str:
    """Train one drafter, or go on with it, or find it finished; returns its target."""
    data, folder = out / f"train-{run.sequences}.jsonl", out / run.name
    settings = [*run.overrides, f'data.path=("{data}",)', f"out={folder}", f"train.epochs={epochs}"]
    config = deepspec.load_config(run.recipe, *settings)
    finished = folder / "drafter" / "config.json"
    if not finished.is_file():
        print(f"== {run.name}: {run.sequences} sequences", flush=True)
        command = [sys.executable, "-m", "deepspec.train", "--config", str(run.recipe), "--set", *settings]
        code = subprocess.run(command).returncode
        if code or not finished.is_file():  # stopped by Ctrl-C, it has saved what it did
            raise SystemExit(code or 130)
    return config.target


if __name__ == "__main__":
    cli.main(main)
