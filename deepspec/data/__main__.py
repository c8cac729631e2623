"""Command line of the data path: `python -m deepspec.data answers` and `python -m deepspec.data show`."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..checked import InputError
from ..cli import main

PERFECTBLEND = "mlabonne/open-perfectblend"


def command(argv: Sequence[str] | None = None) -> None:
    """Run one of the commands; argv without the program's name."""
    args = _parser().parse_args(argv)
    args.run(args)


def prompts(args: argparse.Namespace) -> None:
    """Gather prompts into a file to train on and one that is held out."""
    from .collect import Choice, collect_prompts, held_out_path
    from .overlap import Overlap

    choice = Choice(
        sources=tuple(args.source), split=args.split, limit=args.limit, hold_out=args.hold_out, seed=args.seed
    )
    names = [] if args.exclude == ["none"] else args.exclude
    manifest = collect_prompts(
        choice,
        args.out,
        exclude=Overlap(_benchmark_texts(names)),
        excluded=names,
        skip_malformed=args.malformed == "skip",
    )
    print(f"{args.out}: {manifest['prompts']} prompts; {held_out_path(args.out)}: {manifest['held_out']} held out")
    _report(manifest["dropped"])


def _benchmark_texts(names: Sequence[str]) -> Iterator[str]:
    """The user turns of benchmarks and JSONL files."""
    from ..eval.tasks import find_tasks
    from .chat import conversation, layout, text_of
    from .prompts import read_records

    for task in find_tasks(names) if names else ():
        for where, record in read_records(task.path):
            if layout(record) == "prompt_ids":
                raise InputError(f"{where}: token ids cannot be compared with prompts; --exclude needs texts")
            texts = record["turns"] if "turns" in record else map(text_of, conversation(record)[0])
            yield from texts


def _report(dropped: dict[str, int]) -> None:
    """A line per reason."""
    for reason, count in sorted(dropped.items(), key=lambda item: -item[1]):
        print(f"dropped {count}: {reason}")


def answers(args: argparse.Namespace) -> None:
    """Have the target answer, itself or through servers of it."""
    from ..sampling import Sampling
    from .answers_file import check_output

    if args.hold_out is not None and args.only is None:
        raise InputError("--hold-out needs --only train or --only held-out")
    if not args.server and (args.model or args.protocol or args.api_key_env):
        raise InputError("--model, --protocol and --api-key-env are for --server")
    sampling = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p)
    check_output(args.out)
    for path in args.prompts:
        if not path.is_file():
            raise InputError(f"no data file {str(path)!r}")
    dropped: Counter[str] = Counter()
    prompts = _prompts(args, dropped)
    if args.server:
        manifest = _collect(args, sampling, prompts, dropped)
    else:
        from ..modeling.target import Target
        from .answers import regenerate

        manifest = regenerate(
            Target.load(args.target, device=args.device, dtype=args.dtype, revision=args.revision),
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
        f"{args.out}: {manifest['answers']} answers of {manifest['tokens']} tokens, finish {manifest['finish']}, "
        f"refusals {manifest['refusals']}"
    )
    _report(manifest["dropped"])
    if manifest["drift"]:
        print(
            "tokenised again, for the server returns no ids: "
            + ", ".join(f"{k} {v}" for k, v in manifest["drift"].items())
        )


def _prompts(args: argparse.Namespace, dropped: Counter[str]) -> list[Any]:
    """The prompts that the arguments of `answers` choose."""
    from ..modeling.loading import load_tokenizer
    from .prompts import held_out, load_prompts, take, unique

    def tokenizer() -> object:
        return load_tokenizer(args.target, revision=args.revision)

    skip = args.malformed == "skip"
    found = (load_prompts(p, tokenizer, args.thinking, dropped=dropped, skip_malformed=skip) for p in args.prompts)
    prompts = unique(itertools.chain.from_iterable(found), dropped)
    if args.only:
        fraction = 0.1 if args.hold_out is None else args.hold_out
        prompts = [p for p in prompts if held_out(p.id, fraction) == (args.only == "held-out")]
        if not prompts:
            raise InputError(f"--only {args.only} --hold-out {fraction} leaves no prompt")
    return prompts if args.limit is None else take(prompts, args.limit)


