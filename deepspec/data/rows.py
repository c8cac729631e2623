"""Training rows in flat arrays: four bytes a token and one a flag, however many. Letters: R rows, N tokens."""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np

from .chat import Row


class Rows(Sequence[Row]):
    """R rows; `rows[i]` makes a Row, `tokens_of` and `mask_of` are views of the arrays."""

    def __init__(self, tokens: np.ndarray, loss_mask: np.ndarray, starts: np.ndarray, ids: Sequence[str]) -> None:
        """tokens [N] int32, loss_mask [N] bool, starts [R + 1] int64: row i is starts[i] to starts[i + 1]."""
        self.tokens, self.loss_mask, self.starts, self.ids = tokens, loss_mask, starts, ids

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Rows:
        """Takes rows one by one and keeps none of them: lists of Python integers would take ten times the memory."""
        tokens, flags, starts, ids = array("i"), bytearray(), array("q", [0]), []
        for row in rows:
            tokens.extend(row.tokens)
            flags.extend(row.loss_mask)
            starts.append(len(tokens))
            ids.append(row.id)
        flat = np.frombuffer(tokens, dtype=np.int32) if tokens else np.empty(0, np.int32)
        return cls(flat, np.frombuffer(flags, dtype=bool), np.frombuffer(starts, dtype=np.int64), ids)

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]
        return Row(self.ids[i], self.tokens_of(i).tolist(), self.mask_of(i).tolist())

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """[R] tokens of each row."""
        return np.diff(self.starts)

    def tokens_of(self, i: int) -> np.ndarray:
        """[T] int32."""
        return self.tokens[self.starts[i] : self.starts[i + 1]]

    def mask_of(self, i: int) -> np.ndarray:
        """[T] bool."""
        return self.loss_mask[self.starts[i] : self.starts[i + 1]]

    def supervising(self, i: int) -> np.ndarray:
        """[T] bool: where the target's last hidden state is needed, which is before each supervised token."""
        return np.append(self.mask_of(i)[1:], False)

    def keys(self, index: Sequence[int] | None = None) -> np.ndarray:
        """[R] uint64, or of the rows `index`: a hash of a row's tokens and loss mask, by which a feature cache knows
        it."""
        digests = (
            hashlib.blake2b(self.tokens_of(i).tobytes() + self.mask_of(i).tobytes(), digest_size=8).digest()
            for i in (range(len(self)) if index is None else index)
        )
        return np.frombuffer(b"".join(digests), dtype="<u8")

    def digest(self) -> str:
        """A hash of all rows in their order."""
        return hashlib.blake2b(self.keys().tobytes(), digest_size=8).hexdigest()

    def keep(self, flags: np.ndarray) -> Rows:
        """The rows whose flag [R] is set."""
        of_token = np.repeat(flags, self.lengths)
        starts = np.concatenate([[0], np.cumsum(self.lengths[flags])])
        ids = [id for id, kept in zip(self.ids, flags) if kept]
        return Rows(self.tokens[of_token], self.loss_mask[of_token], starts, ids)
