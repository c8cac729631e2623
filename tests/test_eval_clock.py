"""The clock adds up seconds by part, on the host and by events."""

import time

import pytest
import torch

from deepspec.eval.clock import Clock, NullClock


def test_parts_add_up_and_nest():
    clock = Clock("cpu")
    began = time.perf_counter()
    for _ in range(3):
        with clock.part("round"):
            with clock.part("draft"):
                time.sleep(0.002)
            with clock.part("verify"):
                pass
    wall = time.perf_counter() - began
    seconds = clock.seconds()
    assert clock.counts == {"draft": 3, "verify": 3, "round": 3}
    assert 0.006 <= seconds["draft"] <= seconds["round"] <= wall
    assert seconds["draft"] + seconds["verify"] <= seconds["round"]


def test_what_raises_is_not_counted():
    clock = Clock()
    with pytest.raises(KeyError), clock.part("draft"):
        raise KeyError
    assert clock.counts == {} and clock.seconds() == {}


def test_null_clock_measures_nothing():
    clock = NullClock()
    with clock.part("draft"):
        pass
    assert clock.seconds() == {} and clock.counts == {}


def test_cuda_parts_are_events_and_only_reading_waits(monkeypatch):
    """A fake device whose time moves by 10 ms a record, and whose events pass two records later."""
    now, waits = [0.0], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            assert stream == "stream"
            now[0] += 10
            self.at = now[0]

        def query(self):
            return now[0] >= self.at + 20 or bool(waits)

        def elapsed_time(self, end):
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    clock = Clock("cuda:0")
    for _ in range(100):
        with clock.part("draft"):
            pass
    assert not waits
    assert len(clock._pending) < 5, "events that have passed are read on the way"
    assert clock.seconds() == pytest.approx({"draft": 1.0})
    assert clock.counts == {"draft": 100}
    assert waits == [torch.device("cuda:0")]
