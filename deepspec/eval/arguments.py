"""What the command lines of calibration, profiles and load share: arguments, models, prompts."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..cli import Parser, number, whole

if TYPE_CHECKING:
    from ..data.prompts import Prompt
    from ..modeling.drafter import Drafter
    from ..modeling.target import Target

# what needs torch is imported after the arguments are read, so that --help and a typing mistake answer at once


def add_models(p: Parser) -> None:
    """A target and its drafter, how they run, and where the results go."""
    p.add("--drafter", required=True, metavar="DIR", help="the drafter")
    p.add("--target", help="directory, hub id or GGUF file; by default the one named in the drafter's config.json")
    p.add("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto", help="of both models")
    p.add("--device", default="auto", help="where the models run: auto, cpu, cuda, cuda:1, ...")
    p.add("--out", type=Path, required=True, help="directory for what is written")
    p.add("--seed", type=whole(0), default=0, help="of prompts, draws and orders")
    p.add(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: own CPU seconds, where others share the machine"
    )
    p.add("--temperature", type=number(0), default=1.0, help="of sampling; 0 is greedy")


def whole_numbers(text: str) -> tuple[int, ...]:
    """'1,4,16' -> (1, 4, 16), ascending; the type of an argument."""
    try:
        found = tuple(sorted({int(n) for n in text.split(",")}))
    except ValueError:
        raise argparse.ArgumentTypeError(f"numbers with commas between them are needed, got {text!r}") from None
    if found[0] < 1:
        raise argparse.ArgumentTypeError(f"numbers >= 1 are needed, got {text!r}")
    return found


def check_prompts(path: Path) -> None:
    """InputError for a file that is missing, or has a line that is no record, before a model is loaded."""
    from ..data.prompts import read_records

    for _ in read_records(path):
        pass


def load_models(args: argparse.Namespace) -> "tuple[Target, Drafter]":
    """The target and the drafter that the arguments name."""
    from ..hub import load_drafter
    from ..modeling.target import Target
    from .drafters import target_of

    name, revision = target_of({"drafter": args.drafter}, args.target)
    target = Target.load(name, device=args.device, dtype=args.dtype, revision=revision)
    return target, load_drafter(args.drafter, target)


def load_prompts(path: Path, target: "Target", new_tokens: int) -> "list[Prompt]":
    """The prompts of a JSONL file that leave room for `new_tokens`; InputError where none does."""
    from ..checked import InputError
    from ..data.prompts import load_prompts

    most = target.spec.max_positions - new_tokens
    prompts = [p for p in load_prompts(path, target.tokenizer) if len(p.prompt_ids) <= most]
    if not prompts:
        raise InputError(f"{path}: no prompt has at most {most} tokens, what is left beside {new_tokens} new ones")
    return prompts
