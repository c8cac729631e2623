"""Where prompts come from: JSONL and Parquet files, and data sets of the hub, in the layouts that people publish."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..checked import InputError
from .prompts import read_records
from .records import LAYOUTS, Malformed, Message

_ASKED = ("prompt", "question", "instruction", "problem", "query")
"""Keys that hold the one question of a record; an `input` is what an instruction is about, `system` what precedes."""


def count_records(source: str, split: str) -> int:
    """How many records a source has, without reading them one by one."""
    source = _file(source)
    if not Path(source).is_file():
        return len(_hub(source, split))
    if Path(source).suffix == ".parquet":
        return int(_parquet(source).metadata.num_rows)
    with open(source, "rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))


def read_source(source: str, split: str, skipped: Counter[str] | None = None) -> Iterator[tuple[str, Message]]:
    """The records of a file, of a benchmark by its name, or of the hub's data set 'org/name', 'org/name:config' or
    either with '@revision', each with where it stands. InputError where there is no such thing; `skipped` as in
    `read_records`."""
    source = _file(source)
    if Path(source).suffix == ".parquet" and Path(source).is_file():
        start = 0
        for batch in _parquet(source).iter_batches(batch_size=1000):
            for number, record in enumerate(batch.to_pylist(), start + 1):
                yield f"{source}, row {number}", _without_nulls(record)
            start += batch.num_rows
    elif Path(source).is_file():
        yield from read_records(source, skipped)
    else:
        for number, record in enumerate(_hub(source, split), 1):
            yield f"{source}, row {number}", _without_nulls(record)


def _file(source: str) -> str:
    """A benchmark's file, or `source` itself."""
    from ..eval.benchmarks import BENCHMARKS
    from ..eval.tasks import find_tasks  # here, because it imports this package

    return str(find_tasks([source])[0].path) if source in BENCHMARKS and not Path(source).exists() else source


def source_name(source: str) -> str:
    """What a source's prompts are called: the file's name without its ending, or the data set's."""
    if Path(source).is_file():
        return Path(source).stem
    return source.split("/")[-1].split(":")[0].split("@")[0]


def as_conversation(record: Message) -> Message:
    """`record` in a layout that `chat.conversation` reads. Malformed where it is in none that is known.

    Known besides those: `data` (UltraChat: texts of user and assistant in turns), `conversation` (messages, or pairs of
    human and assistant), and one question in `prompt`, `question`, `instruction` (with `input`), `problem` or `query`.
    """
    tools = {"tools": record["tools"]} if record.get("tools") is not None else {}
    for key in LAYOUTS:
        if record.get(key) is not None:
            return record
    texts = record.get("data")
    if isinstance(texts, list) and texts and all(isinstance(t, str) for t in texts):
        return {**tools, "messages": [_turn(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)]}
    turns = record.get("conversation", record.get("prompt"))
    if isinstance(turns, list) and all(isinstance(t, dict) for t in turns):
        if turns and all(turn.keys() >= {"human", "assistant"} for turn in turns):
            names = (("human", "user"), ("assistant", "assistant"))
            turns = [_turn(role, turn[name]) for turn in turns for name, role in names]
        return {**tools, "messages": turns}
    for key in _ASKED:
        if isinstance(record.get(key), str):
            about = record.get("input") if key == "instruction" else None
            system = record.get("system") or record.get("system_prompt")
            messages = [_turn("system", system)] if isinstance(system, str) else []
            return {**tools, "messages": [*messages, _turn("user", "\n\n".join(filter(None, (record[key], about))))]}
    known = (*LAYOUTS, "data", "conversation", *_ASKED)
    raise Malformed(f"none of the keys {', '.join(known)}", f"; it has: {', '.join(map(str, record)) or 'no keys'}")


def _turn(role: str, content: Any) -> Message:
    return {"role": role, "content": content}


def _without_nulls(value: Any) -> Any:
    """Tables give every object all keys that any object of the column has; a null says that it had none."""
    if isinstance(value, dict):
        return {key: _without_nulls(v) for key, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def _parquet(path: str) -> Any:
    import pyarrow.parquet  # slow to import
    from pyarrow import ArrowException

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise InputError(f"{path} is no Parquet file: {str(error).splitlines()[0]}") from None


def _hub(source: str, split: str) -> Any:
    found = re.fullmatch(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?(?:@([\w./-]+))?", source)
    if found is None or Path(source).suffix in (".jsonl", ".json", ".parquet"):
        raise InputError(f"no data file {source!r}, and a data set of the hub is called org/name[:config][@revision]")
    import datasets  # slow to import

    name, config, revision = found.groups()
    try:
        return datasets.load_dataset(name, config, split=split, revision=revision)
    except Exception as error:  # offline, renamed, gated, no such split: whatever it is, the way out is the same
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"data set {source!r}, split {split!r}, cannot be read: {reason}") from None
