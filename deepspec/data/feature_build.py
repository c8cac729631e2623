"""Making a feature cache: shard by shard, by any number of processes at once, resumable after a kill at any byte.

A process claims a shard with a lock that the system drops when the process ends, writes it under a hidden name, and
renames it when it is whole on disk. So what stands under a shard's name is finished, and the rest is done by whoever
comes next.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from ..cache import writable_dir, write_text
from ..checked import InputError
from ..modeling.devices import dtype_name
from ..modeling.target import Target
from ..provenance import provenance
from .encoding import Stored, bytes_per_token, crc, encode_row, fingerprint
from .feature_cache import (
    INDEX,
    Manifest,
    OpenShard,
    Shard,
    differences,
    read_manifest,
    shard_name,
)
from .features import FAULTS, Live, groups
from .rows import Rows

PASS_TOKENS = 8192
"""Positions asked for at once. Groups follow the order of a shard's rows, so a shard is the same whoever makes it."""


@dataclass(frozen=True)
class Built:
    """What stands in a cache directory after a process has done its part."""

    manifest: Manifest
    missing: int
    """Shards that other processes are still making."""
    refused: Counter[str]
    """Rows without features, by fault."""
    bytes: int


def check_place(rows: Rows, settings: dict[str, Any], folder: str | Path, stored: Stored) -> Path:
    """The directory, made where it was not. InputError where it holds something else, or a cache of other rows,
    settings or dtype. Costs little, so that it may come before the target's weights."""
    folder = writable_dir(Path(folder), "feature cache")
    if (folder / "manifest.json").exists():
        old = read_manifest(folder)
        changed = differences(
            {**old.settings, "dtype": old.dtype, "rows": old.rows},
            {**settings, "dtype": stored, "rows": rows.digest()},
        )
        if changed:
            raise InputError(f"{folder} was made with other settings: {changed}; use another --out")
        return folder
    foreign = [p.name for p in folder.iterdir() if not p.name.startswith((".manifest.json-", ".writable-"))]
    if foreign and not (folder / "manifest.json").exists():  # by now another process may have begun the cache
        raise InputError(f"{folder} is not empty ({foreign[0]!r}) and no feature cache; use another --out")
    return folder


def build(
    rows: Rows, target: Target, settings: dict[str, Any], folder: str | Path, stored: Stored, shard_bytes: int
) -> Built:
    """Write what is missing of a cache of these rows. settings: what the features depend on, target_layer_ids among it.

    InputError as in `check_place`, where there is too little room, and where a cache was begun by a target in another
    dtype.
    """
    settings = {**settings, "weights": fingerprint(target.vocab)}
    folder = check_place(rows, settings, folder, stored)
    manifest = _manifest(rows, target, settings, folder, stored, shard_bytes)
    live = Live(target, settings["target_layer_ids"], rows)
    firsts = np.concatenate([[0], np.cumsum([s.rows for s in manifest.shards])]).tolist()
    done = [(folder / shard_name(n)).exists() for n in range(len(manifest.shards))]
    finished = sum(s.positions for s, there in zip(manifest.shards, done) if there)
    total = sum(s.positions for s in manifest.shards)
    here = dtype_name(target.dtype)
    if not all(done) and manifest.log_z not in (None, here):
        raise InputError(
            f"{folder} was begun with a target in {manifest.log_z} and this one is in {here}; go on with "
            f"train.target_dtype={manifest.log_z}, or use another --out"
        )
    _room(folder, manifest, 1 - finished / total)
    with tqdm(total=total, initial=finished, unit="tok", unit_scale=True, desc="features", disable=None) as bar:
        for n, shard in enumerate(manifest.shards):
            if done[n]:
                continue
            with _claim(folder, n) as mine:
                if mine and not (folder / shard_name(n)).exists():
                    _write(live, manifest, n, range(firsts[n], firsts[n + 1]), folder, bar)
                else:
                    bar.update(shard.positions)  # another process has it
    return look(folder)


def look(folder: Path, *, check: bool = False) -> Built:
    """What stands in a cache directory; every finished shard is opened, and `check` reads all of its rows. InputError
    names the first damaged one."""
    manifest, refused, size, missing = read_manifest(folder), Counter[str](), 0, 0
    for n in range(len(manifest.shards)):
        path = folder / shard_name(n)
        if not path.exists():
            missing += 1
            continue
        shard = OpenShard(folder, manifest, n)
        size += path.stat().st_size
        for i, fault in enumerate(shard.index["fault"].tolist()):
            if fault >= 0:
                refused[FAULTS[fault]] += 1
            elif check:
                shard.row(i, True)
    return Built(manifest, missing, refused, size)


