"""Laws of packed training: side by side or alone, a row teaches the same, and blocks never cross a border."""

import dataclasses

import numpy as np
import pytest
import torch
from helpers import MASK, V, make_drafter, target

from deepspec import Eagle3Config, LossConfig, Objective
from deepspec.data.batches import Batches
from deepspec.data.chat import Row
from deepspec.data.features import Live
from deepspec.data.rows import Rows

CPU = torch.device("cpu")
LENGTHS = (9, 14, 6, 11)
PACKED = [(0, (1, 2)), (1, (3, 0))]
ALONE = [(i, (i,)) for i in range(4)]


def make_rows() -> Rows:
    """Rows whose first tokens are a prompt, so that the answer of one never meets the answer of another."""
    random = np.random.default_rng(5)
    return Rows.of(
        Row(str(i), random.integers(0, V - 1, n).tolist(), [k >= 2 for k in range(n)]) for i, n in enumerate(LENGTHS)
    )


def drafter_of(kind, tgt, **changes):
    if kind != "eagle3":
        return make_drafter(kind, tgt, num_anchors=32, **changes)
    torch.manual_seed(1)
    return Eagle3Config(block_size=4, target_layer_ids=(0, 2), norm_before_fc=True).build(tgt.spec, tgt.vocab)


def learn(drafter, source, rows, picked, reduce):
    """Mean loss, metrics and gradients of a batch in which every possible anchor is taken. Flex attention has no
    backward on a CPU: there no gradients."""
    batch = Batches(rows, source, CPU).batch(picked)
    confidence = 1.0 if drafter.has_confidence else 0.0
    config = LossConfig(ce=0.3, kl=0.5, tv=0.7, confidence=confidence, slot_decay=0.8, reduce=reduce, chunk=16)
    drafter.zero_grad()
    with torch.set_grad_enabled(drafter.attention != "flex"):
        loss, weight, metrics = Objective(drafter, config)(batch)
    if loss.requires_grad:
        (loss / weight).backward()
    return loss / weight, metrics, {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("reduce", ["slot", "document"])
@pytest.mark.parametrize(
    ("kind", "backend", "window"),
    [
        ("dflash", "sdpa", None), ("dflash", "flex", None), ("rnn", "sdpa", None), ("rnn", "flex", None),
        ("vanilla", "sdpa", 6), ("vanilla", "flex", 6), ("eagle3", "auto", None),
    ],
)  # fmt: skip
def test_packed_is_unpacked(kind, backend, window, reduce):
    """Losses, counts and (SDPA) gradients to 1e-5, on both attention backends, with a window, for either reduction."""
    tgt, rows = target(), make_rows()
    source = Live(tgt, (0, 2), rows)
    drafter = drafter_of(kind, tgt, **({} if window is None else {"sliding_window": window}))
    drafter.attention = backend
    loss, metrics, grads = learn(drafter, source, rows, ALONE, reduce)
    loss_packed, metrics_packed, grads_packed = learn(drafter, source, rows, PACKED, reduce)
    torch.testing.assert_close(loss_packed, loss, atol=1e-5, rtol=1e-5)
    for name, (total, count) in metrics.items():
        assert metrics_packed[name][1] == count > 0, name
        torch.testing.assert_close(metrics_packed[name][0], total, atol=1e-4, rtol=1e-5)
    assert grads.keys() == grads_packed.keys() and bool(grads) == (backend != "flex")
    for name in grads:
        torch.testing.assert_close(grads_packed[name], grads[name], atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_no_block_sees_or_crosses_a_border(backend):
    """Another neighbour's features and tokens change nothing; a block's slots end where its row ends."""
    tgt, rows = target(), make_rows()
    drafter = make_drafter("vanilla", tgt, num_anchors=32)
    drafter.attention = backend
    drafter.requires_grad_(False)
    batch = Batches(rows, Live(tgt, (0, 2), rows), CPU).batch([(0, (1, 2))])
    border = LENGTHS[1]
    anchors, real = drafter.anchors(batch, torch.zeros(1, dtype=torch.long))
    assert border - 1 not in anchors[real] and (anchors[real] >= border).any()
    hidden = drafter.hidden(batch, anchors)
    features, tokens = batch.features.clone(), batch.tokens.clone()
    features[:, :border] = 7.0
    tokens[:, :border] = MASK - 1
    other = drafter.hidden(dataclasses.replace(batch, features=features, tokens=tokens), anchors)
    second = real & (anchors >= border)
    assert torch.equal(hidden[second], other[second]) and not torch.equal(hidden[real & ~second], other[real & ~second])


def test_an_unusable_row_leaves_its_neighbour_alone():
    """A row whose features hold NaN beside a good one: the loss is the good one's, and all gradients are finite."""
    tgt, rows = target(), make_rows()
    live = Live(tgt, (0, 2), rows)

    def spoil(tokens, counts, layers, original=tgt.packed_features):
        features, hidden = original(tokens, counts, layers)
        features.split(counts)[counts.index(LENGTHS[2])][3, 5] = torch.nan
        return features, hidden

    drafter = make_drafter("vanilla", tgt, num_anchors=32)
    loss, _, grads = learn(drafter, live, rows, [(0, (1,))], "slot")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tgt, "packed_features", spoil)
        loss_packed, _, grads_packed = learn(drafter, live, rows, [(0, (1, 2))], "slot")
    torch.testing.assert_close(loss_packed, loss, atol=1e-5, rtol=1e-5)
    for name in grads:
        torch.testing.assert_close(grads_packed[name], grads[name], atol=1e-5, rtol=1e-4)
