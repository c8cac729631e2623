"""The command `python -m deepspec.data plan`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..checked import InputError
from ..cli import number, whole
from .command_features import add_config


def add_plan(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser("plan", help="bytes, tokens and time of features, from a sample; writes nothing")
    p.set_defaults(run=plan)
    add_config(p)
    p.add_argument("--sample", type=whole(1), default=200, help="records to read (default 200)")
    p.add_argument("--seconds", type=number(0), default=10, help="how long to time the target; 0: not (default 10)")
    p.add_argument("--tokens", type=number(1), help="size of the data set (default: counted from the sample)")
    p.add_argument(
        "--target-config", metavar="FILE", help="the target's config.json: bytes of --tokens alone, no data or weights"
    )


def plan(args: argparse.Namespace) -> None:
    """Print what a cache and live features would take."""
    from ..config import load_config
    from ..modeling import loading
    from .plan import measure, speed, storage, timing

    config = load_config(args.config, *args.set)
    layers = len(config.drafter.target_layer_ids)
    if args.target_config:
        from ..train.plan import target_config

        if args.tokens is None:
            raise InputError("--target-config needs --tokens N: without the target's tokenizer none can be counted")
        dim = target_config(config, args.target_config).get_text_config().hidden_size
        print(f"{args.tokens:,.0f} tokens, each position supervised at most", flush=True)
        print("\n".join(storage(layers, dim, args.tokens, 1.0, Path())))
        return
    rows, extent = measure(config, args.sample)
    tokens = extent.tokens if args.tokens is None else args.tokens
    print(f"records           {extent.records:>11,}  of which {extent.sampled:,} were read")
    print(f"rows              {extent.rows:>11,.0f}  the longest read has {extent.longest:,} tokens")
    print(f"tokens            {tokens:>11,.0f}  {extent.supervised:.0%} of the positions supervise", flush=True)
    dim = loading.load_config(config.target, config.target_revision).get_text_config().hidden_size
    print("\n".join(storage(layers, dim, tokens, extent.supervised, Path(config.out))), flush=True)
    if args.seconds > 0:
        print("\n".join(timing(config, tokens, *speed(config, rows, args.seconds))))
