"""Laws of sizes rounded up to few: what is added changes nothing, and products come in few shapes."""

import dataclasses

import pytest
import torch
from helpers import LAYERS, drafter_config, make_batch, make_drafter, target, token_rows, write_run
from test_pace import LOSS, close, learn
from torch.utils._python_dispatch import TorchDispatchMode

import deepspec
from deepspec import Objective
from deepspec.modeling import draft_vocab, packed, sizes, two_parts
from deepspec.modeling.sizes import few, rounded
from deepspec.modeling.vocab import Vocab
from deepspec.train import divergence, step


def test_few_sizes():
    """At most an eighth more, eight an octave, itself once rounded; larger sizes never get smaller ones."""
    found = [few(n) for n in range(4097)]
    assert found[0] == 0 and found == sorted(found)
    assert all(n <= m <= n * 9 / 8 and few(m) == m for n, m in enumerate(found))
    assert all(len({m for m in found if low < m <= 2 * low}) <= 8 for low in (16, 64, 512, 2048))


def test_where_sizes_count():
    """Two-byte products on a CPU alone, by autocast's dtype where none is given."""
    assert rounded(393, "cpu", torch.bfloat16) == 416 and rounded(393, "cuda", torch.bfloat16) == 393
    assert rounded(393, "cpu", torch.float32) == rounded(393, "cpu") == 393
    with torch.autocast("cpu", torch.bfloat16):
        assert rounded(393, "cpu") == 416


@pytest.mark.parametrize("kind", ["dflash", "vanilla", "rnn-masks", "windowed", "kept", "capped", "eagle3"])
def test_what_is_added_changes_nothing(kind, monkeypatch):
    """Rows of zeros in the objective's products and places that no query of a slice sees: the same loss and gradients,
    packed documents and slices of few queries included."""
    tgt = target()
    monkeypatch.setattr(two_parts, "SLICE", 1)
    torch.manual_seed(0)
    if kind == "eagle3":
        config = deepspec.Eagle3Config(block_size=4, target_layer_ids=LAYERS, num_anchors=6)
        drafter = config.build(tgt.spec, tgt.vocab)
    elif kind == "kept":
        kept = torch.arange(1, tgt.vocab.size, 2)
        config = drafter_config("vanilla", draft_vocab_size=len(kept))
        drafter = config.build(tgt.spec, draft_vocab.reduce(tgt.vocab, kept))
    else:
        window = {"sliding_window": 6} if kind == "windowed" else {}
        drafter = make_drafter("vanilla" if kind in ("windowed", "capped") else kind, tgt, **window)
    if kind == "capped":
        object.__setattr__(drafter, "vocab", Vocab(tgt.vocab.embedding, tgt.vocab.head, softcap=3.0))
    document = torch.tensor([[0] * 17 + [1] * 12, [0] * 9 + [1] * 9 + [2] * 9 + [-1] * 2])
    batch, seeds = make_batch(tgt, length=29, document=document), torch.arange(2)
    loss = dataclasses.replace(LOSS, chunk=7) if drafter.has_confidence else dataclasses.replace(LOSS, confidence=0.0)
    want = learn(drafter, Objective(drafter, loss), batch, seeds)
    calls = []

    def more(n, *_):
        calls.append(n)
        return few(n) + 3

    for module in (two_parts, divergence):
        monkeypatch.setattr(module, "rounded", more)
    close(learn(drafter, Objective(drafter, loss), batch, seeds), want, 1e-5)
    assert len(calls) > 5


class Shapes(TorchDispatchMode):
    """Which shapes bfloat16 products have."""

    def __init__(self):
        super().__init__()
        self.found: set = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        bf16 = any(isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 for x in args)
        if bf16 and name in ("mm", "bmm", "addmm", "addmm_", "baddbmm_", "mkldnn::_linear_pointwise"):
            self.found.add((name, *(tuple(x.shape) for x in args[:3] if isinstance(x, torch.Tensor))))
        return func(*args, **(kwargs or {}))


def shapes(tmp_path, name) -> int:
    """How many shapes the products of a short run in bfloat16 have, over rows of many lengths."""
    rows = [row for length in range(140, 190, 2) for row in token_rows(1, length=length, seed=length)]
    file = write_run(tmp_path, rows=rows, vocab_size=512)
    config = deepspec.load_config(
        file, "train.precision=bf16", "train.max_steps=18", f"out={tmp_path / name}", "data.min_supervised=4"
    )
    with Shapes() as mode:
        for _ in deepspec.fit(config):
            pass
    return len(mode.found)


@pytest.mark.skipif(not packed.supported(), reason="no bfloat16 products of oneDNN here")
def test_a_run_has_few_shapes(tmp_path, monkeypatch):
    """A run over rows of twenty-five lengths has less than half of the shapes that it has with lengths as they are."""
    found = shapes(tmp_path, "few")
    for module in (sizes, packed, step):
        monkeypatch.setattr(module, "few", lambda n: n)
    assert 2 * found < shapes(tmp_path, "exact")
