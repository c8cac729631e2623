"""`python -m deepspec.eval`: a target and its drafters on tasks, as tables, JSON, CSV, Markdown and an HTML page."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..cli import main

# what needs torch is imported after the arguments are read, so that --help and a typing mistake answer at once


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes are one line, as everywhere else."""

    def error(self, message: str) -> NoReturn:
        from ..checked import InputError

        raise InputError(f"{message} (see {self.prog} --help)")


def parser() -> Parser:
    p = Parser(
        prog="python -m deepspec.eval",
        description="Measure drafters against the target's own decoding, on the same prompts.",
    )

    def add(name: str, *, help: str, default: Any = None, **more: Any) -> None:
        p.add_argument(name, default=default, help=help if default is None else f"{help} (default: {default})", **more)

    add("--drafter", nargs="+", action="extend", required=True, metavar="[NAME=]DIR", help="drafters")
    add("--target", help="directory, hub id or GGUF file; by default the one named in the drafter's config.json")
    add(
        "--tasks",
        nargs="+",
        action="extend",
        required=True,
        metavar="A,B",
        help="JSONL of `turns`, or benchmarks of the paper",
    )
    add("--out", type=Path, required=True, help="directory for results.json, results.html and the rest")
    add("--resume", action="store_true", help="go on with the run in --out: skip what is finished")
    add("--limit", type=int, help="prompts of each task, spread over it; all by default")
    add("--max-new-tokens", type=int, default=256, help="tokens a prompt")
    add("--temperature", type=float, nargs="+", default=[0.0], help="one run for each")
    add("--top-k", type=int, default=0, help="keep the k likeliest tokens; 0 keeps all")
    add("--top-p", type=float, default=1.0, help="keep the likeliest tokens of this mass")
    add("--min-p", type=float, default=0.0, help="drop tokens less likely than this times the likeliest")
    add("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto", help="of the timed runs")
    add("--device", default="auto", help="where the models run: auto, cpu, cuda, cuda:1, ...")
    add("--concurrency", type=int, default=1, help="requests in flight")
    add(
        "--schedule",
        nargs="+",
        default=["verify_all"],
        help="how much of a draft is verified: verify_all or threshold:X; several are compared",
    )
    add("--seed", type=int, default=0, help="prompt i is decoded with seed + i")
    add("--equality", default="all", help="prompts of the losslessness check: a number, all, or 0 to skip")
    add("--thinking", choices=["on", "off", "auto"], default="auto", help="handed to the chat template")
    add(
        "--turns",
        choices=["first", "all"],
        default="first",
        help="turns of a prompt; later ones follow its own answers",
    )
    add("--repeats", type=int, default=1, help="how often each timing is taken")
    add("--warmup", type=int, default=2, help="prompts decoded before the timings")
    return p


def run(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)

    from .drafters import named
    from .run import Plan, evaluate_to_files
    from .settings import EvalConfig

    config = EvalConfig(
        max_new_tokens=args.max_new_tokens,
        temperatures=tuple(args.temperature),
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        schedule=tuple(args.schedule),
        concurrency=args.concurrency,
        seed=args.seed,
        limit=args.limit,
        equality=_equality(args.equality),
        repeats=args.repeats,
        warmup=args.warmup,
        thinking=args.thinking,
        turns=args.turns,
    )
    plan = Plan(
        drafters=named(args.drafter),
        target=args.target,
        tasks=[name for group in args.tasks for name in group.split(",") if name],
        out=args.out,
        dtype=args.dtype,
        device=args.device,
        resume=args.resume,
        command=shlex.join(["python", "-m", "deepspec.eval", *(arguments or sys.argv[1:])]),
    )
    evaluate_to_files(plan, config)


def _equality(text: str) -> int | None:
    from ..checked import InputError

    if text == "all":
        return None
    if not text.isdecimal():
        raise InputError(f"--equality must be a number of prompts or all, got {text!r}")
    return int(text)


if __name__ == "__main__":
    main(run)
