"""What every command line shares: one clear line and exit code 2 for bad input, 1 for a run that cannot go on, 130 for
Ctrl-C."""

import sys
from collections.abc import Callable

from .checked import InputError, RunError


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
