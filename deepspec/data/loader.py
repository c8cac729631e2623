"""Training rows from JSONL files, their order, and their padding into tensors. Letters: B rows, T positions."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..checked import InputError, require
from .chat import Row, layout, training_rows
from .prompts import Seen, TokenizerSource, counted, read_records, reasons, tokenizer_getter

if TYPE_CHECKING:
    from ..config import DataConfig


def load_rows(
    paths: Iterable[str | Path],
    tokenizer: TokenizerSource,
    stop_ids: Collection[int],
    config: DataConfig,
    vocab_size: int,
) -> tuple[list[Row], Counter[str]]:
    """All usable rows of the files, in their order, cut to config.max_length tokens; and what was dropped, by reason.

    A record (one per line) that cannot be used counts once, and so does a row with fewer than config.min_supervised
    supervised tokens, or with an id seen before in its file. InputError names file and line of a malformed record
    (config.malformed "skip" counts and drops it instead) or of an id outside the vocabulary, and says how many were
    dropped for which reason where nothing is left.
    """
    get = tokenizer_getter(tokenizer)
    rows: list[Row] = []
    dropped: Counter[str] = Counter()
    skipped = dropped if config.malformed == "skip" else None
    paths = list(paths)
    for path in paths:
        seen = Seen()
        for where, record in read_records(path, skipped):
            made: list[Row] = []
            with counted(where, dropped, skipped):
                needed = None if layout(record) == "prompt_ids" else get()
                made = training_rows(record, needed, stop_ids, config.thinking)
                for row in made:
                    _check_ids(row, vocab_size)
            for row in made:
                if repeated := seen.again(row.id, row.tokens):
                    dropped[repeated] += 1
                    continue
                kept = _cut(row, config.max_length)
                if sum(kept.loss_mask) >= config.min_supervised:
                    rows.append(kept)
                elif sum(row.loss_mask) >= config.min_supervised:
                    dropped[
                        f"fewer than {config.min_supervised} supervised tokens in the first {config.max_length}"
                    ] += 1
                else:
                    dropped[f"fewer than {config.min_supervised} supervised tokens"] += 1
    if not rows:
        raise InputError(f"no training row in {', '.join(map(str, paths))}; dropped: {reasons(dropped)}")
    return rows, dropped


class Loader:
    """Batches in an order that depends on (seed, epoch) only: any process can ask for any step, after any kill."""

    def __init__(self, rows: Sequence[Row], batch_size: int, seed: int) -> None:
        require(batch_size >= 1, f"batch_size must be >= 1, got {batch_size}")
        require(len(rows) >= 1, "a loader needs at least one row")
        self.rows, self.batch_size, self.seed = rows, batch_size, seed

    def steps(self, epochs: int) -> int:
        """Steps after which every row was seen `epochs` times; the last batch may reach into the next epoch."""
        return -(-epochs * len(self.rows) // self.batch_size)

    def batch(self, step: int) -> list[tuple[int, Row]]:
        """The batch_size rows of a step (from 0), each with its index in the data set. Epochs follow each other without
        a gap: no row is left out, and batches stay full."""
        index = []
        for i in range(step * self.batch_size, (step + 1) * self.batch_size):
            epoch, place = divmod(i, len(self.rows))
            index.append(int(_order(len(self.rows), self.seed, epoch)[place]))
        return [(i, self.rows[i]) for i in index]


def collate(
    rows: Sequence[tuple[int, Row]], pad_id: int = 0, multiple: int = 1
) -> tuple[Tensor, Tensor, list[int], Tensor]:
    """Tokens [B, T] long, loss mask [B, T] bool, lengths, and indices in the data set [B] long.

    Padded on the right, unsupervised, to the longest row rounded up to a multiple of `multiple`.
    """
    lengths = [len(row.tokens) for _, row in rows]
    width = -(-max(lengths) // multiple) * multiple
    tokens = torch.full((len(rows), width), pad_id, dtype=torch.long)
    loss_mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for b, (_, row) in enumerate(rows):
        tokens[b, : lengths[b]] = torch.tensor(row.tokens)
        loss_mask[b, : lengths[b]] = torch.tensor(row.loss_mask)
    return tokens, loss_mask, lengths, torch.tensor([i for i, _ in rows])


@functools.lru_cache(maxsize=4)
def _order(n: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of n rows. Sorting the raw words of the generator, and not `Generator.permutation`, because numpy
    promises the same raw words in every version: a run resumed after an upgrade goes on in the same order."""
    words = np.random.PCG64(np.random.SeedSequence([seed % 2**64, epoch])).random_raw(n)
    return np.argsort(words, kind="stable")


def _cut(row: Row, length: int) -> Row:
    return Row(row.id, row.tokens[:length], row.loss_mask[:length]) if len(row.tokens) > length else row


def _check_ids(row: Row, vocab_size: int) -> None:
    if max(row.tokens) >= vocab_size:
        raise InputError(
            f"token id {max(row.tokens)} is outside the target's vocabulary of {vocab_size}: "
            "the row or the tokenizer belongs to another model"
        )
