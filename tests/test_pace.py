"""Laws of what makes training fast or small: it changes no number, and nothing grows with time."""

import dataclasses
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers import make_batch, make_drafter, target, token_rows, write_run
from torch.nn import functional as F

from deepspec import Batch, LossConfig, Objective, fit, load_config
from deepspec.data.ahead import Ahead
from deepspec.train import compiling, curves

LOSS = LossConfig(ce=0.1, kl=0.5, tv=0.5, confidence=1.0, slot_decay=0.8, chunk=16)


def learn(drafter, objective, batch, seeds):
    """Loss a weight, and every gradient."""
    drafter.zero_grad()
    loss, weight, _ = objective(batch, seeds=seeds)
    (loss / weight).backward()
    return loss.item() / weight.item(), {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}


def close(a, b, tolerance):
    assert a[1].keys() == b[1].keys() and a[0] == pytest.approx(b[0], rel=tolerance)
    for name, grad in a[1].items():
        torch.testing.assert_close(grad, b[1][name], atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def padded(batch: Batch, by: int) -> Batch:
    def wider(x, value=0):
        return F.pad(x, (0, 0) * (x.dim() - 2) + (0, by), value=value)

    return Batch(wider(batch.tokens, 7), wider(batch.loss_mask), wider(batch.features), wider(batch.hidden))


@pytest.mark.parametrize("kind", ["vanilla", "rnn", "dflash-masks"])
def test_padding_changes_nothing(kind):
    """Positions after a row's end, to reach a length that was compiled, change neither loss nor gradient."""
    drafter = make_drafter(kind, target())
    objective = Objective(drafter, LOSS if drafter.has_confidence else dataclasses.replace(LOSS, confidence=0.0))
    batch, seeds = make_batch(target(), length=14), torch.arange(2)
    close(learn(drafter, objective, padded(batch, 9), seeds), learn(drafter, objective, batch, seeds), 1e-5)


def test_few_lengths_are_compiled():
    """A row fits its padded length, no longer than the longest row needs, and 4,096 lengths become five."""
    for most in (100, 512, 700, 4096):
        widths = [compiling.width(n, most) for n in range(1, most + 1)]
        assert all(n <= w for n, w in enumerate(widths, 1)) and max(widths) < most + 128
        assert widths == sorted(widths) and len(set(widths)) <= 5


def test_what_is_recomputed_is_not_kept():
    """checkpoint_layers: bit-equal loss and gradients, and of the layers' activations little is kept for backward."""
    batch, seeds, results, kept = make_batch(target(), rows=2, length=30), torch.arange(2), [], []
    for again in (False, True):
        drafter = make_drafter("vanilla", target(), num_draft_layers=4)
        drafter.checkpoint_layers = again
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, s=sizes: s.append(x.numel()) or x, lambda x: x):
            hidden = drafter.hidden(batch, drafter.anchors(batch, seeds)[0])
        kept.append(sum(sizes))
        assert hidden.requires_grad
        results.append(learn(drafter, Objective(drafter, LOSS), batch, seeds))
    close(results[1], results[0], 1e-6)
    assert kept[1] < kept[0] / 2, kept


# -- batches ahead ---------------------------------------------------------------------------------------------------


class Slow:
    """Batches that take their time, and notice when two threads ask at once."""

    def __init__(self, stored: bool) -> None:
        self.source, self.device = self, torch.device("cpu")
        self.stored, self.seconds, self.asked, self.inside = stored, 0.0, [], threading.Lock()

    def batch(self, picked):
        assert self.inside.acquire(blocking=False), "asked by two threads at once"
        try:
            time.sleep(0.05)
            self.asked.append((picked, threading.current_thread() is threading.main_thread()))
            if picked[0][0] == 13:
                raise OSError("disk")
            return make_batch(target(), rows=1, length=8, seed=picked[0][0])
        finally:
            self.inside.release()


def pick(*numbers):
    return [(n, (n,)) for n in numbers]


