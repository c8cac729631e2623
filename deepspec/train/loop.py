"""The training loop: a generator, so that a notebook and the command line run the same code.

Everything random is a pure function of (seed, epoch, row), so a resumed run needs no random state: it computes what the
uninterrupted run would have.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from typing import Literal

from ..cache import tentative, whole_dir, writable_dir
from ..config import Config
from ..hub.native import write_drafter
from . import checkpoint, optim
from .log import Log
from .report import StepReport
from .setup import Setup, prepare
from .step import Stepper

_LOG = logging.getLogger(__name__)


def fit(config: Config, *, resume: Literal["auto", "never"] = "auto") -> Iterator[StepReport]:
    """Train a drafter; yields a StepReport after each optimiser step. Closing the generator saves a checkpoint.

    Writes config.out: metrics.jsonl, checkpoints/step-*, and at the end drafter/. `resume` auto goes on from the newest
    checkpoint there. All input is checked before the target's weights are read; InputError says what is wrong.
    """
    with tentative(config.out):
        writable_dir(config.out, "output directory")
        run = _Run(config, prepare(config), resume)
    return run.steps()


class _Run:
    def __init__(self, config: Config, parts: Setup, resume: str) -> None:
        self.config, self.parts, self.out, train = config, parts, config.out, config.train
        loader, self.batches = parts.data.loader(), parts.data.batches(parts.target)
        self.total = min(train.max_steps or 1 << 62, loader.steps(train.epochs))
        self.optimizer = optim.build(parts.drafter, train)
        self.stepper = Stepper(config, parts.drafter, self.optimizer, loader, self.batches, self.total)
        self.start = self._resume(resume)
        self.log = Log(self.out / "metrics.jsonl", self.start)
        if not self.start:
            for line in parts.started:
                _LOG.info("init: %s", line)

    def _resume(self, resume: str) -> int:
        if resume == "never":
            shutil.rmtree(self.out / "checkpoints", ignore_errors=True)
        existing = checkpoint.found(self.out)
        if not existing:
            return 0
        return checkpoint.load(existing[-1], self.parts.drafter, self.optimizer, self.parts.settings)

    def steps(self) -> Iterator[StepReport]:
        train, saved = self.config.train, self.start
        report = None
        for step in range(self.start, self.total):
            report = self.stepper.step(step)
            last = report.step == self.total
            if report.step % train.log_every == 0 or last:
                self.batches.source.check(self.config.data.max_refused)
                self.log.write(report)
            if report.step % train.save_every == 0 or last:
                self._save(report.step)
                saved = report.step
            if last:
                break  # the drafter is written before the last report, so that a caller may stop at it
            try:
                yield report
            except GeneratorExit:
                if saved != report.step:
                    self._save(report.step)
                raise
        self._finish()
        if report is not None:
            yield report

    def _save(self, step: int) -> None:
        parts = self.parts
        checkpoint.save(
            self.out,
            step,
            parts.drafter,
            self.optimizer,
            parts.settings,
            self.config.train.keep_last,
            parts.provenance(),
        )

    def _finish(self) -> None:
        with whole_dir(self.out / "drafter") as temporary:
            write_drafter(self.parts.drafter, temporary, {**self.parts.provenance(), "step": self.total})
