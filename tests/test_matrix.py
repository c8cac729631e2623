"""The laws of the contract over the whole matrix: every drafter, convention, head, window, width and reduced vocabulary
on every family. Cells that the quick ones do not stand for are marked slow.

Letters: B rows, T positions, A anchors, G slots, L tapped layers, D hidden, V vocabulary.
"""

import itertools
from dataclasses import replace

import matrix
import pytest
import torch
from helpers import LAYERS, V, make_batch, target
from matrix import CELLS, KEPT, G
from twins import naive_objective

import deepspec
from deepspec import Batch, LossConfig, Objective, Sampling, generate
from deepspec.modeling.drafter import gather_slots
from deepspec.sampling import uniforms

HOT = Sampling(temperature=1.0)
LOSSES = {
    "spark": LossConfig(ce=0.1, tv=0.9, confidence=1.0, slot_decay=0.8, chunk=16),
    "eagle": LossConfig(kl=1.0, slot_decay=0.8, reduce="document", chunk=16),
    "flash": LossConfig(ce=1.0, slot_decay=0.8, chunk=16),
}
cells = pytest.mark.parametrize(
    "cell", [pytest.param(c, marks=[] if matrix.quick(c) else pytest.mark.slow) for c in CELLS]
)


def loss_of(drafter, cell: str) -> LossConfig:
    return LOSSES["eagle" if "eagle" in cell else "spark" if drafter.has_confidence else "flash"]


def laws(drafter, batch: Batch, anchors: torch.Tensor) -> torch.Tensor:
    """Teacher-forced laws [B, A, G, Vd]."""
    prev = gather_slots(batch.tokens, anchors[..., None] + torch.arange(G))
    return drafter.logits(drafter.hidden(batch, anchors), prev).softmax(-1)


@cells
def test_training_is_decoding(cell):
    """Slot by slot, in a ragged batch with an idle row, the context taken in twice with a proposal in between: the law
    decoding draws from is what training computes after the same tokens, and 0 on tokens that are not kept."""
    family = cell.split("/")[-1]
    drafter, batch, ends = matrix.build(cell), make_batch(target(family), rows=3, length=15, seed=4), [14, 6, 10]
    follow = torch.cat([batch.tokens[:, 1:], batch.tokens[:, :1]], 1)
    pad = lambda x: torch.cat([x, torch.zeros_like(x[:1])])  # noqa: E731  a fourth row, never used
    u = uniforms(torch.arange(4)[:, None], torch.arange(G), 0)
    state, cut = drafter.new_state(4, 30), [9, 6, 1]
    drafter.observe(state, pad(batch.features), pad(follow), [*cut, 0])
    drafter.propose(state, HOT, u)
    shifted = [torch.stack([x.roll(-c, 0) for x, c in zip(y, cut)]) for y in (batch.features, follow)]
    drafter.observe(state, pad(shifted[0]), pad(shifted[1]), [e - c for e, c in zip(ends, cut)] + [0])
    proposal = drafter.propose(state, HOT, u)
    with torch.no_grad():
        for row, end in enumerate(ends):
            tokens = torch.cat([batch.tokens[row, : end + 1], proposal.tokens[row]])[None]
            junk = torch.full((1, tokens.shape[1] - end, batch.features.shape[2]), 9.0)  # none at or after the anchor
            features = torch.cat([batch.features[row : row + 1, :end], junk], 1)
            one = Batch(tokens, tokens > -1, features, torch.zeros(1, tokens.shape[1], batch.hidden.shape[2]))
            law = laws(drafter, one, torch.tensor([[end]]))[0, 0]
            torch.testing.assert_close(drafter.vocab.spread(law), proposal.probs[row], atol=2e-5, rtol=1e-4)
            if "reduced" in cell:
                assert set(proposal.tokens[row].tolist()) <= set(KEPT.tolist()) and law.shape[-1] == len(KEPT)


