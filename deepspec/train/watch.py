"""What a run is watched by: the log, trackers, validation and health, after each step."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ..modeling.target import Target
from . import compiling, curves, trackers
from .distributed import World, whole
from .health import Health
from .log import Log
from .report import StepReport
from .setup import Setup
from .validate import Validator, overlap

_LOG = logging.getLogger(__name__)


class Watch:
    """On every process; the first one writes."""

    def __init__(self, parts: Setup, world: World, out: Path, start: int) -> None:
        """start: finished steps; what an earlier run logged after them is forgotten."""
        self.config, self.world, self.drafter = parts.config, world, parts.drafter
        self._validator = _validator(parts)
        if not world.main:
            return
        self._log = Log(out / "metrics.jsonl", start)
        self._health = Health(self.config.loss, parts.drafter, start)
        for row in curves.rows(out / "metrics.jsonl"):
            self._health.check(row)
        if inside := overlap(parts.prompts, (parts.data.rows.tokens_of(i) for i in range(len(parts.data.rows)))):
            _LOG.warning("validate.path: %d of %d prompts begin a training row", inside, len(parts.prompts))
        self._trackers = trackers.Trackers(self.config.train.trackers, out, parts.settings)

    def after(self, report: StepReport) -> float | None:
        """Validate and log where it is time to; the validation's tau where there was one. All processes call it."""
        c, last = self.config, report.step == report.total_steps
        row: dict[str, Any] = {}
        if self._validator is not None and (report.step % c.validate.every == 0 or last):
            weights = ((name, whole(value)) for name, value in self.drafter.state_dict().items())
            mine = self._validator.decode(weights, self.world.rank, self.world.size)
            row = self._validator.together(self.world.gather(mine)).row()
        if self.world.main and (row or report.step % c.train.log_every == 0 or last):
            row = report.row() | row
            if compiling.wanted(c.train.compile, self.world.device):
                row["compiled_graphs"] = compiling.graphs()
            if warnings := self._health.check(row):
                row["warnings"] = warnings
                for text in warnings:
                    _LOG.warning("step %d: %s", report.step, text)
            self._log.write(row)
            self._trackers.log(row)
        return row.get("val_tau")

    def close(self) -> None:
        if self.world.main:
            self._trackers.finish()


def _validator(parts: Setup) -> Validator | None:
    if not parts.prompts:
        return None
    assert isinstance(parts.target, Target)  # it is loaded whole where there are prompts
    return Validator(parts.config.validate, parts.target, parts.drafter, parts.prompts)
