"""The command `prompts` of `python -m deepspec.data`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..checked import InputError
from ..cli import whole
from .options import add_malformed, print_dropped

PERFECTBLEND = "mlabonne/open-perfectblend"


def add_prompts(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser(
        "prompts", help="prompts of data sets: each once, shuffled, no benchmark's, a part held out"
    )
    p.set_defaults(run=prompts)
    p.add_argument(
        "source",
        nargs="*",
        default=[PERFECTBLEND],
        help="JSONL, Parquet, org/name[:config][@revision] of the hub, or a benchmark's name",
    )
    p.add_argument(
        "--out", required=True, type=Path, help="JSONL file; X.jsonl's held-out prompts go to X.held-out.jsonl"
    )
    p.add_argument("--split", default="train", help="of data sets of the hub (default train)")
    p.add_argument("--limit", type=whole(1), help="this many prompts, of all sources together")
    p.add_argument("--seed", type=int, default=0, help="of the order")
    p.add_argument("--hold-out", type=float, default=0.05, metavar="FRACTION", help="(default 0.05)")
    p.add_argument(
        "--exclude",
        nargs="+",
        metavar="TASK",
        help="benchmarks or JSONL files whose prompts are left out, or none (default: all benchmarks)",
    )
    add_malformed(p)


def prompts(args: argparse.Namespace) -> None:
    """Gather prompts into a file to train on and one that is held out."""
    from ..eval.benchmarks import BENCHMARKS
    from .collect import Choice, collect_prompts, held_out_path
    from .overlap import Overlap

    choice = Choice(
        sources=tuple(args.source), split=args.split, limit=args.limit, hold_out=args.hold_out, seed=args.seed
    )
    names = list(BENCHMARKS) if args.exclude is None else [] if args.exclude == ["none"] else args.exclude
    manifest = collect_prompts(
        choice,
        args.out,
        exclude=Overlap(_benchmark_texts(names)),
        excluded=names,
        skip_malformed=args.malformed == "skip",
    )
    print(f"{args.out}: {manifest['prompts']} prompts; {held_out_path(args.out)}: {manifest['held_out']} held out")
    print_dropped(manifest["dropped"])


def _benchmark_texts(names: Sequence[str]) -> Iterator[str]:
    """The user turns of benchmarks and JSONL files."""
    from ..eval.tasks import find_tasks
    from .prompts import read_records
    from .records import conversation, layout, text_of

    for task in find_tasks(names) if names else ():
        for where, record in read_records(task.path):
            if layout(record) == "prompt_ids":
                raise InputError(f"{where}: token ids cannot be compared with prompts; --exclude needs texts")
            texts = record["turns"] if "turns" in record else map(text_of, conversation(record)[0])
            yield from texts
