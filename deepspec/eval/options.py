"""The options that `python -m deepspec.eval` and its studies share. Imports nothing heavy: --help answers at once."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..cli import Parser

if TYPE_CHECKING:
    from .run import Plan
    from .settings import EvalConfig


def add_run_options(p: Parser, *, equality: str) -> None:
    """What every run needs: tasks, output, how the target answers, where it runs. `equality`: that option's default."""
    p.add("--target", help="directory, hub id or GGUF file; by default the one named in the drafter's config.json")
    p.add(
        "--tasks",
        nargs="+",
        action="extend",
        required=True,
        metavar="A,B",
        help="JSONL of `turns`, or benchmarks of the paper",
    )
    p.add("--out", type=Path, required=True, help="directory for results.json, results.html and the rest")
    p.add_argument("--resume", action="store_true", help="go on with the run in --out: skip what is finished")
    p.add("--limit", type=int, help="prompts of each task, spread over it; all by default")
    p.add("--max-new-tokens", type=int, default=256, help="tokens a prompt")
    p.add("--temperature", type=float, nargs="+", default=[0.0], help="one run for each")
    p.add("--top-k", type=int, default=0, help="keep the k likeliest tokens; 0 keeps all")
    p.add("--top-p", type=float, default=1.0, help="keep the likeliest tokens of this mass")
    p.add("--min-p", type=float, default=0.0, help="drop tokens less likely than this times the likeliest")
    p.add("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto", help="of the timed runs")
    p.add("--device", default="auto", help="where the models run: auto, cpu, cuda, cuda:1, ...")
    p.add("--concurrency", type=int, default=1, help="requests in flight")
    p.add("--seed", type=int, default=0, help="prompt i is decoded with seed + i")
    p.add("--equality", default=equality, help="prompts of the losslessness check: a number, all, or 0 to skip")
    p.add("--thinking", choices=["on", "off", "auto"], default="auto", help="handed to the chat template")
    p.add("--turns", choices=["first", "all"], default="first", help="of a prompt; later ones follow its own answers")
    p.add("--verify", nargs="+", choices=["token", "block"], default=["token"], help="rule of verification, or both")
    p.add("--draft", nargs="+", choices=["sample", "greedy"], default=["sample"], help="draft tokens, or both ways")
    p.add_argument("--compile", action="store_true", help="torch.compile the rounds of target and block drafters")
    p.add("--repeats", type=int, default=1, help="how often each timing is taken")
    p.add("--warmup", type=int, default=2, help="prompts decoded before the timings")


def eval_config(args: argparse.Namespace, schedule: Sequence[str]) -> "EvalConfig":
    """The settings that the options of `add_run_options` say; InputError where one of them cannot be."""
    from .settings import EvalConfig

    return EvalConfig(
        max_new_tokens=args.max_new_tokens,
        temperatures=tuple(args.temperature),
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        schedule=tuple(schedule),
        concurrency=args.concurrency,
        seed=args.seed,
        limit=args.limit,
        equality=_equality(args.equality),
        repeats=args.repeats,
        warmup=args.warmup,
        verify=tuple(args.verify),
        draft=tuple(args.draft),
        thinking=args.thinking,
        turns=args.turns,
        compile=args.compile,
    )


def run_plan(
    args: argparse.Namespace, drafters: dict[str, str], module: str, arguments: Sequence[str] | None
) -> "Plan":
    """What the options of `add_run_options` say to evaluate: `drafters`, name -> directory. `module` and `arguments`
    (None: those of this process) are the command that the report names."""
    from .run import Plan

    return Plan(
        drafters=drafters,
        target=args.target,
        tasks=task_names(args),
        out=args.out,
        dtype=args.dtype,
        device=args.device,
        resume=args.resume,
        command=shlex.join(["python", "-m", module, *(arguments or sys.argv[1:])]),
    )


def task_names(args: argparse.Namespace) -> list[str]:
    """--tasks takes names apart by spaces and by commas."""
    return [name for group in args.tasks for name in group.split(",") if name]


def _equality(text: str) -> int | None:
    from ..checked import InputError

    if text == "all":
        return None
    if not text.isdecimal():
        raise InputError(f"--equality must be a number of prompts or all, got {text!r}")
    return int(text)
