"""The training loop: a generator, so that a notebook and the command line run the same code.

Everything random is a pure function of (seed, epoch, row), so a resumed run needs no random state: it computes what the
uninterrupted run would have. Under a launcher every process runs this loop; the first one writes.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator

from ..allocator import keep_freed_memory
from ..cache import tentative, whole_dir, writable_dir
from ..checked import ConfigError, InputError, RunError
from ..config import Config, as_dict
from ..hub.native import write_drafter
from ..modeling.devices import dtype_name
from . import checkpoint
from .distributed import World
from .precision import settled
from .report import StepReport
from .setup import Setup, prepare
from .step import Stepper
from .watch import Watch

_LOG = logging.getLogger(__name__)


def fit(config: Config, *, resume: str = "auto", stop: Callable[[], bool] = lambda: False) -> Iterator[StepReport]:
    """Train a drafter; yields a StepReport after each optimiser step. Closing the generator saves a checkpoint.

    Writes config.out: metrics.jsonl, checkpoints/step-*, and at the end drafter/. `resume`: 'auto' goes on from the
    newest checkpoint there, 'never' starts over, anything else is the folder of a checkpoint or of a run to go on from.
    `stop` is asked between passes: once true (and true from then on), a checkpoint is saved and the generator ends,
    on all processes together. All input is checked before the target's weights are read; InputError says what is
    wrong. RunError ends a run that cannot go on (memory, numbers that are not finite); its checkpoints stay.
    """
    world = World.join(config.train.device)
    if world.device.type == "cpu":
        keep_freed_memory()
    if world.size > 1 and config.train.target_devices == "all":
        raise ConfigError("train.target_devices='all' is for one process: others would spread over the same devices")
    config = settled(config, world.device)
    with tentative(config.out):
        writable_dir(config.out, "output directory")
        saved = checkpoint.choose(config.out, resume, as_dict(config))
        run = _Run(world, prepare(config, world.device, saved), saved, resume == "never", stop)
    return run.steps()


class _Run:
    def __init__(
        self, world: World, parts: Setup, saved: checkpoint.Saved | None, afresh: bool, stop: Callable[[], bool]
    ) -> None:
        config = parts.config
        self.config, self.world, self.parts, self.out, train = config, world, parts, config.out, config.train
        self.start = self.saved = saved.step if saved else 0
        """Finished steps: before this run, and in the newest checkpoint."""
        if len({*world.gather([(self.start, parts.identity["digest"])])}) > 1:
            raise InputError("processes see different data or checkpoints: data.path and `out` must be shared folders")
        dtypes = {*world.gather([(train.precision, dtype_name(parts.target.dtype))])}
        if len(dtypes) > 1:  # a machine that is slow in bfloat16 among others
            found = " and ".join(f"{precision} with a target in {dtype}" for precision, dtype in sorted(dtypes))
            raise InputError(f"processes would train in {found}: say train.precision and train.target_dtype")
        loader, self.batches = parts.data.loader(), parts.data.batches(parts.target)
        self.total = min(train.max_steps or 1 << 62, loader.steps(train.epochs))
        self.stepper = Stepper(config, world, parts.drafter, loader, self.batches, self.total, stop)
        if saved:
            checkpoint.load_optimizer(saved.path, parts.drafter, self.stepper.optimizer)
        if world.main:
            if afresh:
                shutil.rmtree(self.out / "checkpoints", ignore_errors=True)
            checkpoint.tidy(self.out, self.start)
        self.best = world.gather([checkpoint.best(self.out) if world.main else None])[0]
        """Step and validation tau of the best checkpoint."""
        self.watch = Watch(parts, world, self.out, self.start)
        if world.main:
            for line in [] if saved else parts.started:
                _LOG.info("init: %s", line)

    def steps(self) -> Iterator[StepReport]:
        try:
            yield from self._steps()
        finally:
            self.stepper.ahead.close()
            self.watch.close()

    def _steps(self) -> Iterator[StepReport]:
        report = None
        for step in range(self.start, self.total):
            try:
                report = self.stepper.step(step)
            except RunError as error:
                kept = checkpoint.found(self.out)
                where = f"the newest checkpoint is {kept[-1]}" if kept else "there is no checkpoint yet"
                raise RunError(f"{error}; {where}") from error
            if report is None:
                self._save(step)
                return
            self._after(report)
            if report.step == self.total:
                break  # the drafter is written before the last report, so that a caller may stop at it
            if self.stepper.stopping:
                self._save(report.step)
            try:
                yield report
            except GeneratorExit:
                self._save(report.step)
                raise
            if self.stepper.stopping:
                return
        self._finish()
        if report is not None:
            yield report

    def _after(self, report: StepReport) -> None:
        """What follows a step: validation, the log, the checkpoint."""
        train, last = self.config.train, report.step == self.total
        if report.step % train.log_every == 0 or last:
            self.batches.source.check(self.config.data.max_refused)
        tau = self.watch.after(report)
        if report.step % train.save_every == 0 or last:
            self._save(report.step)
        if tau is not None and (self.best is None or tau > self.best[1]):
            self._save(report.step)
            self.best = report.step, tau
            if self.world.main:
                checkpoint.mark_best(self.out, *self.best)
                _LOG.info("step %d: the best validation tau so far, %.3f; its checkpoint is kept", *self.best)

    def _save(self, step: int) -> None:
        if step == self.saved:
            return
        parts = self.parts
        checkpoint.save(
            self.out, step, parts.drafter, self.stepper.optimizer, parts.settings, self.config.train.keep_last,
            parts.provenance(), self.world,
        )  # fmt: skip
        self.saved = step
        self.world.wait()  # so that a process that is done finds what the first one writes

    def _finish(self) -> None:
        weights = checkpoint.collect(self.parts.drafter.state_dict().items(), self.world)
        if self.world.main:
            with whole_dir(self.out / "drafter") as temporary:
                write_drafter(self.parts.drafter, temporary, {**self.parts.provenance(), "step": self.total}, weights)
        self.world.wait()
