"""Features of training rows on disk: a manifest and safetensors shards, read through memory maps.

`manifest.json` says what was asked for and which rows each shard holds; it is written first. A shard appears under its
name when all of it is on disk. Features are stored of every position, the last hidden state where it supervises, as
bfloat16, float32 or int8 (`encoding`), and with it the log Z of the target's logits there. Every row has a CRC of its
own, checked the first time it is read, so that finding a flipped bit never costs a pass over terabytes.

Letters: R rows of a shard, N positions of them together, H of these that supervise, L tapped layers, D hidden.
"""

from __future__ import annotations

import functools
import json
import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..checked import InputError
from ..modeling.devices import dtype_name
from ..modeling.vocab import Vocab
from .encoding import Stored, crc, decode, fingerprint, part_names
from .features import FAULTS, Features
from .rows import Rows

_LOG = logging.getLogger(__name__)

FORMAT = 2
"""Caches of format 1 have no log Z. They are read, and finished, without it."""
INDEX = ("keys", "positions", "supervised", "fault", "crc")
"""Tensors [R] int64 of a shard: the row's key, its N and H (0 where it was refused), its fault (-1: none), its CRC."""
AGAIN = "run `python -m deepspec.data features` again"


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


@dataclass(frozen=True)
class Shard:
    """What the manifest says of a shard."""

    rows: int
    positions: int
    supervised: int


