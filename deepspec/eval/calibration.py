"""How good confidences are, and the temperatures that make them better. Pure functions of what was recorded.

A record is a proposal whose slots were all verified: its confidence logits, and how many of its slots survived.

Letters: N records, G slots.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..checked import InputError

Array = np.ndarray[Any, Any]

BINS = 15
GRID = 10.0 ** (np.arange(-120, 121) / 120)
"""Temperatures that are tried; 1 is among them."""


@dataclass(frozen=True)
class Records:
    logits: Array
    """[N, G] float64: logits of the conditional confidence, before any temperature."""
    survived: Array
    """[N] int: slots accepted, 0 to G."""

    def __post_init__(self) -> None:
        if self.logits.ndim != 2 or self.survived.shape != self.logits.shape[:1] or not len(self.logits):
            raise InputError(f"no records to calibrate on: logits {self.logits.shape}, survived {self.survived.shape}")


def survival(logits: Array, temperatures: Sequence[float]) -> Array:
    """[N, G] chance that a slot and all before it survive: the product of sigmoid(logit / temperature)."""
    with np.errstate(over="ignore"):
        result: Array = (1 / (1 + np.exp(-logits / np.asarray(temperatures)))).cumprod(1)
    return result


def fit(records: Records, grid: Array = GRID) -> list[float]:
    """Sequential temperature scaling: from the left, each slot's temperature is the one of the grid that minimises the
    calibration error of the survival up to it, with the earlier ones fixed. [G]; ties go to the one nearest 1."""
    nearest = grid[np.argsort(np.abs(np.log(grid)), kind="stable")]
    before, result = np.ones(len(records.logits)), []
    for g in range(records.logits.shape[1]):
        each = [before * survival(records.logits[:, g : g + 1], [t])[:, 0] for t in nearest]
        errors = [ece(p, records.survived > g) for p in each]
        best = int(np.argmin(errors))
        result.append(float(nearest[best]))
        before = each[best]
    return result


def ece(chance: Array, outcome: Array, bins: int = BINS) -> float:
    """Expected calibration error: mean over records of |mean chance - share of outcomes| in their bin; chance [N],
    outcome [N] bool. Bins of equal width; empty ones weigh nothing."""
    place = np.minimum((chance * bins).astype(np.int64), bins - 1)
    gap = np.bincount(place, chance, bins) - np.bincount(place, outcome, bins)
    return float(np.abs(gap).sum() / len(chance))


def brier(chance: Array, outcome: Array) -> float:
    """Mean squared distance of chance [N] from outcome [N]."""
    return float(np.mean((chance - outcome) ** 2))


def auc(score: Array, outcome: Array) -> float | None:
    """Area under the ROC curve: how often an outcome that is true has the higher score, ties counting half. None where
    all outcomes are the same."""
    values, place = np.unique(score, return_inverse=True)
    yes, no = (np.bincount(place[outcome == side], minlength=len(values)) for side in (True, False))
    if not yes.sum() or not no.sum():
        return None
    below = no.cumsum() - no
    return float((yes * (below + 0.5 * no)).sum() / (yes.sum() * no.sum()))


def reliability(chance: Array, outcome: Array, bins: int = BINS) -> list[tuple[float, float, int]]:
    """(mean chance, share of outcomes, records) of every bin that is not empty."""
    place = np.minimum((chance * bins).astype(np.int64), bins - 1)
    return [
        (float(chance[here].mean()), float(outcome[here].mean()), int(here.sum()))
        for here in (place == b for b in range(bins))
        if here.any()
    ]


@dataclass(frozen=True)
class Quality:
    """How good confidences are, by slot."""

    ece: list[float]
    """[G] of the survival up to the slot, over all records."""
    brier: list[float]
    """[G] likewise."""
    auc: list[float | None]
    """[G] of the slot's own confidence, over records that survived up to it."""
    diagrams: list[list[tuple[float, float, int]]]
    """[G] reliability of the survival."""


def quality(records: Records, temperatures: Sequence[float]) -> Quality:
    """The quality of confidences at these temperatures [G]."""
    a = survival(records.logits, temperatures)
    slots = range(a.shape[1])
    held = [records.survived > g for g in slots]
    reached = [records.survived >= g for g in slots]
    return Quality(
        ece=[ece(a[:, g], held[g]) for g in slots],
        brier=[brier(a[:, g], held[g]) for g in slots],
        auc=[auc(records.logits[r, g] / temperatures[g], held[g][r]) for g, r in zip(slots, reached)],
        diagrams=[reliability(a[:, g], held[g]) for g in slots],
    )


def load_sts(path: Path) -> list[float]:
    """The temperatures of a file in SGLang's form, one a slot. InputError names the file and what is wrong."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["temperatures"]
        values = [float(t) for t in found]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} holds no temperatures: {getattr(error, 'strerror', None) or error!r}") from None
    if not values or min(values) <= 0:
        raise InputError(f"{path}: temperatures must be > 0, one a slot, got {values}")
    return values
