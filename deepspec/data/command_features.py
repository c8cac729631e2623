"""The command `python -m deepspec.data features`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..checked import InputError
from ..cli import number


def add_features(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser(
        "features", help="compute a feature cache for a config's rows; run again, or twice at once, to go on"
    )
    p.set_defaults(run=features)
    add_config(p)
    p.add_argument("--out", type=Path, help="directory of the cache (default: data.features of the config)")
    p.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32", "int8"])
    p.add_argument("--shard-mb", type=number(0, above=True), default=512, help="size of a shard (default 512)")
    p.add_argument("--check", action="store_true", help="only read every byte of what is there")


def add_config(p: argparse.ArgumentParser) -> None:
    p.add_argument("--config", required=True, metavar="FILE.py", help="the config that will train on them")
    p.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="e.g. data.path=FILE")


def features(args: argparse.Namespace) -> None:
    """Make a cache, or read all of one."""
    from ..config import load_config
    from ..modeling.target import Target
    from .feature_build import build, check_place, look
    from .prompts import reasons
    from .training import read_rows

    config = load_config(args.config, *args.set)
    if args.out is None and config.data.features == "live":
        raise InputError("--out DIR is needed: data.features of the config names no directory")
    out = args.out or Path(config.data.features)
    if args.check:
        built = look(out, check=True)
    else:
        rows, dropped, identity = read_rows(config)
        print(f"{len(rows)} rows, {len(rows.tokens)} tokens; dropped: {reasons(dropped)}", flush=True)
        check_place(rows, identity, out, args.dtype)
        target = Target.load(
            config.target,
            device=config.train.device,
            dtype=config.train.target_dtype,
            revision=config.target_revision,
        )
        built = build(rows, target, identity, out, args.dtype, int(args.shard_mb * 1e6))
    shards, tokens = built.manifest.shards, sum(s.positions for s in built.manifest.shards)
    there = len(shards) - built.missing
    print(
        f"{out}: {there} of {len(shards)} shards, {built.bytes / 1e6:,.1f} MB of {built.manifest.dtype}, "
        f"{sum(s.rows for s in shards)} rows, {tokens} tokens"
        + ("" if built.missing else f", {built.bytes / tokens:,.0f} bytes a token")
        + f"; refused: {reasons(built.refused)}"
        + (", every byte read and right" if args.check else "")
    )
    if built.missing:
        note = "are being made by other processes, or were" if not args.check else "are missing"
        print(f"{built.missing} shards {note}; run the same command again when they have ended")
