"""Command line of the data path: `python -m deepspec.data prompts`, `magpie`, `answers`, `show`, `features`, `plan`."""

from __future__ import annotations

from collections.abc import Sequence

from ..cli import Parser, main
from .command_answers import add_answers
from .command_features import add_features
from .command_magpie import add_magpie
from .command_plan import add_plan
from .command_prompts import add_prompts
from .command_show import add_show


def command(argv: Sequence[str] | None = None) -> None:
    """Run one of the commands; argv without the program's name."""
    parser = Parser(prog="python -m deepspec.data", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    for add in (add_prompts, add_magpie, add_answers, add_show, add_features, add_plan):
        add(commands)
    args = parser.parse_args(argv)
    args.run(args)


if __name__ == "__main__":
    main(command)
