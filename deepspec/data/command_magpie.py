"""The command `magpie` of `python -m deepspec.data`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..cli import whole
from .options import print_dropped


def add_magpie(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser("magpie", help="prompts that the target itself writes, for those who have none")
    p.set_defaults(run=magpie)
    p.add_argument("--target", required=True, help="directory, hub id or GGUF file of a chat model")
    p.add_argument("--revision", help="of a hub id")
    p.add_argument("--number", type=whole(1), default=1000, help="user turns to write (default 1000)")
    p.add_argument("--out", required=True, type=Path, help="JSONL file; X.jsonl's tokens are kept in X.tokens.jsonl")
    p.add_argument("--max-new-tokens", type=whole(1), default=256, help="longer turns are left out (default 256)")
    p.add_argument("--temperature", type=float, default=1.0)
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--concurrency", type=whole(1), default=32, help="turns in flight (default 32)")
    p.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float16", "float32"])
    p.add_argument("--device", default="auto")


def magpie(args: argparse.Namespace) -> None:
    """Have the target write prompts."""
    from ..checked import InputError
    from ..modeling.target import Target
    from ..sampling import Sampling
    from .answers_file import check_output
    from .magpie import write_prompts

    if args.temperature == 0:
        raise InputError("--temperature must be > 0: greedy decoding writes the same prompt every time")
    sampling = Sampling(temperature=args.temperature, top_p=args.top_p)
    check_output(args.out)
    dropped = write_prompts(
        Target.load(args.target, device=args.device, dtype=args.dtype, revision=args.revision),
        args.number,
        args.out,
        max_new_tokens=args.max_new_tokens,
        sampling=sampling,
        seed=args.seed,
        concurrency=args.concurrency,
    )
    print(f"{args.out}: {args.number - dropped.total()} prompts")
    print_dropped(dropped)
