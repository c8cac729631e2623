"""What goes wrong in training without an error: found in the rows of metrics.jsonl and in the weights, said once."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..config import LossConfig
from ..modeling.drafter import Drafter

WINDOW = 5
"""Logged steps whose median stands for now."""
DIVERGED = 1.5
"""The loss is this many times its lowest."""
DOMINATES = 0.95
"""Share of the loss."""
FALLING = 0.95
"""Validation tau is below this share of its best..."""
PATIENCE = 3
"""...this many times in a row, while the training rows' own tau still rises."""
STILL = 100
"""Optimiser steps after which a norm must have moved."""


class Health:
    """Takes in one row after the other; what it finds is said when it begins, and again only after it had ended."""

    def __init__(self, loss: LossConfig, drafter: Drafter | None = None, start: int = 0) -> None:
        """drafter: as it is after `start` steps; its norms are watched from here on."""
        self.weights = {"ce": loss.ce, "kl": loss.kl, "l1": loss.tv, "confidence": loss.confidence}
        self._norms = {} if drafter is None else _norms(drafter)
        self._start = {name: p.clone() for name, p in self._norms.items()}
        self._began = start
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._shares: deque[dict[str, float]] = deque(maxlen=WINDOW)
        self._taus: deque[float] = deque(maxlen=WINDOW)
        self._lowest = float("inf")
        self._best, self._best_train, self._worse = 0.0, 0.0, 0
        self._saying: set[str] = set()

    def check(self, row: Mapping[str, Any]) -> list[str]:
        """New findings after a row with `step`, `loss` and what else was logged, a sentence each."""
        found = dict(
            finding
            for finding in (self._divergence(row), self._dominance(row), self._overfit(row), self._dead_norms(row))
            if finding
        )
        new = [text for kind, text in found.items() if kind not in self._saying]
        self._saying = set(found)
        return new

    def _divergence(self, row: Mapping[str, Any]) -> tuple[str, str] | None:
        if "loss" in row:
            self._losses.append(row["loss"])
        if len(self._losses) < WINDOW:
            return None
        now = statistics.median(self._losses)
        self._lowest = min(self._lowest, now)
        if now <= DIVERGED * self._lowest:
            return None
        return "divergence", (
            f"the loss rises: {now:.3g} (median of {WINDOW}), its lowest was {self._lowest:.3g}; "
            "a lower train.lr or train.clip, or a longer train.warmup"
        )

    def _dominance(self, row: Mapping[str, Any]) -> tuple[str, str] | None:
        terms = {name: weight * row[name] for name, weight in self.weights.items() if weight and name in row}
        if (total := sum(terms.values())) > 0:
            self._shares.append({name: value / total for name, value in terms.items()})
        if len(self._shares) < WINDOW or len(terms) < 2:
            return None
        name = max(terms, key=lambda n: terms[n])
        share = min(shares.get(name, 0.0) for shares in self._shares)
        if share < DOMINATES:
            return None
        return "dominance", f"the term {name} is {share:.0%} of the loss; the others hardly count: change loss.*"

    def _overfit(self, row: Mapping[str, Any]) -> tuple[str, str] | None:
        if "tau" in row:
            self._taus.append(row["tau"])
        if (tau := row.get("val_tau")) is None or not self._taus:
            return ("overfit", "") if "overfit" in self._saying else None
        train = statistics.median(self._taus)
        if tau > self._best:
            self._best, self._best_train = tau, train
        self._worse = self._worse + 1 if tau < FALLING * self._best and train > self._best_train else 0
        if self._worse < PATIENCE:
            return None
        return "overfit", (
            f"overfitting: {PATIENCE} validations in a row below {FALLING:.0%} of the best tau {self._best:.2f} (now "
            f"{tau:.2f}), while tau on training rows rose to {train:.2f}; more data or fewer epochs"
        )

    def _dead_norms(self, row: Mapping[str, Any]) -> tuple[str, str] | None:
        if row["step"] - self._began < STILL:
            return None
        dead = [name for name, p in self._norms.items() if torch.equal(p, self._start[name])]
        if not dead:
            return None
        more = f" and {len(dead) - 3} more" if len(dead) > 3 else ""
        return "norms", f"norms that never moved in {STILL} steps: {', '.join(dead[:3])}{more}; they get no gradient"


def _norms(drafter: Drafter) -> dict[str, Tensor]:
    """The weights of norms, of split ones this process' part; they stay the live weights."""
    from .distributed import local

    named = drafter.named_parameters()
    found = {name: local(p.detach()) for name, p in named if "norm" in name.rsplit(".", 2)[-2] and p.requires_grad}
    return {name: p for name, p in found.items() if p.numel()}