@dataclass(frozen=True)
class Manifest:
    """What a cache was asked for; equal for every process that builds it."""

    settings: dict[str, Any]
    """What the features depend on (`training.identity`)."""
    dtype: Stored
    dim: int
    rows: str
    """Hash of all row keys."""
    shards: tuple[Shard, ...]
    made_by: dict[str, Any]
    """Versions and the target's dtype; recorded, not compared."""
    log_z: str | None = None
    """Dtype of the logits whose log Z is stored; None: it is not."""

    @property
    def layers(self) -> int:
        return len(self.settings["target_layer_ids"])

    @property
    def parts(self) -> list[str]:
        """The tensors of a shard that hold what the target computed."""
        return part_names(self.dtype) + ([] if self.log_z is None else ["log_z"])

    @property
    def id(self) -> str:
        """Which every shard repeats."""
        told = [self.settings, self.dtype, self.rows, [vars(s) for s in self.shards]]
        text = json.dumps(told if self.log_z is None else [*told, self.log_z], sort_keys=True)
        return f"{zlib.crc32(text.encode()):08x}"

    def seal(self, number: int, index: dict[str, np.ndarray]) -> str:
        """What a shard says of itself: one string, for the order of several keys would change from file to file."""
        value = zlib.crc32(b"".join(index[name].tobytes() for name in INDEX))
        return f"cache {self.id} shard {number} index {value:08x}"

    def summary(self) -> dict[str, Any]:
        """What a drafter trained from the cache says of it."""
        return {key: getattr(self, key) for key in ("id", "dtype", "settings", "made_by", "log_z")}

    def text(self) -> str:
        shards = [vars(s) for s in self.shards]
        return json.dumps({"format": FORMAT, **vars(self), "shards": shards}, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """InputError where it is missing, damaged, or of another format."""
    place = folder / "manifest.json"
    if not place.is_file():
        raise InputError(f"{folder} is no feature cache: it has no manifest.json")
    try:
        found = json.loads(place.read_text())
        if found.pop("format") not in (1, FORMAT):
            raise InputError(f"{place}: made by another version of this package; make the cache anew")
        return Manifest(**{**found, "shards": tuple(Shard(**s) for s in found["shards"])})
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{place} is damaged ({type(error).__name__}: {error}); make the cache anew") from None


class OpenShard:
    """A shard through its memory map; InputError names it where it is not what the manifest says."""

    def __init__(self, folder: Path, manifest: Manifest, number: int) -> None:
        self.path, self.parts = folder / shard_name(number), manifest.parts
        if not self.path.is_file():
            raise InputError(f"{self.path} is missing, one of {len(manifest.shards)} shards; {AGAIN}")
        try:
            self._file = safe_open(self.path, "pt")
            metadata = self._file.metadata() or {}
            self.index = {name: self._file.get_tensor(name).numpy() for name in INDEX}
            shapes = {name: self._file.get_slice(name).get_shape() for name in self.parts}
        except (SafetensorError, OSError, ValueError) as error:
            size = self.path.stat().st_size
            raise self._damaged(f"{size} bytes: {' '.join(str(error).split())}") from None
        seal, found = manifest.seal(number, self.index), metadata.get("deepspec", "")
        if seal.split()[:4] != found.split()[:4]:
            raise InputError(f"{self.path} belongs to another cache than the manifest beside it; delete it and {AGAIN}")
        if seal != found:
            raise self._damaged("the checksum of its index does not match")
        counts = {name: int(self.index[name].sum()) for name in ("positions", "supervised")}
        for name, shape in shapes.items():
            if shape[0] != counts[_counted(name)]:
                raise self._damaged(f"{name} has {shape[0]} entries, its index says {counts}")
        self._starts = {name: np.concatenate([[0], np.cumsum(self.index[name])]) for name in counts}

    def row(self, i: int, check: bool) -> dict[str, Tensor]:
        """features [N, L, D], hidden [H, D], log_z [H] of row i of the shard, as stored. `check`: compare the CRC."""
        found = {}
        for name in self.parts:
            starts = self._starts[_counted(name)]
            found[name] = self._file.get_slice(name)[int(starts[i]) : int(starts[i + 1])]
        if check and crc(found.values()) != self.index["crc"][i]:
            raise self._damaged(f"the checksum of its row {i} does not match")
        return found

    def _damaged(self, what: str) -> InputError:
        return InputError(f"{self.path} is damaged ({what}); delete it and {AGAIN}")


def _counted(part: str) -> str:
    """What a part's entries are: positions, or those of them that supervise."""
    return "positions" if part.startswith("features") else "supervised"


class Cached:
    """A source of features that reads a cache. All shards are looked at when it is opened, each row when it is used."""

    def __init__(self, folder: str | Path, settings: dict[str, Any], rows: Rows) -> None:
        """InputError where the cache was made with other settings, lacks one of the rows, or is damaged."""
        self.folder = Path(folder)
        self.stored, self.seconds = True, 0.0
        self.manifest = read_manifest(self.folder)
        if changed := differences(self.manifest.settings, settings):
            raise InputError(f"{self.folder} was made with other settings: {changed}; make another cache")
        self.device = torch.device("cpu")
        shards = [OpenShard(self.folder, self.manifest, n) for n in range(len(self.manifest.shards))]
        keys = np.concatenate([s.index["keys"] for s in shards])
        number = np.repeat(np.arange(len(shards)), [len(s.index["keys"]) for s in shards])
        inside = np.concatenate([np.arange(len(s.index["keys"])) for s in shards])
        fault = np.concatenate([s.index["fault"] for s in shards])
        order = np.argsort(keys, kind="stable")
        wanted = rows.keys().view(np.int64)
        at = order[np.searchsorted(keys, wanted, sorter=order).clip(max=len(keys) - 1)]
        missing = np.flatnonzero(keys[at] != wanted)
        if len(missing):
            raise InputError(
                f"{self.folder} holds no features of {len(missing)} of {len(rows)} rows, the first of them "
                f"{rows.ids[missing[0]]!r}; {AGAIN} for this data, into another directory"
            )
        self.rows, self._shard, self._inside = rows, number[at], inside[at]
        self._log_z = self.manifest.log_z is not None
        self.fault = fault[at]
        """[R] why a row was refused: its place in FAULTS, -1 where it was not."""
        self._checked = np.zeros(len(rows), dtype=bool)
        # shards are opened again as they are read: thousands of maps at once are too many for some systems
        self._open = functools.lru_cache(maxsize=256)(lambda n: OpenShard(self.folder, self.manifest, n))

    def __call__(self, index: Sequence[int]) -> Features:
        found = []
        for i in index:
            if self.fault[i] >= 0:
                raise ValueError(f"row {i} was refused when the cache was made: {FAULTS[self.fault[i]]}")
            shard = self._open(int(self._shard[i]))
            found.append(shard.row(int(self._inside[i]), check=not self._checked[i]))
            self._checked[i] = True
        parts = {name: torch.cat([row[name] for row in found]).to(self.device) for name in found[0]}
        features, sound = decode(parts).flatten(1), torch.zeros(len(index), len(FAULTS), dtype=torch.bool)
        supervising = np.concatenate([self.rows.supervising(i) for i in index]).nonzero()[0]
        where = torch.from_numpy(supervising).to(self.device)

        def spread(part: Tensor) -> Tensor:
            """[H, ...] -> [N, ...]: zeros where nothing supervises."""
            return part.new_zeros(len(features), *part.shape[1:]).index_copy_(0, where, part)

        log_z = spread(parts["log_z"]) if self._log_z else None
        return Features(features, spread(parts["hidden"]), sound.to(self.device), log_z)

    def check(self, limit: float) -> None:
        """Nothing: refused rows were counted and left out before training began."""

    def check_vocab(self, vocab: Vocab) -> None:
        """InputError where the target has other weights than the one the cache was made with. Where it has another
        dtype, log Z is left out: logits rounded otherwise would not sum to it."""
        if self.manifest.settings["weights"] != fingerprint(vocab):
            raise InputError(f"{self.folder} was made with other weights of the target than these; make another cache")
        made, here = self.manifest.log_z, dtype_name(vocab.head.dtype)
        self._log_z = made == here
        if not self._log_z:
            _LOG.info(
                "%s holds %s: the target's logits are formed over all its tokens; a cache made anew by a target in %s "
                "spares most of them",
                self.folder, "no log Z" if made is None else f"the log Z of logits in {made}", here,
            )  # fmt: skip


def differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    """'max_length is 8 there and 16 now; ...' of the keys of `new`."""
    new = json.loads(json.dumps(new))
    return "; ".join(
        f"{key} is {json.dumps(old.get(key))} there and {json.dumps(new[key])} now"
        for key in new
        if old.get(key) != new[key]
    )
