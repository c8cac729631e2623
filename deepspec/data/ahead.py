"""Batches made in the background, so that a step finds the next one waiting."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields

import torch
from torch import Tensor

from ..modeling.drafter import Batch
from .batches import Batches, Picked

Key = tuple[Picked, ...]


class Ahead:
    """One thread that reads what was announced. Batches are the same with and without it.

    Live features are computed when they are asked for: the target and the drafter share a device, so nothing would be
    gained. Features from a cache are read, decoded and moved to the device, on a stream of their own.
    """

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self.waited = 0.0
        """Seconds that `batch` took so far, the target's passes not counted."""
        self._pool: ThreadPoolExecutor | None = None
        self._coming: dict[Key, Future[tuple[Batch, torch.cuda.Event | None]]] = {}
        self._stream: torch.cuda.Stream | None = None

    def expect(self, picked: Sequence[Picked]) -> None:
        """Announce a later `batch(picked)`. Costs nothing where it would gain nothing."""
        key = tuple(picked)
        if not self.batches.source.stored or key in self._coming:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="deepspec-data")
            if self.batches.device.type == "cuda":
                self._stream = torch.cuda.Stream(self.batches.device)
        self._coming[key] = self._pool.submit(self._make, picked)

    def batch(self, picked: Sequence[Picked]) -> Batch:
        """The batch of these sequences. What was announced and is not asked for next is forgotten."""
        began, computed = time.perf_counter(), self.batches.source.seconds
        coming = self._coming.pop(tuple(picked), None)
        for other in self._coming.values():  # a pass was cut short: the thread must be free
            other.cancel()
        self._coming = {key: future for key, future in self._coming.items() if not future.done()}
        if coming is None:
            self._settle()
            made = self.batches.batch(picked)
        else:
            made, ready = coming.result()
            if ready is not None:
                stream = torch.cuda.current_stream(self.batches.device)
                stream.wait_event(ready)
                for field in fields(made):
                    value = getattr(made, field.name)
                    if isinstance(value, Tensor):
                        value.record_stream(stream)  # its memory was taken on the other stream
        self.waited += time.perf_counter() - began - (self.batches.source.seconds - computed)
        return made

    def close(self) -> None:
        """Stop the thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        self._coming.clear()

    def _settle(self) -> None:
        """Until the thread works on nothing: a source is asked by one thread at a time."""
        for future in self._coming.values():
            future.exception()
        self._coming.clear()

    def _make(self, picked: Sequence[Picked]) -> tuple[Batch, torch.cuda.Event | None]:
        if self._stream is None:
            return self.batches.batch(picked), None
        with torch.cuda.stream(self._stream):
            made = self.batches.batch(picked)
            event = torch.cuda.Event()
            event.record(self._stream)
        return made, event