@cells
def test_loss_is_its_naive_twin_and_every_parameter_learns(cell):
    """Loss, weight and acceptance of a packed batch against plain loops; each parameter has a finite gradient that is
    not 0."""
    family = cell.split("/")[-1]
    drafter = matrix.build(cell)
    document = torch.tensor([[0] * 7 + [1] * 7, [0] * 12 + [-1] * 2])
    position = torch.tensor([[*range(7), *range(7)], [*range(12), 0, 0]])
    batch = make_batch(target(family), document=document, position=position)
    batch.loss_mask[1, 12:] = False
    anchors, real = drafter.anchors(batch, torch.arange(2))
    loss, weight, metrics = Objective(drafter, loss_of(drafter, cell))(batch, anchors=(anchors, real))
    loss.backward()
    assert weight > 0 and all(p.grad.isfinite().all() and p.grad.abs().max() > 0 for p in drafter.parameters())
    if "reduced" in cell:
        return  # its twin is in test_draft_vocab.py
    with torch.no_grad():
        twin, twin_weight, accept, mask = naive_objective(drafter, loss_of(drafter, cell), batch, anchors, real)
    torch.testing.assert_close((loss, weight), (twin, twin_weight), atol=1e-4, rtol=1e-4)
    for g in range(G):
        total, count = metrics[f"accept@{g}"]
        assert count == mask[..., g].sum() > 0
        torch.testing.assert_close(total, accept[..., g][mask[..., g]].sum(), atol=1e-4, rtol=1e-4)


@cells
def test_visibility_by_perturbation(cell):
    """What a slot knows: features before its anchor, in its own document and window. Not the anchor's own state, nor
    any after it; no other document, no other block, no hidden state of the target; of tokens, none after the slot's
    predecessor, and of other documents none."""
    family, window = cell.split("/")[-1], 6 if "/window/" in cell else 99
    drafter = matrix.build(cell)
    document = torch.tensor([[0] * 4 + [1] * 14])
    position = torch.tensor([[*range(4), *range(14)]])
    batch = make_batch(target(family), rows=1, length=18, document=document, position=position)
    anchors, places = torch.tensor([[6, 12]]), torch.arange(18)
    names = ("tokens", "loss_mask", "features", "hidden", "document", "position")
    fields = {n: getattr(batch, n).repeat_interleave(18, 0) for n in names}  # row i is changed at place i
    with torch.no_grad():
        base = laws(drafter, Batch(**fields), anchors.expand(18, 2))
        for i in range(2):  # other blocks
            alone = laws(drafter, batch, anchors[:, i : i + 1])[0, 0]
            torch.testing.assert_close(alone, base[0, i], atol=1e-6, rtol=1e-5)
        moved = {}
        for name in ("features", "tokens", "hidden"):
            x = fields[name].clone()
            x[places, places] = (x[places, places] + 1) % (V - 1) if name == "tokens" else x[places, places] + 1
            other = laws(drafter, Batch(**{**fields, name: x}), anchors.expand(18, 2))
            moved[name] = (other - base).abs().amax(-1)
    assert not moved["hidden"].any()
    for place, (i, a) in itertools.product(range(18), enumerate(anchors[0].tolist())):
        own = document[0, place] == 1
        by_features, by_token = moved["features"][place, i], moved["tokens"][place, i]
        seen = own and a - window < place < a
        assert bool((by_features > 1e-6).all() if seen else (by_features == 0).all()), (place, a)
        for g in range(G):
            if place > a + g or not own:
                assert by_token[g] == 0, (place, a, g)
            if place == a:
                assert by_token[g] > 1e-6, (place, a, g)


