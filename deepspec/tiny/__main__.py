"""python -m deepspec.tiny"""

import json

from .. import cli
from . import ensure


def main() -> None:
    """Build where needed; print where it is and its figures."""
    parser = cli.Parser(prog="python -m deepspec.tiny", description="Build the embedded target, once.")
    parser.parse_args()
    path = ensure()
    facts = json.loads((path / "tiny.json").read_text(encoding="utf-8"))
    print(
        f"{path}\n{facts['parameters']:,} parameters, held-out loss {facts['loss']['held_out']}, "
        f"distinct 4-grams {facts['distinct_4gram_rate']}, trained in {facts['seconds']['train']} s"
    )


if __name__ == "__main__":
    cli.main(main)