def _collect(args: argparse.Namespace, sampling: Any, prompts: list[Any], dropped: Counter[str]) -> dict[str, Any]:
    """Answers from servers: of the target only tokenizer and config are read here."""
    from ..modeling.loading import load_config, load_stop_ids, load_tokenizer
    from .answers import Answering, collect

    key = None
    if args.api_key_env is not None:
        key = os.environ.get(args.api_key_env)
        if not key:
            raise InputError(f"--api-key-env: the environment has no {args.api_key_env}")
    config = load_config(args.target, args.revision)
    tokenizer = load_tokenizer(args.target, revision=args.revision)
    answering = Answering(
        target=args.target,
        revision=args.revision,
        dtype=None if args.dtype == "auto" else args.dtype,
        tokenizer=tokenizer,
        stop_ids=load_stop_ids(args.target, config, tokenizer, args.revision),
        vocab_size=config.get_text_config().vocab_size,
        max_new_tokens=args.max_new_tokens,
        sampling=sampling,
        seed=args.seed,
        thinking=args.thinking,
    )
    return collect(
        args.server,
        answering,
        prompts,
        args.out,
        concurrency=args.concurrency,
        model=args.model,
        protocol=args.protocol,
        key=key,
        dropped=dropped,
    )


def show(args: argparse.Namespace) -> None:
    """Print training rows with the supervised tokens marked."""
    from ..modeling.loading import load_tokenizer
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
        "prompts", help="prompts of data sets: each once, shuffled, no benchmark's, a part held out"
    )
    p.set_defaults(run=prompts)
    p.add_argument(
        "source", nargs="*", default=[PERFECTBLEND], help="JSONL, Parquet, or org/name[:config][@revision] of the hub"
    )
    p.add_argument(
        "--out", required=True, type=Path, help="JSONL file; X.jsonl's held-out prompts go to X.held-out.jsonl"
    )
    p.add_argument("--split", default="train", help="of data sets of the hub (default train)")
    p.add_argument("--limit", type=int, help="this many prompts, of all sources together")
    p.add_argument("--seed", type=int, default=0, help="of the order")
    p.add_argument("--hold-out", type=float, default=0.05, metavar="FRACTION", help="(default 0.05)")
    p.add_argument(
        "--exclude",
        nargs="+",
        default=["gsm8k", "math500", "humaneval"],
        metavar="TASK",
        help="benchmarks or JSONL files whose prompts are left out, or none (default: those the hub has)",
    )
    _malformed(p)

    p = commands.add_parser(
        "answers", help="answers of the target, itself or through servers; run again to go on after a kill"
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
    p.add_argument("--concurrency", type=int, default=32, help="answers in flight, at each server (default 32)")
    p.add_argument("--limit", type=int, help="answer this many prompts, spread over all files")
    p.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "bfloat16", "float16", "float32"],
        help="of servers: what they run in",
    )
    p.add_argument("--device", default="auto")
    p.add_argument("--hold-out", type=float, metavar="FRACTION", help="held-out part of the prompts (default 0.1)")
    p.add_argument("--only", choices=["train", "held-out"], help="answer one part only (default: all prompts)")
    p.add_argument(
        "--server", nargs="+", metavar="URL", help="vLLM, SGLang, transformers serve...: they answer instead"
    )
    p.add_argument("--model", help="the target's name at the servers (default: the only one they have)")
    p.add_argument(
        "--protocol", choices=["vllm", "sglang", "transformers", "completions", "chat"], help="(default: asked)"
    )
    p.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the servers' key")
    _malformed(p)
    _thinking(p)

    p = commands.add_parser("show", help="print training rows with the supervised tokens marked")
    p.set_defaults(run=show)
    p.add_argument("file", type=Path, help="JSONL file of conversations or token rows")
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--target", help="whose tokenizer and template to use")
    source.add_argument("--tokenizer", help="directory or hub id of a tokenizer")
    p.add_argument("-n", type=int, default=3, help="rows to print (default 3)")
    _thinking(p)
    return parser


def _malformed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--malformed",
        default="error",
        choices=["error", "skip"],
        help="a line that is no record: an error that names it (default), or counted and read over",
    )


def _thinking(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--thinking",
        default="auto",
        choices=["on", "off", "auto"],
        help="enable_thinking of the template; auto: not passed",
    )


if __name__ == "__main__":
    main(command)