@cells
def test_a_file_holds_the_drafter(cell, tmp_path):
    """Settings, block and tensors come back, and nothing of the target is in it but a reduced head."""
    tgt = target(cell.split("/")[-1])
    drafter = matrix.build(cell)
    drafter.save(tmp_path / "d")
    back = deepspec.load_drafter(tmp_path / "d", tgt)
    assert back.config == drafter.config
    assert replace(back.spec, rope=()) == replace(
        drafter.spec, rope=()
    )  # a window is written with the full layers' rope
    batch, anchors = make_batch(tgt), torch.tensor([[4, 6], [3, 9]])
    with torch.no_grad():
        assert torch.equal(laws(drafter, batch, anchors), laws(back, batch, anchors))
    from safetensors.torch import load_file

    extra = load_file(tmp_path / "d" / "model.safetensors").keys() - drafter.state_dict().keys()
    assert extra == ({"lm_head.weight", "d2t", "t2d"} if "reduced" in cell else set())


@cells
def test_greedy_output_is_the_target_s(cell):
    """Prompts of several lengths, refilled rows: token for token the baseline's; sampled, the same in any batch."""
    tgt, drafter = target(cell.split("/")[-1]), matrix.build(cell)
    prompts = [[1, 2, 3], [4] * 9, [5, 6, 5, 6, 5]]
    base = generate(tgt, None, prompts, max_new_tokens=10)
    out = generate(tgt, drafter, prompts, max_new_tokens=10, concurrency=2)
    assert [g.tokens for g in out] == [g.tokens for g in base]
    hot = dict(max_new_tokens=6, sampling=Sampling(temperature=0.8, top_k=12))
    alone = generate(tgt, drafter, prompts, concurrency=1, **hot)
    assert [g.tokens for g in alone] == [g.tokens for g in generate(tgt, drafter, prompts, **hot)]


@pytest.mark.parametrize("kind", ["dflash", "dflash-masks", "vanilla", "rnn", "eagle3"])
def test_a_block_of_one_slot(kind):
    """Nothing needs a second slot: the loss is its twin's, gradients are finite, output is the target's, a round has
    one token or two."""
    tgt = target()
    drafter = matrix.build(f"{kind}/plain/qwen3", tgt, block_size=2 if "masks" in kind else 1)
    assert drafter.num_slots == 1
    batch = make_batch(tgt)
    anchors, real = drafter.anchors(batch, torch.arange(2))
    loss, weight, metrics = Objective(drafter, loss_of(drafter, kind))(batch, anchors=(anchors, real))
    loss.backward()
    assert (
        all(p.grad.isfinite().all() for p in drafter.parameters()) and drafter.layers[0].mlp.up_proj.weight.grad.any()
    )
    with torch.no_grad():
        twin = naive_objective(drafter, loss_of(drafter, kind), batch, anchors, real)
    torch.testing.assert_close((loss, weight), twin[:2], atol=1e-4, rtol=1e-4)
    tau, accepted = (total / count for total, count in (metrics["tau"], metrics["accept@0"]))
    assert tau == pytest.approx(1 + accepted) and set(metrics) >= {"tau", "accept@0"} and "accept@1" not in metrics
    prompts = [[1, 2, 3], [4] * 9]
    for sampling in (Sampling(), HOT):
        out = generate(tgt, drafter, prompts, max_new_tokens=10, sampling=sampling)
        assert all(1 <= g.tau <= 2 and {v for v, _ in g.rounds} <= {0, 1} for g in out)
        if not sampling.temperature:
            assert [g.tokens for g in out] == [g.tokens for g in generate(tgt, None, prompts, max_new_tokens=10)]


def test_the_quick_cells_cover_every_axis():
    """Each kind, each setting a kind has, and each family with each of the three drafters is in every run."""
    quick = {c for c in CELLS if matrix.quick(c)}
    assert {c.rsplit("/", 1)[0] for c in quick} == {c.rsplit("/", 1)[0] for c in CELLS}
    for family in matrix.FAMILIES:
        assert {"dflash", "vanilla", "eagle3"} <= {c.split("/")[0] for c in quick if c.endswith(family)}
    assert len(quick) < len(CELLS) / 2 and LAYERS[-1] < 4
