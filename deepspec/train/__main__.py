"""python -m deepspec.train --config config/dspark/tiny.py [--set train.lr=1e-4 ...] [--plan]

The same command under torchrun or accelerate launch trains on several processes.
"""

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from .. import cli


def command() -> int:
    parser = cli.Parser(prog="python -m deepspec.train", description="Train a drafter for a target model.")
    parser.add_argument("--config", metavar="FILE.py", help="a Python file that defines `config`")
    parser.add_argument(
        "--report", metavar="DIR", help="draw the curves of a run directory to DIR/curves.png, and stop"
    )
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="e.g. train.lr=1e-4")
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|PATH",
        help="go on from the newest checkpoint in `out` (auto), from a checkpoint's or run's folder, or start over",
    )
    parser.add_argument("--plan", action="store_true", help="say what the run would take, and stop; reads no weights")
    parser.add_argument("--target-config", metavar="FILE", help="--plan: the target's config.json, or its directory")
    parser.add_argument(
        "--tokens", type=cli.number(1), metavar="N", help="--plan: size of the data set (default: the paper's)"
    )
    args = parser.parse_args()

    if args.report is not None:
        from .curves import draw

        print(draw(Path(args.report)))
        return 0
    if args.config is None:
        parser.error("--config is required (or --report DIR)")
    if not args.plan and (args.tokens is not None or args.target_config is not None):
        parser.error("--tokens and --target-config are for --plan")

    from ..config import load_config

    config = load_config(args.config, *args.set)
    if args.plan:
        from .plan import TOKENS, plan, target_config

        print(plan(config, target_config(config, args.target_config), int(args.tokens or TOKENS)).text())
        return 0
    return _train(config, args.resume)


def _train(config: Any, resume: str) -> int:
    from tqdm import tqdm

    from .distributed import leave
    from .loop import fit

    main = int(os.environ.get("RANK", 0)) == 0  # the one process that speaks
    if main:
        kind = type(config.drafter).__name__.removesuffix("Config")
        print(f"training {kind} for {config.target} -> {config.out}", flush=True)
        logging.getLogger("deepspec").setLevel(logging.INFO)
    logging.getLogger("deepspec").addHandler(logging.StreamHandler(sys.stdout))
    told: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, frame: told.append(n))
    bar: Any = None
    report: Any = None
    for report in fit(config, resume=resume, stop=lambda: bool(told)):
        if not main:
            continue
        if bar is None:
            bar = tqdm(total=report.total_steps, initial=report.step - 1, unit="step", smoothing=0.1, file=sys.stdout)
        bar.update()
        if report.step % config.train.log_every == 0 or report.step == report.total_steps:
            m = report.metrics
            bar.set_postfix_str(
                f"loss {m.get('loss', float('nan')):.3f}, accept@0 {m.get('accept@0', float('nan')):.2f}, "
                f"tau {m.get('tau', float('nan')):.2f}, {report.tokens / report.seconds:.0f} tok/s"
            )
    leave()
    if bar is not None:
        bar.close()
    if main and told and (report is None or report.step < report.total_steps):
        print("stopped; what was done is saved, the same command goes on from it")
    elif main:
        print(f"drafter: {config.out / 'drafter'}")
    return 0


if __name__ == "__main__":
    cli.main(command)
