"""A JSONL file of answers with its manifest: one process at a time adds to it, a kill at any byte costs no answer."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from ..cache import tentative, writable_dir, write_text
from ..checked import InputError
from ..provenance import provenance
from .manifest import manifest_path, read_manifest
from .prompts import Prompt, parse_line

_REFUSAL = re.compile(
    r"\s*(?:<think>.*?</think>\s*)?(?:(?:i(?:'|’| a)m )?(?:very |really )?sorry\b|i apologi[sz]e|as an ai\b|"
    r"(?:unfortunately,? )?i (?:can(?:no|'|’)t|(?:a|')m (?:not able|unable)))",
    re.IGNORECASE | re.DOTALL,
)


def refuses(text: str) -> bool:
    """Whether an answer opens like a refusal, in English. A count of these says how much of a data set they fill."""
    return bool(_REFUSAL.match(text))


class AnswersFile:
    """The answers of one target under one set of settings. Made by `answers_file`.

    A row holds id, task, prompt_ids, answer_ids (stop id kept), finish, and where they apply `refusal` (true), `drift`
    (tokens that the server counted less those of the text tokenised again, null where it did not count) and
    `prompt_drift`.
    """

    def __init__(self, path: Path, settings: dict[str, Any], file: IO[bytes]) -> None:
        self.path, self.file = path, file
        self.done: set[str] = set()
        """Ids that have their answer."""
        self.servers: list[str] = []
        """Kinds of servers that answered; empty where the target itself did."""
        self.dropped: Counter[str] = Counter()
        self._settings, self._versions = settings, provenance()
        self._finish: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._drift: Counter[str] = Counter()

    def missing(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts that have no answer yet."""
        return [prompt for prompt in prompts if prompt.id not in self.done]

    def add(self, row: dict[str, Any]) -> None:
        """Write one row. A kill loses the answers in flight, no finished one."""
        self.file.write(json.dumps(row).encode() + b"\n")
        self.file.flush()
        self._count(row)

    def manifest(self) -> dict[str, Any]:
        """What the manifest file holds now."""
        found: dict[str, Any] = {"settings": self._settings, "answers": len(self.done)}
        found["finish"] = dict(sorted(self._finish.items()))
        found |= {name: self._counts[name] for name in ("tokens", "truncated", "refusals", "empty")}
        found |= {"drift": dict(self._drift) or None, "servers": sorted(set(self.servers))}
        return {**found, "dropped": dict(self.dropped), "versions": self._versions}

    def write_manifest(self) -> None:
        write_text(manifest_path(self.path), json.dumps(self.manifest(), indent=2) + "\n")

    def _count(self, row: dict[str, Any]) -> None:
        self.done.add(row["id"])
        self._finish[row["finish"]] += 1
        self._counts["tokens"] += len(row["answer_ids"])
        self._counts["truncated"] += row["finish"] == "length"
        self._counts["refusals"] += row.get("refusal", False)
        self._counts["empty"] += len(row["answer_ids"]) <= (row["finish"] == "stop")
        if "drift" in row:
            drift, prompt = row["drift"], row.get("prompt_drift")
            self._drift["retokenised"] += 1
            self._drift["not counted by the server"] += drift is None
            self._drift["answers of another length"] += bool(drift)
            self._drift["tokens"] += abs(drift or 0)
            self._drift["prompts of another length"] += bool(prompt)

    def read(self) -> None:
        """Count what the file holds, after cutting a last line that was killed while written."""
        end = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                where = f"{self.path}, line {number}"
                record = parse_line(line, where)
                if not {"id", "answer_ids", "finish"} <= record.keys():
                    raise InputError(f"{where}: not an answer (id, answer_ids, finish); use another --out")
                self._count(record)
                end += len(line)
        os.truncate(self.path, end)


@contextlib.contextmanager
def answers_file(path: str | Path, settings: dict[str, Any]) -> Iterator[AnswersFile]:
    """An AnswersFile to add to, new or continued; its manifest is written before the first answer and after the last.

    InputError where it cannot be written, where another process adds to it, where it is not ours, and where it was made
    with other settings. Without a single answer nothing is left behind.
    """
    path = Path(path)
    check_output(path)
    with tentative(path.parent):
        writable_dir(path.parent, "output directory")
        with path.open("ab") as file:
            _lock(path, file)
            answers = AnswersFile(path, json.loads(json.dumps(settings)), file)
            if os.fstat(file.fileno()).st_size:
                answers.servers = _same_settings(path, answers._settings)
                answers.read()
            try:
                answers.write_manifest()
                yield answers
            finally:
                if answers.done:
                    answers.write_manifest()
                elif os.fstat(file.fileno()).st_size == 0:
                    path.unlink(missing_ok=True)
                    manifest_path(path).unlink(missing_ok=True)


def check_output(path: str | Path) -> None:
    """InputError where an answers file cannot be written at `path`. Leaves nothing behind, not even a directory."""
    path = Path(path)
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    writable_dir(existing, "output directory")
    if path.exists():
        try:
            path.open("ab").close()
        except OSError as error:
            raise InputError(f"output {str(path)!r} cannot be written: {error.strerror}") from None


def _lock(path: Path, file: IO[bytes]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise InputError(f"{path}: another process is adding to it; wait for it, or use another --out") from None
    if os.fstat(file.fileno()).st_nlink == 0:  # that process ended without an answer, and took the file away
        raise InputError(f"{path}: another process has just removed it; run again")


def _same_settings(path: Path, new: dict[str, Any]) -> list[str]:
    """The servers that the manifest names; InputError where it was made with other settings than `new`."""
    manifest = read_manifest(path)
    if manifest is None:
        raise InputError(
            f"{path} exists but has no manifest {manifest_path(path).name}: it is not ours to add to; use another --out"
        )
    old = manifest["settings"]
    changed = [
        f"{key} is {json.dumps(old.get(key))} there and {json.dumps(new.get(key))} now"
        for key in sorted(old | new)
        if old.get(key) != new.get(key)
    ]
    if changed:
        raise InputError(f"{path} was made with other settings: {'; '.join(changed)}; use another --out")
    return list(manifest.get("servers", ()))
