"""Command line of the data path: `python -m deepspec.data answers` and `python -m deepspec.data show`."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ..checked import InputError
from ..cli import main
from .command_features import add_features
from .command_plan import add_plan


def command(argv: Sequence[str] | None = None) -> None:
    """Run one of the commands; argv without the program's name."""
    args = _parser().parse_args(argv)
    args.run(args)


def answers(args: argparse.Namespace) -> None:
    """Regenerate answers with the target itself."""
    from ..sampling import Sampling
    from .answers import check_output, regenerate
    from .prompts import held_out, load_prompts, reasons, take, unique

    if args.hold_out is not None and args.only is None:
        raise InputError("--hold-out needs --only train or --only held-out")
    sampling = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p)
    check_output(args.out)
    for path in args.prompts:
        if not path.is_file():
            raise InputError(f"no data file {str(path)!r}")

    from ..modeling.target import Target, load_tokenizer

    dropped: Counter[str] = Counter()

    def tokenizer() -> object:
        return load_tokenizer(args.target, revision=args.revision)

    found = (load_prompts(path, tokenizer, args.thinking, dropped=dropped) for path in args.prompts)
    prompts = unique(itertools.chain.from_iterable(found), dropped)
    if args.only:
        fraction = 0.1 if args.hold_out is None else args.hold_out
        prompts = [p for p in prompts if held_out(p.id, fraction) == (args.only == "held-out")]
        if not prompts:
            raise InputError(f"--only {args.only} --hold-out {fraction} leaves no prompt")
    if args.limit is not None:
        prompts = take(prompts, args.limit)
    target = Target.load(args.target, device=args.device, dtype=args.dtype, revision=args.revision)
    manifest = regenerate(
        target,
        prompts,
        args.out,
        max_new_tokens=args.max_new_tokens,
        sampling=sampling,
        seed=args.seed,
        concurrency=args.concurrency,
        thinking=args.thinking,
        dropped=dropped,
    )
    print(
        f"{args.out}: {manifest['answers']} answers, finish {manifest['finish']}, prompts dropped: {reasons(dropped)}"
    )


def show(args: argparse.Namespace) -> None:
    """Print training rows with the supervised tokens marked."""
    from ..modeling.target import load_tokenizer
    from .chat import Skip, training_rows
    from .prompts import read_records

    tokenizer = load_tokenizer(args.tokenizer or args.target)
    if tokenizer is None:
        raise InputError(f"{args.target} has no tokenizer; name one with --tokenizer")
    opening, closing = ("\x1b[1;32m", "\x1b[0m") if sys.stdout.isatty() else ("[[", "]]")
    stop_ids = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    shown = 0
    for where, record in read_records(args.file):
        if shown >= args.n:
            break
        try:
            rows = training_rows(record, tokenizer, stop_ids, args.thinking)
        except Skip as skip:
            print(f"--- {where}: skipped: {skip}")
            continue
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        for row in rows[: args.n - shown]:
            shown += 1
            print(f"--- {where}, row {row.id}: {len(row.tokens)} tokens, {sum(row.loss_mask)} supervised")
            for supervised, group in itertools.groupby(zip(row.tokens, row.loss_mask), key=lambda pair: pair[1]):
                text = tokenizer.decode([token for token, _ in group], clean_up_tokenization_spaces=False)
                print(f"{opening}{text}{closing}" if supervised else text, end="")
            print()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deepspec.data", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")

    p = commands.add_parser(
        "answers", help="regenerate answers with the target itself; run again to go on after a kill"
    )
    p.set_defaults(run=answers)
    p.add_argument("--target", required=True, help="directory, hub id, GGUF file or deepspec/tiny")
    p.add_argument("--revision", help="of a hub id")
    p.add_argument("--prompts", required=True, nargs="+", type=Path, metavar="FILE", help="JSONL files of prompts")
    p.add_argument("--out", required=True, type=Path, help="JSONL file of answers; its manifest is written beside it")
    p.add_argument("--max-new-tokens", type=int, default=256)
    p.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default 0.7)")
    p.add_argument("--top-k", type=int, default=0, help="0 keeps all tokens (default)")
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--min-p", type=float, default=0.0)
    p.add_argument("--seed", type=int, default=0, help="of the sampling; the hold-out does not depend on it")
    p.add_argument("--concurrency", type=int, default=32, help="answers in flight (default 32)")
    p.add_argument("--limit", type=int, help="answer this many prompts, spread over all files")
    p.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float16", "float32"])
    p.add_argument("--device", default="auto")
    p.add_argument("--hold-out", type=float, metavar="FRACTION", help="held-out part of the prompts (default 0.1)")
    p.add_argument("--only", choices=["train", "held-out"], help="answer one part only (default: all prompts)")
    _thinking(p)

    add_features(commands)
    add_plan(commands)

    p = commands.add_parser("show", help="print training rows with the supervised tokens marked")
    p.set_defaults(run=show)
    p.add_argument("file", type=Path, help="JSONL file of conversations or token rows")
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--target", help="whose tokenizer and template to use")
    source.add_argument("--tokenizer", help="directory or hub id of a tokenizer")
    p.add_argument("-n", type=int, default=3, help="rows to print (default 3)")
    _thinking(p)
    return parser


def _thinking(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--thinking",
        default="auto",
        choices=["on", "off", "auto"],
        help="enable_thinking of the template; auto: not passed",
    )


if __name__ == "__main__":
    main(command)
