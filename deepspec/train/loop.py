"""The training loop: a generator, so that a notebook and the command line run the same code.

Everything random is a pure function of (seed, epoch, row), so a resumed run needs no random state: it computes what the
uninterrupted run would have.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..cache import tentative, whole_dir, writable_dir
from ..config import Config, as_dict
from ..data.loader import Loader, collate, load_rows
from ..hub.native import write_drafter
from ..modeling import loading
from ..modeling.drafter import Batch, Drafter
from ..modeling.families import read_family
from ..modeling.target import Target
from ..provenance import provenance
from . import checkpoint, init, optim
from .objective import Metrics, Objective

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepReport:
    """What one optimiser step did."""

    step: int
    """Finished optimiser steps."""
    total_steps: int
    lr: float
    tokens: int
    """Tokens of the step's rows, prompts included."""
    seconds: float
    grad_norm: Tensor = field(repr=False)
    drafter: Drafter = field(repr=False)
    sums: Metrics = field(repr=False)

    @functools.cached_property
    def metrics(self) -> dict[str, float]:
        """Averages: `loss`, the objective's metrics, `grad_norm`. One transfer from the device, at first use."""
        names = [n for n, (_, count) in self.sums.items()]
        stacked = torch.stack([x.float() for n in names for x in self.sums[n]] + [self.grad_norm.float()]).tolist()
        pairs = zip(names, stacked[0::2], stacked[1::2])
        return {n: s / c for n, s, c in pairs if c} | {"grad_norm": stacked[-1]}


def fit(config: Config, *, resume: Literal["auto", "never"] = "auto") -> Iterator[StepReport]:
    """Train a drafter; yields a StepReport after each optimiser step. Closing the generator saves a checkpoint.

    Writes config.out: metrics.jsonl, checkpoints/step-*, and at the end drafter/. `resume` auto goes on from the newest
    checkpoint there. All input is checked before the target's weights are read; InputError says what is wrong.
    """
    with tentative(config.out):
        run = _Run(config, resume)
    return run.steps()


