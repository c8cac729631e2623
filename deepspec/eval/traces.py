"""Recorded rounds: what the drafter was confident of and what survived, for calibration and for simulated load.

A trace is made with everything verified, so that every slot's outcome is known. Letters: n rounds, G slots.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..checked import InputError
from ..data.prompts import Prompt
from ..modeling.drafter import Drafter
from ..modeling.target import Target
from ..sampling import Sampling
from .generate import stream

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Trace:
    """The rounds of one request. The last, which its end may have trimmed, is left out."""

    id: str
    """The prompt's."""
    logits: Array
    """[n, G] float64 confidence logits, without temperatures."""
    survived: Array
    """[n] int: drafts accepted where all are verified."""

    @property
    def tokens(self) -> int:
        """Of its answer, at least: one before the first round, those of the rounds, one of the last."""
        return 2 + int((self.survived + 1).sum())

    def within(self, budget: int) -> Trace:
        """Its rounds up to the one that brings the answer to `budget` tokens, the token before the first round counted;
        at least one."""
        rounds = 1 + int(np.searchsorted(1 + (self.survived + 1).cumsum(), budget))
        return Trace(self.id, self.logits[:rounds], self.survived[:rounds])


def collect(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    *,
    sampling: Sampling,
    max_new_tokens: int,
    concurrency: int,
    seeds: Sequence[int],
) -> Iterator[tuple[int, Trace]]:
    """(index, trace) of each prompt, as they finish; prompt i is decoded with seeds[i]."""
    scale = np.asarray(drafter.config.confidence_temperatures or 1.0)
    for index, generation in stream(
        target,
        drafter,
        [p.prompt_ids for p in prompts],
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_ids=target.stop_ids,
        seeds=seeds,
        concurrency=concurrency,
        record=True,
    ):
        confidence = np.array(generation.confidence[:-1], dtype=np.float64).reshape(-1, drafter.num_slots)
        survived = np.array([accepted for _, accepted in generation.rounds[:-1]], dtype=np.int64)
        yield index, Trace(prompts[index].id, logit(confidence) * scale, survived)


def logit(chance: Array) -> Array:
    """The logit of float32 chances; 0 and 1, where float32 ends, become the nearest that have one."""
    inside = chance.clip(2.0**-60, 1 - 2.0**-24)
    result: Array = np.log(inside) - np.log1p(-inside)
    return result


class TraceFile:
    """Traces as JSONL: the settings they were made with in the first line, then one a line. Appended to, so that an
    interrupted collection goes on; a last line that was killed while written is cut off."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, json.loads(json.dumps(settings))
        self.traces: list[Trace] = []
        self.keys: list[int] = []
        """Which of the requests each trace is of."""
        if path.exists() and path.stat().st_size:
            found, self.keys, self.traces, end = _read(path)
            if found != self.settings:
                changed = [k for k in {**found, **self.settings} if found.get(k) != self.settings.get(k)]
                raise InputError(f"{path} was made with another {', '.join(changed)}; use another --out")
            os.truncate(path, end)
        else:
            path.write_text(json.dumps({"settings": self.settings}) + "\n", encoding="utf-8")

    def add(self, key: int, trace: Trace) -> None:
        """Write a trace down; it is on disk when this returns."""
        trace = dataclasses.replace(trace, logits=trace.logits.round(6))  # as it will be read again
        row = {"key": key, "id": trace.id, "logits": trace.logits.tolist(), "survived": trace.survived.tolist()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.keys.append(key)
        self.traces.append(trace)


def load_traces(path: Path) -> tuple[dict[str, Any], list[Trace]]:
    """(settings, traces with rounds) of a file. InputError where it is none."""
    settings, _, traces, _ = _read(path)
    traces = [t for t in traces if len(t.survived)]  # an answer of one round left none
    if not traces:
        raise InputError(f"{path} holds no traces")
    return settings, traces


def _read(path: Path) -> tuple[dict[str, Any], list[int], list[Trace], int]:
    keys, traces, end = [], [], 0
    settings: dict[str, Any] | None = None
    try:
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                row = json.loads(line)
                if settings is None:
                    settings = row["settings"]
                else:
                    keys.append(row["key"])
                    n = len(row["survived"])
                    logits = np.array(row["logits"], dtype=np.float64).reshape(n, -1 if n else 0)
                    traces.append(Trace(row["id"], logits, np.array(row["survived"], dtype=np.int64)))
                end += len(line)
    except OSError as error:
        raise InputError(f"traces {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path} is no file of traces; python -m deepspec.eval.calibrate writes one") from None
    return settings or {}, keys, traces, end
