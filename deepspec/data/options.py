"""What the commands of `python -m deepspec.data` share."""

from __future__ import annotations

import argparse
from collections.abc import Mapping


def add_malformed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--malformed",
        default="error",
        choices=["error", "skip"],
        help="a line that is no record: an error that names it (default), or counted and read over",
    )


def add_thinking(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--thinking",
        default="auto",
        choices=["on", "off", "auto"],
        help="enable_thinking of the template; auto: not passed",
    )


def print_dropped(dropped: Mapping[str, int]) -> None:
    """A line per reason, the most frequent first."""
    for reason, count in sorted(dropped.items(), key=lambda item: -item[1]):
        print(f"dropped {count}: {reason}")