class _Run:
    def __init__(self, config: Config, resume: str) -> None:
        self.config, train = config, config.train
        self.out = writable_dir(config.out, "output directory")
        init.check(train.init)
        device = loading.pick_device(train.device)
        hf = loading.load_config(config.target, config.target_revision)
        read_family(hf)  # an unknown one is found before the weights are read
        text = hf.get_text_config()
        tokenizer = loading.load_tokenizer(config.target, revision=config.target_revision)
        stops = loading.load_stop_ids(config.target, hf, tokenizer, config.target_revision)
        pad = {text.pad_token_id, getattr(tokenizer, "pad_token_id", None)} - {None}
        config.drafter.check_target(
            num_layers=text.num_hidden_layers, vocab_size=text.vocab_size, special_ids={"eos": stops, "pad": tuple(pad)}
        )
        self.rows, self.dropped = load_rows(config.data.path, tokenizer, stops, config.data, text.vocab_size)
        self.loader = Loader(self.rows, train.batch_size, config.seed)
        self.total = min(train.max_steps or 1 << 62, self.loader.steps(train.epochs))
        self.target = Target.load(
            config.target, device=str(device), dtype=train.target_dtype, revision=config.target_revision
        )
        self.drafter = build_drafter(config, self.target)
        self.copied = init.warm_start(self.drafter, self.target, train.init)
        self.objective = Objective(self.drafter, config.loss)
        self.optimizer = optim.build(self.drafter, train)
        self.settings = as_dict(config)
        self.start = self._resume(resume)
        if not self.start:
            for line in self.copied:
                _LOG.info("init: %s", line)

    def _resume(self, resume: str) -> int:
        log, existing = self.out / "metrics.jsonl", checkpoint.found(self.out)
        if resume == "never":
            shutil.rmtree(self.out / "checkpoints", ignore_errors=True)
            log.unlink(missing_ok=True)
            return 0
        start = checkpoint.load(existing[-1], self.drafter, self.optimizer, self.settings) if existing else 0
        if log.exists():  # forget what came after the checkpoint
            kept = []
            for line in log.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # a kill may have torn the last one
                    kept += [line] if json.loads(line)["step"] <= start else []
            log.write_text("".join(x + "\n" for x in kept))
        return start

    def steps(self) -> Iterator[StepReport]:
        train, saved = self.config.train, self.start
        with open(self.out / "metrics.jsonl", "a", encoding="utf-8") as log:
            for step in range(self.start, self.total):
                report = self._step(step)
                last = report.step == self.total
                if report.step % train.log_every == 0 or last:
                    log.write(json.dumps(_row(report)) + "\n")
                    log.flush()
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
        if self.start < self.total:
            yield report

    def _step(self, step: int) -> StepReport:
        train, began = self.config.train, time.perf_counter()
        lr = optim.learning_rate(step, self.total, train)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        picked = self.loader.batch(step)
        sums: Metrics = {}
        total: Tensor | None = None
        tokens = 0
        self.drafter.train()
        for i in range(0, len(picked), train.micro_batch):
            part = picked[i : i + train.micro_batch]
            batch, seeds, count = self._batch(part, step * train.batch_size + i)
            tokens += count
            with self._autocast():
                loss, weight, metrics = self.objective(batch, seeds=seeds)
            loss.backward()
            total = weight if total is None else total + weight
            for name, (s, c) in {**metrics, "loss": (loss.detach(), weight)}.items():
                before = sums.get(name)
                sums[name] = (s, c) if before is None else (before[0] + s, before[1] + c)
        assert total is not None
        params = [p for p in self.drafter.parameters() if p.grad is not None]
        # gradients of sums, divided once by the weight of the whole step: exact whatever the micro-batches
        torch._foreach_div_([p.grad for p in params if p.grad is not None], total.clamp(min=1e-8))
        norm = torch.nn.utils.clip_grad_norm_(params, train.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepReport(step + 1, self.total, lr, tokens, time.perf_counter() - began, norm, self.drafter, sums)

    def _batch(self, part: list[tuple[int, Any]], first: int) -> tuple[Batch, Tensor, int]:
        """A micro-batch with live features, its anchor seeds, its number of tokens. `first`: rows served before it."""
        device = self.target.device
        tokens, loss_mask, lengths, index = collate(part)
        tokens, loss_mask = tokens.to(device), loss_mask.to(device)
        features, hidden = self.target.features(tokens, lengths, self.config.drafter.target_layer_ids)
        index = index.to(device)
        epoch = torch.tensor([(first + j) // len(self.rows) for j in range(len(part))], device=device)
        seeds = (epoch << 40) + (index << 8) + (self.config.seed & 0xFF)
        return Batch(tokens, loss_mask, features, hidden, sample=index), seeds, sum(lengths)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.config.train.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.target.device.type, dtype=torch.bfloat16)

    def _save(self, step: int) -> None:
        checkpoint.save(
            self.out, step, self.drafter, self.optimizer, self.settings, self.config.train.keep_last, self._provenance()
        )

    def _finish(self) -> None:
        with whole_dir(self.out / "drafter") as temporary:
            write_drafter(self.drafter, temporary, {**self._provenance(), "step": self.total})

    def _provenance(self) -> dict[str, Any]:
        manifests = {}
        for path in self.config.data.path:
            manifest = Path(path + ".manifest.json")
            manifests[path] = json.loads(manifest.read_text()) if manifest.is_file() else None
        return {
            "target": {
                "name": self.config.target,
                "revision": self.config.target_revision,
                "dtype": str(self.target.dtype),
            },
            "settings": self.settings,
            "init": self.copied,
            "data": {"rows": len(self.rows), "dropped": dict(self.dropped), "manifests": manifests},
            "versions": provenance(),
        }


def build_drafter(config: Config, target: Target) -> Drafter:
    """A fresh drafter with float32 weights on the target's device; the weights depend on config.seed only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        drafter = config.drafter.build(target.spec, target.vocab)
    drafter = drafter.to(device=target.device, dtype=torch.float32)
    drafter.attention = config.train.attention
    return drafter


def _row(report: StepReport) -> dict[str, Any]:
    rate = report.tokens / report.seconds
    return {
        "step": report.step,
        "lr": report.lr,
        **report.metrics,
        "tokens_per_second": rate,
        "seconds": report.seconds,
    }
