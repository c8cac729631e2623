"""Prompts of all sources, each once, shuffled, divided into two files: one to train on and one that is held out."""

from __future__ import annotations

import dataclasses
import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..cache import tentative, whole_file, writable_dir, write_text
from ..checked import InputError
from ..provenance import provenance
from .manifest import manifest_path, read_manifest
from .overlap import Overlap
from .prompts import counted, hash_id, held_out, reasons
from .records import Message, Skip, conversation, layout, record_id, text_of, to_answer, token_ids
from .sources import as_conversation, count_records, read_source, source_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """Which prompts of the sources are taken, and into which file."""

    sources: tuple[str, ...]
    split: str = "train"
    """Of the hub's data sets."""
    limit: int | None = None
    """Prompts in both files together: the first ones after shuffling, so that a larger limit adds to a smaller one."""
    hold_out: float = 0.05
    """Fraction that is held out, by a hash of the prompt: the two files are disjoint whatever else changes."""
    seed: int = 0
    """Of the order; what is held out does not depend on it."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise InputError(f"the limit must be >= 1, got {self.limit}")
        held_out("", self.hold_out)  # checks the fraction


def held_out_path(out: Path) -> Path:
    """Where the held-out prompts go: prompts.jsonl -> prompts.held-out.jsonl."""
    return out.with_name(f"{out.stem}.held-out{out.suffix}")


def collect_prompts(
    choice: Choice,
    out: Path,
    *,
    exclude: Overlap | None = None,
    excluded: Sequence[str] = (),
    skip_malformed: bool = False,
) -> dict[str, Any]:
    """Write the prompts to `out` and its `held_out_path`, one record a line: id (a hash of the content), task (the
    source), and messages (with tools) or prompt_ids.

    Dropped and counted: exact duplicates, prompts with a user turn in `exclude` (`excluded` names what it was made of),
    and records that are no prompt. Returns the manifest, which is written beside `out`. InputError where nothing is
    left, and where `out` is a file that this did not make.
    """
    for path in (out, held_out_path(out)):
        if path.exists() and read_manifest(out) is None:
            raise InputError(f"{path} exists and was not made by this command; use another --out")
    dropped: Counter[str] = Counter()
    with tentative(out.parent):
        writable_dir(out.parent, "output directory")
        # Whole data sets do not fit into memory: records wait in a file, their order and places are kept here.
        with tempfile.TemporaryFile(dir=out.parent) as spool:
            found: list[tuple[int, str, int]] = []
            seen: set[str] = set()
            for record in _prompts(choice, exclude or Overlap(()), dropped, skip_malformed):
                if record["id"] in seen:
                    dropped["duplicate"] += 1
                    continue
                seen.add(record["id"])
                found.append((hash_id(record["id"], f"order {choice.seed}"), record["id"], spool.tell()))
                spool.write(json.dumps(record).encode() + b"\n")
            if not found:
                raise InputError(f"no prompt in {', '.join(choice.sources)}; dropped: {reasons(dropped)}")
            found.sort()
            if choice.limit is not None and len(found) > choice.limit:
                dropped["beyond the limit"] = len(found) - choice.limit
            parts = Counter[bool]()
            with whole_file(out) as train, whole_file(held_out_path(out)) as held:
                for _, name, offset in found[: choice.limit]:
                    spool.seek(offset)
                    apart = held_out(name, choice.hold_out)
                    (held if apart else train).write(spool.readline().decode())
                    parts[apart] += 1
        manifest = {
            "settings": {**dataclasses.asdict(choice), "sources": list(choice.sources), "excluded": list(excluded)},
            "prompts": parts[False],
            "held_out": parts[True],
            "dropped": dict(dropped.most_common()),
            "versions": provenance(),
        }
        write_text(manifest_path(out), json.dumps(manifest, indent=2) + "\n")
    return manifest


def _prompts(choice: Choice, exclude: Overlap, dropped: Counter[str], skip_malformed: bool) -> Iterable[Message]:
    skipped = dropped if skip_malformed else None
    total = sum(count_records(source, choice.split) for source in choice.sources)
    with tqdm(total=total, unit="record", desc="prompts", disable=None) as bar:
        for source in choice.sources:
            for where, record in read_source(source, choice.split, skipped):
                bar.update()
                with counted(where, dropped, skipped):
                    yield _prompt(as_conversation(record), source_name(source), exclude)


def _prompt(record: Message, task: str, exclude: Overlap) -> Message:
    if layout(record) == "prompt_ids":
        ids = token_ids(record, "prompt_ids")
        return {"id": record_id({}, ids), "task": task, "prompt_ids": ids}
    messages, tools = conversation(record)
    messages = to_answer(messages)
    spoken = [message["role"] for message in messages if message["role"] != "system"]
    if not spoken:
        raise Skip("no user turn to answer")
    if spoken[0] == "assistant":
        raise Skip("starts with an assistant turn")
    if any(a == b == "user" for a, b in itertools.pairwise(spoken)):
        raise Skip("two user turns in a row")
    if any(text_of(message) in exclude for message in messages if message["role"] == "user"):
        raise Skip("a benchmark's prompt")
    found = {"id": record_id({}, [messages, tools]), "task": task, "messages": messages}
    return {**found, "tools": tools} if tools else found
