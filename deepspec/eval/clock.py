"""Seconds by part of the decoding loop, without making the device wait: events on CUDA, the host's clock elsewhere."""

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch


class Clock:
    """`with clock.part("draft"): ...` adds to that part's seconds. Parts may nest; each counts all of its own time.

    On CUDA a part is the time between two events on the current stream, read when they have passed, so a round costs
    no synchronisation; `seconds` waits once for what is still under way. Other devices are taken to be synchronous.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._seconds: dict[str, float] = {}
        self._pending: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self.counts: dict[str, int] = {}
        """How often each part was entered and left."""

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the body. A body that raises is not counted."""
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            yield
            end.record(stream)
            self._pending.append((name, start, end))
            while self._pending and self._pending[0][2].query():  # passed already: a long run holds few events
                self._read()
        else:
            began = time.perf_counter()
            yield
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began
        self.counts[name] = self.counts.get(name, 0) + 1

    def seconds(self) -> dict[str, float]:
        """Seconds of every part so far."""
        if self._pending:
            torch.cuda.synchronize(self._device)
        while self._pending:
            self._read()
        return dict(self._seconds)

    def _read(self) -> None:
        name, start, end = self._pending.popleft()
        self._seconds[name] = self._seconds.get(name, 0.0) + start.elapsed_time(end) / 1000  # elapsed_time is in ms


class NullClock:
    """A clock that measures nothing."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def part(self, name: str) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def seconds(self) -> dict[str, float]:
        return {}
