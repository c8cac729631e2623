"""`python -m deepspec.eval`: a target and its drafters on tasks, as a table, results.json, Markdown and a picture."""

import argparse
import contextlib
import functools
import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
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
    add("--tasks", nargs="+", action="extend", required=True, metavar="A,B", help="JSONL of `turns`, or benchmarks")
    add("--out", type=Path, required=True, help="directory for results.json, results.md and the rest")
    add("--limit", type=int, help="prompts of each task, spread over it; all by default")
    add("--max-new-tokens", type=int, default=256, help="tokens a prompt")
    add("--temperature", type=float, nargs="+", default=[0.0], help="one run for each")
    add("--top-k", type=int, default=0, help="keep the k likeliest tokens; 0 keeps all")
    add("--top-p", type=float, default=1.0, help="keep the likeliest tokens of this mass")
    add("--min-p", type=float, default=0.0, help="drop tokens less likely than this times the likeliest")
    add("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto", help="of the timed runs")
    add("--device", default="auto", help="where the models run: auto, cpu, cuda, cuda:1, ...")
    add("--concurrency", type=int, default=1, help="requests in flight")
    add("--schedule", default="verify_all", help="how much of a draft is verified: verify_all or threshold:X")
    add("--seed", type=int, default=0, help="prompt i is decoded with seed + i")
    add("--equality", default="all", help="prompts of the losslessness check: a number, all, or 0 to skip")
    add("--thinking", choices=["on", "off", "auto"], default="auto", help="handed to the chat template")
    add("--repeats", type=int, default=1, help="how often each timing is taken")
    add("--warmup", type=int, default=2, help="prompts decoded before the timings")
    return p


def run(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)

    from ..modeling.loading import load_tokenizer
    from . import plots, report
    from .evaluator import EvalConfig, evaluate, load_models
    from .tasks import find_tasks

    config = EvalConfig(
        max_new_tokens=args.max_new_tokens,
        temperatures=tuple(args.temperature),
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        schedule=args.schedule,
        concurrency=args.concurrency,
        seed=args.seed,
        limit=args.limit,
        equality=_equality(args.equality),
        repeats=args.repeats,
        warmup=args.warmup,
        thinking=args.thinking,
    )
    tasks = find_tasks([name for group in args.tasks for name in group.split(",") if name])
    drafters = named(args.drafter)
    target, revision = target_of(drafters, args.target)
    with output(args.out), Bar() as bar:
        tokenizer = functools.partial(load_tokenizer, target, revision=revision)
        tasks = [task.load(tokenizer, config.thinking, config.limit) for task in tasks]
        rows: list[dict[str, Any]] = []
        texts: list[dict[str, Any]] = []
        finished = evaluate(
            lambda dtype: load_models(target, revision, drafters, args.device, dtype),
            args.dtype,
            tasks,
            config,
            bar,
            {"paths": drafters, "command": shlex.join(["python", "-m", "deepspec.eval", *(arguments or sys.argv[1:])])},
        )
        for new_rows, new_texts in finished:
            rows += new_rows
            texts += new_texts
            pictures = write(args.out, rows, texts)
            bar.print(report.text(new_rows))
    if not pictures:
        print(plots.MISSING, file=sys.stderr)
    print(report.LEGEND)
    print(f"written: {args.out}")


def named(drafters: Sequence[str]) -> dict[str, str]:
    """[NAME=]DIR -> {name: dir}. A name that is not given is the end of the path, as much as tells them apart; of
    RUN/drafter the last part says nothing and is left out."""
    from ..checked import InputError

    pairs = [_split(text) for text in drafters]
    names = [n for n, _ in pairs if n is not None]
    whole = [Path(path).absolute() for n, path in pairs if n is None]
    ends = [(p.parent if p.name == "drafter" else p).parts for p in whole]
    for length in range(1, max(map(len, ends), default=0) + 1):
        short = ["/".join(e[-length:]) for e in ends]
        if len({*names, *short}) == len(pairs):
            break
    else:
        short = []
    unnamed = iter(short)
    result = {(n if n is not None else next(unnamed, "")): path for n, path in pairs}
    if len(result) != len(pairs):
        raise InputError(
            f"--drafter: the same name or directory twice: {', '.join(drafters)}; tell them apart by NAME=DIR"
        )
    if "baseline" in result:
        raise InputError("--drafter: the name 'baseline' is taken by the target itself; use another NAME=DIR")
    return result


def _split(text: str) -> tuple[str | None, str]:
    name, sign, path = text.partition("=")
    if sign and path and re.fullmatch(r"[\w.+-]+", name) and not Path(text).exists():
        return name, path
    return None, text


def target_of(drafters: dict[str, str], given: str | None) -> tuple[str, str | None]:
    """(name or path, revision) of the target: `given`, or the one that every drafter's config.json names."""
    from ..checked import InputError
    from ..hub.files import find_drafter, read_config

    trained: dict[str, str | None] = {}
    for path in drafters.values():
        folder = find_drafter(path)
        section = read_config(folder).get("deepspec")
        target = section.get("target") if isinstance(section, dict) else None
        if isinstance(target, dict) and isinstance(target.get("name"), str):
            trained[target["name"]] = target.get("revision")
        elif given is None:
            raise InputError(f"{folder / 'config.json'} does not name the target the drafter is for; pass --target")
    if given is not None:
        return given, trained.get(given)
    if len(trained) > 1:
        raise InputError(
            f"the drafters are for different targets ({', '.join(trained)}); pass --target or run them apart"
        )
    return next(iter(trained.items()))


@contextlib.contextmanager
def output(path: Path) -> Iterator[None]:
    """A directory proven writable; a failure takes away what was made and is still empty."""
    from ..cache import writable_dir

    made = [p for p in (path, *path.parents) if not p.exists()]  # the innermost first
    try:
        writable_dir(path, "--out")
        yield
    except BaseException:
        for directory in made:
            with contextlib.suppress(OSError):  # not empty, or never made
                directory.rmdir()
        raise


def write(out: Path, rows: list[dict[str, Any]], texts: list[dict[str, Any]]) -> list[str]:
    """All files, each whole or not at all, results.json last. Returns the names of the pictures."""
    from ..cache import write_text
    from . import plots, report

    pictures = ["acceptance.png"] if plots.acceptance_by_slot(rows, out / "acceptance.png") else []
    write_text(out / "generations.jsonl", "".join(json.dumps(t) + "\n" for t in texts))
    write_text(out / "results.md", report.markdown(rows, pictures))
    write_text(out / "results.json", json.dumps(rows, indent=1, allow_nan=False) + "\n")
    return pictures


def _equality(text: str) -> int | None:
    from ..checked import InputError

    if text == "all":
        return None
    if not text.isdecimal():
        raise InputError(f"--equality must be a number of prompts or all, got {text!r}")
    return int(text)


class Bar:
    """A progress bar on stderr that appears when the work is known; called with the total it gives what counts one."""

    def __enter__(self) -> "Bar":
        self._bar: Any = None
        return self

    def __call__(self, total: int) -> Any:
        from tqdm import tqdm

        pause = 0.2 if sys.stderr.isatty() else 30.0  # a log file wants a line now and then
        self._bar = tqdm(total=total, unit="prompt", desc="decoding", mininterval=pause, dynamic_ncols=True)
        return self._bar.update

    def print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        print(text, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


if __name__ == "__main__":
    main(run)
