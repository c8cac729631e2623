"""Laws of what a graph of the drafters' attention keeps: as long as it is needed, in whatever order it is asked.

Letters: B rows, T positions, A groups, G slots, Q heads, K kv heads, H head dim.
"""

import gc
import itertools
import weakref

import pytest
import torch
from helpers import LAYERS, make_batch, make_drafter, target
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from deepspec import Eagle3Config, Target
from deepspec.modeling import own, two_parts
from deepspec.modeling.drafter import Drafter
from deepspec.modeling.two_parts import TwoParts
from deepspec.modeling.unrolled import Unrolled


def drafter_of(kind: str, tgt: Target) -> Drafter:
    if kind != "eagle3":
        return make_drafter(kind, tgt)
    return Eagle3Config(block_size=3, target_layer_ids=LAYERS).build(tgt.spec, tgt.vocab)


class Saved:
    """A tensor that autograd keeps."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_graph_is_freed_with_its_result(kind, backward):
    """What a forward pass keeps is gone once its result is, backward or not, without a garbage collector."""
    saved: list[weakref.ref[Saved]] = []

    def pack(x: Tensor) -> Saved:
        kept = Saved(x.detach())  # a result that held its own node would be a circle of the test's
        saved.append(weakref.ref(kept))
        return kept

    tgt = target("qwen3")
    batch, built = make_batch(tgt), drafter_of(kind, tgt)
    gc.collect()
    gc.disable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.x):
            hidden = built.hidden(batch, torch.tensor([[1, 4, 6], [2, 3, 5]]))
        assert sum(x() is not None for x in saved) > 20
        if backward:
            hidden.sum().backward()
        del hidden
        assert not any(x() is not None for x in saved)
    finally:
        gc.enable()


def test_a_checkpointed_layer_keeps_no_keys(monkeypatch):
    """Own keys and values of layers that are recomputed are gone after the forward pass."""
    tgt = target("qwen3")
    drafter, batch = make_drafter("dflash", tgt), make_batch(tgt)
    made: list[StorageWeakRef] = []
    real = own.Own.put

    def put(self: own.Own, pair: tuple[Tensor, Tensor]) -> slice:
        at = real(self, pair)
        made.extend(StorageWeakRef(x.untyped_storage()) for x in (self.keys, self.values))
        return at

    monkeypatch.setattr(own.Own, "put", put)
    for checkpointed in (False, True):
        drafter.checkpoint_layers = checkpointed
        made.clear()
        hidden = drafter.hidden(batch, torch.tensor([[1, 4, 6], [2, 3, 5]]))
        assert len(made) == 2 * len(drafter.layers) and {x.expired() for x in made} == {checkpointed}
        del hidden


def looks(G: int = 3) -> tuple[list[Tensor], list[Tensor]]:
    """What G slots see that add keys one after another, and all that they are made of: queries, keys and values."""
    B, T, A, Q, K, H = 2, 5, 3, 4, 2, 4
    torch.manual_seed(0)
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    view = Unrolled(torch.tensor([[0, 2, 4], [1, 1, 3]]), torch.zeros(B, T, dtype=torch.long), 0.5, (Q, K), G)
    inputs = [make(B, T, K, H), make(B, T, K, H)]
    view.start(*inputs)
    out = []
    for g in range(G):
        if g:
            inputs += [make(B, A, K, H), make(B, A, K, H)]
            view.add(*inputs[-2:])
        inputs.append(make(B, A, Q, H))
        out.append(view(inputs[-1]))
    return out, inputs


def test_gradients_do_not_depend_on_what_else_is_asked():
    """Of each input alone, of pairs, of every slot's result alone, one pass after another over the same graph: each is
    what one pass over a graph of its own gives."""
    out, inputs = looks()
    for wanted in (*([i] for i in range(len(inputs))), *map(list, itertools.combinations(range(len(inputs)), 2))):
        for slots in ([0, 1, 2], [1], [2]):
            fresh, leaves = looks()
            args = sum(fresh[g].square().sum() for g in slots), leaves
            right = torch.autograd.grad(*args, allow_unused=True)
            loss = sum(out[g].square().sum() for g in slots)
            found = torch.autograd.grad(loss, [inputs[i] for i in wanted], retain_graph=True, allow_unused=True)
            for i, x in zip(wanted, found, strict=True):
                assert (x is None) == (right[i] is None)
                assert x is None or torch.allclose(x, right[i], rtol=0, atol=1e-12), (wanted, slots, i)


def test_bfloat16_gradients_add_up_in_float32(monkeypatch):
    """Of values that eight slices look at: within what rounding once, and weights in bfloat16, explain."""
    monkeypatch.setattr(two_parts, "SLICE", 1)
    T, A = 64, 512
    torch.manual_seed(0)
    q, k, v = torch.randn(1, A, 1, 8), torch.randn(1, T, 1, 8), torch.randn(1, T, 1, 8)

    def gradient(dtype: torch.dtype) -> Tensor:
        view = Unrolled(torch.full((1, A), T - 1), torch.zeros(1, T, dtype=torch.long), 0.3, (1, 1), 1)
        assert len(view.parts.slices) == 8
        values = v.to(dtype).requires_grad_()
        view.start(k.bfloat16().to(dtype), values)
        return torch.autograd.grad(view(q.bfloat16().to(dtype)).sum(), values)[0]

    found, right = gradient(torch.bfloat16), gradient(torch.float64)
    assert ((found - right) / right).abs().max() < 2**-8 + 2**-10


def test_without_gradients_scores_of_two_slices_are_there_at_once(monkeypatch):
    """At most: a slice's are gone once the next one's are made."""
    monkeypatch.setattr(two_parts, "SLICE", 4)
    made: list[StorageWeakRef] = []
    real = two_parts._scores

    def scores(*args) -> Tensor:
        assert sum(not x.expired() for x in made) <= 1
        found = real(*args)
        made.append(StorageWeakRef(found.untyped_storage()))
        return found

    monkeypatch.setattr(two_parts, "_scores", scores)
    tgt = target("qwen3")
    with torch.no_grad():
        for kind in ("dflash", "eagle3"):
            drafter_of(kind, tgt).hidden(make_batch(tgt), torch.tensor([[1, 4, 6, 7], [2, 3, 5, 8]]))
    assert len(made) > 12


@pytest.mark.parametrize("slices", [1, 2])
def test_a_query_that_sees_no_place_is_nan(slices, monkeypatch):
    """And the one beside it is as it is alone, in one slice with it or not."""
    monkeypatch.setattr(two_parts, "SLICE", 4 // slices)
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 2, 1, 4), torch.randn(1, 3, 4), torch.randn(1, 3, 4)
    sees = torch.tensor([[False] * 3, [True, False, True]])[None, :, None]
    view = TwoParts(lambda cut: sees[:, cut], (1, 2, 2, 3), (1, 1), kept=0)
    assert len(view.slices) == slices
    out = view(q, (k, v), own.Own(0), 0.5)[0, :, :, 0]
    right = (q[0, 1, :, 0] @ k[0, [0, 2]].T * 0.5).softmax(-1) @ v[0, [0, 2]]
    assert out[0].isnan().all() and torch.allclose(out[1], right, atol=1e-6)