def _manifest(
    rows: Rows, target: Target, settings: dict[str, Any], folder: Path, stored: Stored, shard_bytes: int
) -> Manifest:
    """The one in the directory, or a new one. Equal in every process, so it does not matter which of them writes it."""
    if (folder / "manifest.json").exists():
        return read_manifest(folder)
    dim, layers = target.vocab.dim, len(settings["target_layer_ids"])
    shards, supervised = [], np.array([int(rows.supervising(i).sum()) for i in range(len(rows))])
    limit = max(1, int(shard_bytes / bytes_per_token(layers, dim, stored)))
    number = rows.starts[:-1] // limit  # a row belongs to the shard in which its first token falls
    for n in np.unique(number):
        mine = number == n
        shards.append(Shard(int(mine.sum()), int(rows.lengths[mine].sum()), int(supervised[mine].sum())))
    here = dtype_name(target.dtype)
    made_by = {"dtype": here, "versions": provenance()}
    manifest = Manifest(settings, stored, dim, rows.digest(), tuple(shards), made_by, log_z=here)
    write_text(folder / "manifest.json", manifest.text())
    return read_manifest(folder)


@contextlib.contextmanager
def _claim(folder: Path, number: int) -> Iterator[bool]:
    """Whether this process, and no other, may write the shard until the block ends."""
    path = folder / f".{shard_name(number)}.lock"
    handle = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
        # who opened the file before it goes will get the lock, and then find the shard there
        path.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _write(live: Live, manifest: Manifest, number: int, index: range, folder: Path, bar: Any) -> None:
    """Compute the features of the rows `index` and write them as a shard."""
    rows, target = live.rows, live.target

    def stored(features: Tensor, hidden: Tensor) -> dict[str, Tensor]:
        row = encode_row(features.unflatten(-1, (manifest.layers, -1)), hidden, manifest.dtype)
        if manifest.log_z is not None:  # of what will be read, not of what was rounded to it
            row["log_z"] = target.vocab.log_z(row["hidden"].to(target.device)).float().cpu()
        return row

    parts: dict[str, list[Tensor]] = {}
    index_rows = []
    for group in groups(index, rows.lengths[index.start : index.stop].tolist(), PASS_TOKENS):
        found = live(group)
        ends = np.cumsum(rows.lengths[group]).tolist()
        for i, end, faults in zip(group, ends, found.faults.tolist()):
            length = int(rows.lengths[i])
            bar.update(length)
            if any(faults):
                index_rows.append((0, 0, faults.index(True), 0))
                continue
            cut, where = slice(end - length, end), torch.from_numpy(rows.supervising(i)).to(found.hidden.device)
            row = stored(found.features[cut], found.hidden[cut][where])
            for name, tensor in row.items():
                parts.setdefault(name, []).append(tensor)
            index_rows.append((length, len(row["hidden"]), -1, crc(row[name] for name in manifest.parts)))
    if not parts:  # every row was refused
        nothing = stored(torch.zeros(0, manifest.layers * manifest.dim), torch.zeros(0, manifest.dim))
        parts = {name: [tensor] for name, tensor in nothing.items()}
    columns = [rows.keys(index).view(np.int64), *np.array(index_rows, dtype=np.int64).T]
    table = {name: np.ascontiguousarray(column) for name, column in zip(INDEX, columns)}
    tensors = {name: torch.cat(part) for name, part in parts.items()}
    tensors |= {name: torch.tensor(column) for name, column in table.items()}
    hidden_name = folder / f".{shard_name(number)}.part"
    save_file(tensors, hidden_name, {"deepspec": manifest.seal(number, table)})
    with hidden_name.open("rb") as file:
        os.fsync(file.fileno())
    hidden_name.rename(folder / shard_name(number))


def _room(folder: Path, manifest: Manifest, share: float) -> None:
    """InputError where the disk cannot hold this share of the cache."""
    positions, supervised = (sum(getattr(s, name) for s in manifest.shards) for name in ("positions", "supervised"))
    needed = share * positions * bytes_per_token(manifest.layers, manifest.dim, manifest.dtype, supervised / positions)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(
            f"the cache needs another {needed / 1e9:,.1f} GB and {str(folder)!r} has {free / 1e9:,.1f} GB free; use "
            "int8, fewer rows, or live features"
        )
