"""The command `answers` of `python -m deepspec.data`."""

from __future__ import annotations

import argparse
import itertools
import os
from collections import Counter
from pathlib import Path
from typing import Any

from ..checked import InputError
from ..cli import whole
from .options import add_malformed, add_thinking, print_dropped


def add_answers(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser(
        "answers", help="answers of the target, itself or through servers; run again to go on after a kill"
    )
    p.set_defaults(run=answers)
    p.add_argument("--target", required=True, help="directory, hub id, GGUF file or deepspec/tiny")
    p.add_argument("--revision", help="of a hub id")
    p.add_argument("--prompts", required=True, nargs="+", type=Path, metavar="FILE", help="JSONL files of prompts")
    p.add_argument("--out", required=True, type=Path, help="JSONL file of answers; its manifest is written beside it")
    p.add_argument("--max-new-tokens", type=whole(1), default=256)
    p.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default 0.7)")
    p.add_argument("--top-k", type=int, default=0, help="0 keeps all tokens (default)")
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--min-p", type=float, default=0.0)
    p.add_argument("--seed", type=int, default=0, help="of the sampling; the hold-out does not depend on it")
    p.add_argument("--concurrency", type=whole(1), default=32, help="answers in flight, at each server (default 32)")
    p.add_argument("--limit", type=whole(1), help="answer this many prompts, spread over all files")
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
    add_malformed(p)
    add_thinking(p)


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
    print_dropped(manifest["dropped"])
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
    text, tokenizer = config.get_text_config(), load_tokenizer(args.target, revision=args.revision)
    answering = Answering(
        target=args.target,
        revision=args.revision,
        dtype=None if args.dtype == "auto" else args.dtype,
        tokenizer=tokenizer,
        stop_ids=load_stop_ids(args.target, config, tokenizer, args.revision),
        vocab_size=text.vocab_size,
        max_positions=text.max_position_embeddings,
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
