"""metrics.jsonl of a run: one line each logged step, continued without a gap or a repetition after a kill."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..cache import write_text


class Log:
    """Appends to `path`; what an earlier run wrote after step `start` is forgotten."""

    def __init__(self, path: Path, start: int) -> None:
        self.path = path
        if path.exists():
            kept = []
            for line in path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # a kill may have torn the last one
                    kept += [line] if json.loads(line)["step"] <= start else []
            write_text(path, "".join(x + "\n" for x in kept))

    def write(self, row: Mapping[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:  # opened each time: nothing to close when a run ends
            file.write(json.dumps(row) + "\n")
