"""The command `show` of `python -m deepspec.data`: training rows as a person reads them."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..checked import InputError
from ..cli import whole
from .options import add_malformed, add_thinking, print_dropped

PROMPT, SUPERVISED, BORDER, PLAIN = "\x1b[2m", "\x1b[1;32m", "\x1b[33m", "\x1b[0m"


def add_show(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser("show", help="print training rows with the supervised tokens marked")
    p.set_defaults(run=show)
    p.add_argument("file", type=Path, help="JSONL file of conversations or token rows")
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--target", help="whose tokenizer and template to use")
    source.add_argument("--tokenizer", help="directory or hub id of a tokenizer")
    p.add_argument("-n", type=whole(1), default=3, help="rows to print (default 3)")
    p.add_argument("--color", choices=["auto", "always", "never"], default="auto", help="auto: where it is a terminal")
    add_malformed(p)
    add_thinking(p)


def show(args: argparse.Namespace) -> None:
    """Print rows: the prompt dim, supervised tokens bright, their borders between [[ and ]]; what cannot be used is
    said, and counted at the end."""
    from ..modeling.loading import load_config, load_stop_ids, load_tokenizer
    from .chat import Row, training_rows
    from .prompts import counted, read_records

    tokenizer = load_tokenizer(args.tokenizer or args.target)
    if tokenizer is None:
        raise InputError(f"{args.tokenizer or args.target} has no tokenizer; name one with --tokenizer")
    stop_ids: tuple[int, ...] = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    if args.target:
        stop_ids = load_stop_ids(args.target, load_config(args.target), tokenizer)
    color = sys.stdout.isatty() if args.color == "auto" else args.color == "always"
    dropped: Counter[str] = Counter()
    skipped = dropped if args.malformed == "skip" else None
    shown = 0
    for where, record in read_records(args.file, skipped):
        if shown >= args.n:
            break
        rows: list[Row] = []
        here: Counter[str] = Counter()
        with counted(where, here, here if args.malformed == "skip" else None):
            rows = training_rows(record, tokenizer, stop_ids, args.thinking)
        for reason in here:
            print(f"--- {where}: skipped: {reason}")
        dropped.update(here)
        for row in rows[: args.n - shown]:
            shown += 1
            print(f"--- {where}, row {row.id}: {len(row.tokens)} tokens, {sum(row.loss_mask)} supervised")
            print("".join(_marked(row, tokenizer, color)))
    print_dropped(dropped)
    if not shown:
        raise InputError(f"{args.file} has no row to show")


def _marked(row: Any, tokenizer: Any, color: bool) -> Iterator[str]:
    for supervised, group in itertools.groupby(zip(row.tokens, row.loss_mask), key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in group], clean_up_tokenization_spaces=False)
        opening, closing = ("[[", "]]") if supervised else ("", "")
        if color:
            opening, closing = (f"{BORDER}{sign}{PLAIN}" if sign else "" for sign in (opening, closing))
            text = f"{SUPERVISED if supervised else PROMPT}{text}{PLAIN}"
        yield opening + text + closing
