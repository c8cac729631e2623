"""What every command line shares: one clear line and exit code 2 for bad input, 1 for a run that cannot go on, 130 for
Ctrl-C."""

import argparse
import contextlib
import math
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from .checked import InputError, RunError


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes are one line, as everywhere else, and whose help says the defaults."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see {self.prog} --help)")

    def add(self, name: str, *, help: str, default: Any = None, **more: Any) -> None:
        """Add an option."""
        shown = " ".join(map(str, default)) if isinstance(default, list) else default
        self.add_argument(name, default=default, help=help if default is None else f"{help} (default: {shown})", **more)


def whole(least: int) -> Callable[[str], int]:
    """The type of an option: a whole number, `least` or more."""

    def read(text: str) -> int:
        with contextlib.suppress(ValueError):
            if least <= int(text) < 2**63:
                return int(text)
        raise argparse.ArgumentTypeError(f"a whole number >= {least} is needed, got {text!r}")

    return read


def number(least: float, *, above: bool = False) -> Callable[[str], float]:
    """The type of an option: a finite number, `least` or more, or `above` it."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if least <= float(text) < math.inf and not (above and float(text) == least):
                return float(text)
        raise argparse.ArgumentTypeError(f"a number {'>' if above else '>='} {least:g} is needed, got {text!r}")

    return read


def main(command: Callable[[], int | None]) -> None:
    """Run `command` and exit with its code. An InputError or a missing file is one line on stderr and exit code 2,
    a RunError one line and exit code 1."""
    try:
        code = command() or 0
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # the reader of our output went away, as in `| head`
        sys.stderr.close()
        code = 1
    sys.exit(code)
