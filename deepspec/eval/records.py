"""What is done already: a JSON line for each finished piece of work, in a file that a killed run goes on with.

Every process of a run has a file of its own and reads all of them, so it does not matter which process did what, how
many there were, or how often they were interrupted: results are formed from the records alone.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from ..cache import write_text
from ..checked import InputError
from ..data.prompts import parse_line

Row = dict[str, Any]
Key = tuple[Any, ...]
"""What a piece of work is: strings and numbers."""


class Records:
    """The records of one run, in a folder."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder = folder
        self._own = folder / f"{rank}.jsonl"
        self._finished, self._published = folder / "finished", folder / "published.json"
        self._found: dict[Key, Row] = {}
        self._read: dict[Path, int] = {}

    def begin(self, settings: Row, resume: bool) -> None:
        """Once a run, before any other call: go on with the run that is in the folder, or start a new one there.

        `settings` is what decides the results. InputError where an unfinished run would be lost, or where the one to go
        on with was made with other settings.
        """
        place = self.folder / "settings.json"
        settings = json.loads(json.dumps(settings))
        old = parse_line(place.read_bytes(), str(place)) if place.is_file() else None
        finished = self._finished.exists() or not any(p.stat().st_size for p in self._files())
        if old is None and self.folder.is_dir() and any(self.folder.iterdir()):
            raise InputError(f"{self.folder} is no folder of ours, and not ours to write in; use another --out")
        if old is not None and not finished and not resume:
            raise InputError(
                f"{self.folder.parent} holds an unfinished run; --resume goes on with it, and a new one needs another "
                f"--out, or {self.folder} removed"
            )
        changed = [] if old is None else [
            f"{k} is {_short(old.get(k))} there and {_short(settings.get(k))} now"
            for k in sorted(old | settings)
            if old.get(k) != settings.get(k)
        ]  # fmt: skip
        if changed and not finished:
            raise InputError(f"--resume: {self.folder.parent} holds a run of other settings: {'; '.join(changed)}")
        if not resume or changed:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self._files():
            _cut_torn_line(path)
        for mark in (self._finished, self._published):
            mark.unlink(missing_ok=True)
        write_text(place, json.dumps(settings) + "\n")

    @contextlib.contextmanager
    def turn_to_publish(self) -> Iterator[set[str]]:
        """One process at a time: gives the names that are published already, and remembers those added to them."""
        with FileLock(self.folder / "lock"):
            published = set(json.loads(self._published.read_text())) if self._published.is_file() else set()
            yield published
            write_text(self._published, json.dumps(sorted(published)))

    def finish(self) -> None:
        """Nothing is missing any more: the next run in this folder may start anew."""
        self._finished.touch()

    def abandon(self) -> None:
        """After a failure: leave no folder behind in which nothing was recorded."""
        if self.folder.is_dir() and not any(p.stat().st_size for p in self._files()):
            shutil.rmtree(self.folder)

    def refresh(self) -> None:
        """Take in what other processes have done since."""
        for path in self._files():
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # being written
                    row = parse_line(line, str(path))
                    self._found[_key(row.pop("key"))] = row
                    self._read[path] = self._read.get(path, 0) + len(line)

    def add(self, key: Key, row: Row) -> None:
        """Write a finished piece of work; it survives whatever happens next."""
        with self._own.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": list(key), **row}) + "\n")

    def missing(self, keys: Iterable[Key]) -> list[Key]:
        return [key for key in keys if key not in self._found]

    def __getitem__(self, key: Key) -> Row:
        return self._found[key]

    def _files(self) -> Iterator[Path]:
        yield from sorted(self.folder.glob("*.jsonl"))


def _key(value: list[Any]) -> Key:
    return tuple(value)


def _cut_torn_line(path: Path) -> None:
    """Remove a last line that was killed while it was written."""
    data = path.read_bytes()
    os.truncate(path, data.rfind(b"\n") + 1)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
