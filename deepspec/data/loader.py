"""Training rows from JSONL files, and the order in which training sees them."""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..checked import InputError, require
from .chat import Row, together, training_rows
from .packing import pack
from .prompts import Seen, TokenizerSource, counted, read_records, reasons, tokenizer_getter
from .records import Message, layout
from .rows import Rows

if TYPE_CHECKING:
    from ..config import DataConfig

T = TypeVar("T")
R = TypeVar("R")


def load_rows(
    paths: Iterable[str | Path],
    tokenizer: TokenizerSource,
    stop_ids: Collection[int],
    config: DataConfig,
    vocab_size: int,
    every: int = 1,
) -> tuple[Rows, Counter[str]]:
    """All usable rows of the files, in their order, cut to config.max_length tokens; and what was dropped, by reason.
    Of the records only every `every`-th, where not all are wanted.

    A record (one per line) that cannot be used counts once, and so does a row with fewer than config.min_supervised
    supervised tokens, or with an id seen before in its file. InputError names file and line of a malformed record
    (config.malformed "skip" counts and drops it instead) or of an id outside the vocabulary, and says how many were
    dropped for which reason where nothing is left.
    """
    paths, dropped, ready = list(paths), Counter[str](), _ready(tokenizer_getter(tokenizer))

    def make(record: Message) -> list[Row]:
        needed = None if layout(record) == "prompt_ids" else ready()
        made = training_rows(record, needed, stop_ids, config.thinking)
        made = together(made) if config.turns == "together" else made
        for row in made:
            _check_ids(row, vocab_size)
        return made

    rows = Rows.of(row for path in paths for row in _usable(path, make, config, dropped, every))
    if not rows:
        raise InputError(f"no training row in {', '.join(map(str, paths))}; dropped: {reasons(dropped)}")
    return rows, dropped


def _usable(
    path: str | Path, make: Callable[[Message], list[Row]], config: DataConfig, dropped: Counter[str], every: int
) -> Iterator[Row]:
    """The rows of a file that can be trained on. They are made by threads, for tokenizers work without Python's lock:
    two cores are busy where one renders templates; the order is the file's."""
    least, most = config.min_supervised, config.max_length
    skipped, seen = dropped if config.malformed == "skip" else None, Seen()
    records = itertools.islice(read_records(path, skipped), 0, None, every)
    for (where, _), making in _ahead(lambda item: make(item[1]), records):
        made: list[Row] = []
        with counted(where, dropped, skipped):
            made = making.result()
        for row in made:
            if repeated := seen.again(row.id, row.tokens):
                dropped[repeated] += 1
                continue
            kept = _cut(row, most)
            if sum(kept.loss_mask) >= least:
                yield kept
            elif sum(row.loss_mask) >= least:
                dropped[f"fewer than {least} supervised tokens in the first {most}"] += 1
            else:
                dropped[f"fewer than {least} supervised tokens"] += 1


def _ahead(work: Callable[[T], R], items: Iterable[T]) -> Iterator[tuple[T, Future[R]]]:
    """Items in their order, each with its result to come; a bounded number of them is worked on ahead."""
    threads = min(8, os.cpu_count() or 1)
    waiting: deque[tuple[T, Future[R]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append((item, pool.submit(work, item)))
                if len(waiting) > 8 * threads:
                    yield waiting.popleft()
            while waiting:
                yield waiting.popleft()
        finally:
            pool.shutdown(cancel_futures=True)


def _ready(get: Callable[[], Any]) -> Callable[[], Any]:
    """`get`, for threads: called by one of them, and used once before any other has it. A tokenizer's first call may
    reset the truncation its file asked for, which must not happen under another call."""
    lock, found = threading.Lock(), list[Any]()

    def ready() -> Any:
        with lock:
            if not found:
                tokenizer = get()
                if tokenizer is not None:
                    tokenizer("", add_special_tokens=False)
                found.append(tokenizer)
            return found[0]

    return ready


def sequences(rows: Rows, pack_tokens: int | None, seed: int) -> Sequence[tuple[int, ...]]:
    """The rows of each training sequence: one, or as many as fit into pack_tokens tokens. Depends on nothing else."""
    if pack_tokens is None:
        return [(i,) for i in range(len(rows))]
    return pack(rows.lengths.tolist(), order(len(rows), seed, 0).tolist(), pack_tokens)


class Loader:
    """Batches in an order that depends on (seed, epoch) only: any process can ask for any step, after any kill."""

    def __init__(self, sequences: Sequence[tuple[int, ...]], batch_size: int, seed: int) -> None:
        require(batch_size >= 1, f"batch_size must be >= 1, got {batch_size}")
        require(len(sequences) >= 1, "a loader needs at least one row")
        self.sequences, self.batch_size, self.seed = sequences, batch_size, seed

    def steps(self, epochs: int) -> int:
        """Steps after which every sequence was seen `epochs` times; the last batch may reach into the next epoch."""
        return -(-epochs * len(self.sequences) // self.batch_size)

    def batch(self, step: int) -> list[tuple[int, tuple[int, ...]]]:
        """The batch_size sequences of a step (from 0), each as its number and its rows. Epochs follow each other
        without a gap: no row is left out, and batches stay full."""
        n, index = len(self.sequences), []
        for i in range(step * self.batch_size, (step + 1) * self.batch_size):
            epoch, place = divmod(i, n)
            index.append(int(order(n, self.seed, epoch)[place]))
        return [(i, self.sequences[i]) for i in index]


@functools.lru_cache(maxsize=4)
def order(n: int, seed: int, epoch: int) -> np.ndarray:
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
