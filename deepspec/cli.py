"""What every command line shares: one clear line and exit code 2 for bad input, 130 for Ctrl-C."""

import sys
from collections.abc import Callable

from .checked import InputError


def main(command: Callable[[], int | None]) -> None:
    """Run `command` and exit with its code. An InputError or a missing file is one line on stderr and exit code 2."""
    try:
        code = command() or 0
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # the reader of our output went away, as in `| head`
        sys.stderr.close()
        code = 1
    sys.exit(code)
