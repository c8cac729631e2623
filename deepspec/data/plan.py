"""What the features of a data set would take, from a sample, before anything is spent: `python -m deepspec.data plan`.

Every k-th record of the files gives rows, tokens and supervised positions of all by proportion; the target computes
the features of some of these rows against a clock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from ..checked import InputError
from ..config import Config
from ..modeling.devices import dtype_name
from ..modeling.target import Target
from ..units import byte_size, duration
from .encoding import Stored, bytes_per_token
from .features import Live
from .rows import Rows
from .training import read_rows

STORED: tuple[Stored, ...] = ("float32", "bfloat16", "int8")


@dataclass(frozen=True)
class Extent:
    """How large a data set is, by proportion from a sample of its records."""

    records: int
    sampled: int
    rows: float
    tokens: float
    supervised: float
    """Share of the positions where the last hidden state is stored."""
    longest: int
    """Tokens of the longest row in the sample."""


def measure(config: Config, size: int) -> tuple[Rows, Extent]:
    """The rows of about `size` records spread over the files, and what they say of all. InputError as in training."""
    for path in config.data.path:
        if not Path(path).is_file():
            raise InputError(f"no data file {path!r}")
    counts = [_lines(path) for path in config.data.path]
    every = max(1, sum(counts) // size)
    rows, _, _ = read_rows(config, every)
    sampled = sum(-(-count // every) for count in counts)
    scale = sum(counts) / sampled
    supervised = sum(int(rows.supervising(i).sum()) for i in range(len(rows)))
    return rows, Extent(
        records=sum(counts),
        sampled=sampled,
        rows=len(rows) * scale,
        tokens=len(rows.tokens) * scale,
        supervised=supervised / len(rows.tokens),
        longest=int(rows.lengths.max()),
    )


def speed(config: Config, rows: Rows, seconds: float) -> tuple[float, str]:
    """Tokens a second of the target's features, over as many of the rows as fit into about so many seconds, and where:
    'cpu in bfloat16'."""
    train = config.train
    target = Target.load(config.target, device=train.device, dtype=train.target_dtype, revision=config.target_revision)
    live = Live(target, config.drafter.target_layer_ids, rows)
    live([0]).hidden.sum().item()  # the first pass pays for what happens once
    began, done, tokens = time.perf_counter(), 0, 0
    while done < len(rows) and time.perf_counter() - began < seconds:
        part = range(done, min(len(rows), done + max(1, train.micro_batch)))
        live(part).hidden.sum().item()  # waits for the device
        done, tokens = part.stop, tokens + int(rows.lengths[part.start : part.stop].sum())
    where = f"{target.device.type} in {dtype_name(target.dtype)}"
    return tokens / (time.perf_counter() - began), where


def storage(layers: int, dim: int, tokens: float, supervised: float, folder: Path) -> list[str]:
    """Lines: bytes of a cache in each dtype, and what the disk of `folder` has."""
    import shutil

    lines = []
    for stored in STORED:
        each = bytes_per_token(layers, dim, stored, supervised)
        lines.append(f"cache, {stored:<9} {byte_size(tokens * each):>10}  {each:,.0f} bytes a token")
    existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    return [*lines, f"free on disk      {byte_size(shutil.disk_usage(existing).free):>11}  at {existing}"]


def timing(config: Config, tokens: float, rate: float, where: str) -> list[str]:
    """Lines: time to compute these tokens' features once, and in every epoch."""
    epochs = config.train.epochs
    return [
        f"target            {rate:>11,.0f}  tokens a second on {where}",
        f"making a cache    {duration(tokens / rate):>11}  of one process; more of them divide it",
        f"live features     {duration(tokens / rate * epochs):>11}  in {epochs} epochs, beside the drafter's own work",
    ]


def _lines(path: str) -> int:
    with open(path, "rb") as file:
        return sum(1 for _ in file)
