"""`python -m deepspec.eval`: a target and its drafters on tasks, as tables, JSON, CSV, Markdown and an HTML page."""

from collections.abc import Sequence

from ..cli import Parser, main
from .options import add_run_options, eval_config, run_plan

# what needs torch is imported after the arguments are read, so that --help and a typing mistake answer at once


def parser() -> Parser:
    p = Parser(
        prog="python -m deepspec.eval",
        description="Measure drafters against the target's own decoding, on the same prompts.",
    )
    p.add("--drafter", nargs="+", action="extend", required=True, metavar="[NAME=]DIR", help="drafters")
    add_run_options(p, equality="all")
    p.add(
        "--schedule",
        nargs="+",
        default=["verify_all"],
        metavar="SCHEDULE",
        help="how much of a draft is verified: verify_all, threshold:X, throughput[:PROFILE] or lagged[:PROFILE] "
        "(the profile is made first where none is given); several are compared",
    )
    return p


def run(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)

    from .drafters import named
    from .run import evaluate_to_files

    config = eval_config(args, args.schedule)
    plan = run_plan(args, named(args.drafter), "deepspec.eval", arguments)
    evaluate_to_files(plan, config)


if __name__ == "__main__":
    main(run)