@pytest.mark.parametrize("stored", [True, False])
def test_what_was_announced_is_ready(stored):
    """The same batches in the same order; those from a disk are made meanwhile by one other thread, live ones when they
    are asked for."""
    slow = Slow(stored)
    ahead = Ahead(slow)
    for n in range(6):
        assert torch.equal(ahead.batch(pick(n)).tokens, make_batch(target(), rows=1, length=8, seed=n).tokens)
        ahead.expect(pick(n + 1))
        ahead.expect(pick(n + 1))
        time.sleep(0.08)
    assert [p[0][0] for p, _ in slow.asked] == list(range(7 if stored else 6))
    assert [here for _, here in slow.asked] == [True] + [not stored] * (6 if stored else 5)
    assert (ahead.waited < 0.2) == stored
    ahead.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("deepspec-data")]


def test_other_batches_than_announced():
    """After a pass cut short: what is asked for comes, what was announced is forgotten, never two threads at once."""
    ahead = Ahead(Slow(True))
    for announced, asked in ((1, 2), (3, 3), (4, 5), (6, 4), (9, 9)):
        ahead.expect(pick(announced))
        assert torch.equal(ahead.batch(pick(asked)).tokens, make_batch(target(), rows=1, length=8, seed=asked).tokens)
    ahead.close()


def test_an_error_in_the_background_is_the_caller_s():
    ahead = Ahead(Slow(True))
    ahead.expect(pick(13))
    with pytest.raises(OSError, match="disk"):
        ahead.batch(pick(13))
    assert ahead.batch(pick(1)).tokens.shape == (1, 8)
    ahead.close()


# -- compiled, and for long --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, backend",
    [("vanilla", "eager"), ("rnn", "aot_eager"), pytest.param("rnn", "inductor", marks=pytest.mark.slow)],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by dynamo itself
def test_compiled_is_eager(kind, backend):
    """Loss and gradients to 1e-5 in float32, whatever the length; once two lengths were seen nothing is compiled."""
    tgt = target()
    plain, fast = make_drafter(kind, tgt), make_drafter(kind, tgt)
    eager, quick = Objective(plain, LOSS), compiling.objective(fast, LOSS, "on", torch.device("cpu"), backend)
    counts = []
    for i, length in enumerate((14, 20, 17, 33, 14, 40, 29, 60, 21, 15)):
        batch, seeds = make_batch(tgt, length=length, seed=i), torch.arange(2) + i
        close(learn(fast, quick, batch, seeds), learn(plain, eager, batch, seeds), 1e-5)
        counts.append(compiling.graphs())
    assert counts[0] > 0 and counts[-1] == counts[3], counts
    fast.load_state_dict(plain.state_dict())  # compiling renames nothing


@pytest.mark.slow
@pytest.mark.parametrize("compile", ["off", "on"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_five_hundred_steps_grow_nothing(compile, tmp_path):
    """Memory, open files, threads and compiled graphs of 500 steps, with validation and checkpoints on the way: what
    there is after 100 steps is there after 500, but for 3 % of memory; no graph is compiled after step 20."""
    file = write_run(tmp_path, rows=token_rows(40))
    pid = Path("/proc/self")
    state = []
    config = load_config(
        file, f"train.compile={compile}", "train.max_steps=500", "train.epochs=1000", "train.save_every=50",
        f"validate.path={tmp_path / 'rows.jsonl'}", "validate.every=100", "validate.prompts=4",
        "validate.max_new_tokens=8",
    )  # fmt: skip
    for report in fit(config):
        if report.step % 50 == 0:
            memory = int((pid / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            state.append((report.step, memory, len(list((pid / "fd").iterdir())), threading.active_count()))
    settled = {step: (memory, files, threads) for step, memory, files, threads in state if step >= 100}
    assert settled[500][0] < 1.03 * settled[100][0], state
    assert len({x[1:] for x in settled.values()}) == 1, state
    logged = {row["step"]: row.get("compiled_graphs") for row in curves.read(tmp_path / "out")}
    assert logged[20] == logged[500] and (logged[20] is None) == (compile == "off"), logged
