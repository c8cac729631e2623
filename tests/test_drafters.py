"""Laws of drafters: training and decoding are one function, a block sees what it should and nothing else.

Letters: B rows, T positions, A anchors, G slots, L tapped layers, D hidden, V vocabulary.
"""

import itertools

import pytest
import torch
from helpers import KINDS, LAYERS, MASK, G, V, clone, drafter_config, make_batch, make_drafter, read, target

from deepspec import Batch, Sampling
from deepspec.modeling import attention, two_parts
from deepspec.modeling.drafter import gather_slots

CLOSE = dict(atol=2e-5, rtol=1e-4)
TARGETS = ("qwen3", "llama", "qwen2")
HOT = Sampling(temperature=1.0)
kinds = pytest.mark.parametrize("kind", KINDS)
families = pytest.mark.parametrize("family", TARGETS)


def text(n: int, seed: int) -> list[int]:
    return torch.randint(0, V - 1, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def pad(rows: list[list[int]], width: int = 0) -> torch.Tensor:
    width = max(width, *map(len, rows))
    return torch.tensor([r + [0] * (width - len(r)) for r in rows])


def coins(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(rows, G, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def context(tgt, rows: list[list[int]]):
    """Features of all but each row's last token, the tokens after them, and counts: what decoding observes."""
    counts = [len(r) - 1 for r in rows]
    features, _, _ = read(tgt, pad(rows), [len(r) for r in rows])
    return features[:, : max(counts)], pad([r[1:] for r in rows]), counts


def decode(drafter, tgt, rows: list[list[int]], pieces=(1.0,), sampling=HOT):
    """The proposal after rows' last tokens, their context observed in as many pieces, each a share of every row."""
    features, following, counts = context(tgt, rows)
    state = drafter.new_state(len(rows), 48)
    done = [0] * len(rows)
    for share in pieces:
        upto = [round(c * share) for c in counts]
        part = [u - d for u, d in zip(upto, done)]
        f = torch.zeros(len(rows), max(1, *part), features.shape[2])
        n = torch.zeros(len(rows), max(1, *part), dtype=torch.long)
        for b, (d, u) in enumerate(zip(done, upto)):
            f[b, : u - d], n[b, : u - d] = features[b, d:u], following[b, d:u]
        drafter.observe(state, f, n, torch.tensor(part))
        done = upto
    assert done == counts
    return drafter.propose(state, sampling, coins(len(rows))), state


@torch.no_grad()
def teacher_forced(drafter, batch: Batch, anchors: torch.Tensor):
    """Laws [B, A, G, V] and confidence [B, A, G] of training."""
    hidden = drafter.hidden(batch, anchors)
    prev = gather_slots(batch.tokens, anchors[..., None] + torch.arange(drafter.num_slots))
    return HOT.probs(drafter.logits(hidden, prev)), drafter.confidence(hidden, prev).sigmoid()


ROWS = [text(9, 1), text(4, 2), text(13, 3), text(2, 4)]


def written(tgt, rows, proposal):
    """The rows with their drafts behind them, as one padded training batch, and each row's anchor [B, 1]."""
    whole = [r + p for r, p in zip(rows, proposal.tokens.tolist())]
    tokens = pad(whole, 20)
    counts = [len(w) for w in whole]
    features, hidden = tgt.features(tokens, counts, LAYERS)
    return Batch(tokens, torch.ones_like(tokens).bool(), features, hidden), torch.tensor([[len(r) - 1] for r in rows])


@kinds
@families
def test_training_is_decoding(kind, family):
    """What hidden, logits and confidence give at an anchor in a padded training batch is what propose gives after
    observing the same context, for rows of different lengths: the whole law of every slot, and the confidence."""
    tgt = target(family)
    drafter = make_drafter(kind, tgt)
    proposal, _ = decode(drafter, tgt, ROWS)
    batch, anchors = written(tgt, ROWS, proposal)
    probs, confidence = teacher_forced(drafter, batch, anchors)
    torch.testing.assert_close(proposal.probs, probs[:, 0], **CLOSE)
    torch.testing.assert_close(proposal.confidence, confidence[:, 0], **CLOSE)
    assert proposal.tokens.shape == (4, G) and proposal.probs.dtype == torch.float32
    assert drafter.num_slots == G
    if drafter.has_confidence:
        assert confidence.std() > 0.02  # an opinion, not a constant
    else:
        assert (proposal.confidence == 1).all()


@kinds
@families
def test_one_observe_is_two(kind, family):
    """Context taken in at once, in two ragged pieces, in many, and token by token: the same proposal."""
    tgt = target(family)
    drafter = make_drafter(kind, tgt)
    whole, _ = decode(drafter, tgt, ROWS)
    for pieces in ((0.4, 1.0), (0.0, 0.3, 0.3, 0.9, 1.0), [i / 12 for i in range(13)]):
        parts, _ = decode(drafter, tgt, ROWS, pieces)
        torch.testing.assert_close(parts.probs, whole.probs, **CLOSE)
        torch.testing.assert_close(parts.confidence, whole.confidence, **CLOSE)
        assert torch.equal(parts.tokens, whole.tokens)


@kinds
def test_packed_documents_are_rows_of_their_own(kind):
    """Documents packed into one row (document, position) draft as separate padded rows do, anchors at the same
    places."""
    tgt = target("llama")
    drafter = make_drafter(kind, tgt)
    docs = [text(7, 1), text(10, 2), text(6, 3)]
    apart = pad(docs)
    features, hidden = tgt.features(apart, [7, 10, 6], LAYERS)
    ones = torch.ones_like(apart).bool()
    want = teacher_forced(drafter, Batch(apart, ones, features, hidden), torch.tensor([[0, 2, 3]] * 3))
    join = lambda x: torch.cat([x[b, : len(d)] for b, d in enumerate(docs)])[None]  # noqa: E731
    document = torch.tensor([[b for b, d in enumerate(docs) for _ in d] + [-1] * 3])
    position = torch.tensor([[i for d in docs for i in range(len(d))] + [0] * 3])
    tail = lambda x: torch.cat([x, torch.full_like(x[:, :3], 3)], 1)  # noqa: E731
    packed = Batch(tail(join(apart)), tail(join(ones)), tail(join(features)), tail(join(hidden)), document, position)
    got = teacher_forced(drafter, packed, torch.tensor([[0, 2, 3, 7, 9, 10, 17, 19, 20]]))
    for a, b in zip(got, want):
        # a slot whose token before lies in another document or in padding is never supervised: 3 slots are left here
        torch.testing.assert_close(a[:, :, :3], b.flatten(0, 1)[None, :, :3], **CLOSE)


@kinds
def test_rows_are_independent(kind):
    """A training batch of four equals four batches of one, whatever stands in the padding."""
    tgt = target()
    drafter = make_drafter(kind, tgt)
    batch = make_batch(tgt, rows=4, length=15)
    anchors = torch.tensor([[1, 4, 5, 10]] * 4)
    whole = teacher_forced(drafter, batch, anchors)
    for b in range(4):
        fields = [getattr(batch, n)[b : b + 1] for n in ("tokens", "loss_mask", "features", "hidden")]
        alone = teacher_forced(drafter, Batch(*fields), anchors[b : b + 1])
        for a, w in zip(alone, whole):
            torch.testing.assert_close(a, w[b : b + 1], **CLOSE)


@kinds
def test_positions_default_to_counting_from_zero(kind):
    """No document and no position is one document a row at positions 0, 1, 2, ...; other positions are another law."""
    tgt = target()
    drafter = make_drafter(kind, tgt)
    batch, anchors = make_batch(tgt), torch.tensor([[2, 7], [3, 9]])
    place = torch.arange(14).expand(2, -1)
    fields = (batch.tokens, batch.loss_mask, batch.features, batch.hidden)
    base = teacher_forced(drafter, batch, anchors)[0]
    same = teacher_forced(drafter, Batch(*fields, torch.zeros_like(batch.tokens), place), anchors)[0]
    torch.testing.assert_close(base, same)
    # rotary attention sees differences only: a shift of all changes nothing, a stretch does
    shifted = teacher_forced(drafter, Batch(*fields, None, place + 5), anchors)[0]
    torch.testing.assert_close(base, shifted, atol=1e-4, rtol=1e-3)
    assert (teacher_forced(drafter, Batch(*fields, None, place * 3), anchors)[0] - base).abs().max() > 1e-3


# -- what a block sees ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dflash", "dflash-masks", "vanilla"])
@pytest.mark.parametrize("queries", [128, 1])
def test_what_a_block_sees(kind, queries, monkeypatch):
    """Perturb each target state and each token in turn: slot states of a block change for features strictly before its
    anchor in its own document, and for the anchor's own token; for nothing else. Anchors closer than the block; all in
    one slice of the attention, or each in its own."""
    monkeypatch.setattr(two_parts, "SLICE", queries)
    tgt = target()
    drafter = make_drafter(kind, tgt)
    document = torch.tensor([[0] * 6 + [1] * 7 + [-1], [0] * 12 + [-1] * 2])
    position = torch.tensor([[*range(6), *range(7), 0], [*range(12), 0, 0]])
    batch = make_batch(tgt, document=document, position=position)
    anchors = torch.tensor([[0, 2, 3, 7, 9, 10], [1, 4, 5, 6, 11, 0]])
    names = ("tokens", "loss_mask", "features", "hidden", "document", "position")
    places = list(itertools.product((0, 1), range(14)))
    # one batch of 28 copies of the two rows; in copy i, place i is changed
    fields = {n: torch.cat([getattr(batch, n)] * 28) for n in names}
    changed, where = torch.tensor([2 * i + row for i, (row, _) in enumerate(places)]), torch.tensor([*range(14)] * 2)
    change = {"tokens": lambda x: (x + 1) % (V - 1), "loss_mask": lambda x: ~x}
    with torch.no_grad():
        base = drafter.hidden(Batch(**fields), torch.cat([anchors] * 28))
        for name in ("features", "tokens", "hidden", "loss_mask"):
            x = fields[name].clone()
            x[changed, where] = change.get(name, lambda x: x + 1)(x[changed, where])
            other = drafter.hidden(Batch(**{**fields, name: x}), torch.cat([anchors] * 28))
            moved = (other - base).abs().amax(-1).unflatten(0, (28, 2))  # [28, B, A, G]
            for (i, (row, place)), b, a in itertools.product(enumerate(places), (0, 1), range(6)):
                at = int(anchors[b, a])
                sees = b == row and document[b, at] == document[row, place]
                expected = sees and {"features": place < at, "tokens": place == at}.get(name, False)
                if expected:
                    assert (moved[i, b, a] > 1e-5).all(), (name, row, place, b, a)
                else:
                    assert (moved[i, b, a] < 1e-6).all(), (name, row, place, b, a)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn", "rnn-masks"])
def test_what_a_slot_knows_of_its_block(kind):
    """The sequential head's row at slot g reads the token before it; rnn also reads every earlier one, vanilla and
    gated none; no head reads a later one."""
    tgt = target()
    drafter = make_drafter(kind, tgt)
    hidden = torch.randn(1, 1, G, tgt.spec.dim)
    prev = torch.randint(0, V - 1, (1, 1, G))
    with torch.no_grad():
        base = drafter.rows(hidden, prev)
        assert base.shape == (1, 1, G, 6)
        for place in range(G):
            other = prev.clone()
            other[..., place] = (other[..., place] + 1) % V
            moved = (drafter.rows(hidden, other) - base).abs().amax(-1)[0, 0] > 1e-6
            assert moved.tolist() == [g == place or (g > place and "rnn" in kind) for g in range(G)]


@kinds
def test_logits_are_base_plus_rows(kind):
    """logits == vocab.logits(hidden) + rows @ rows_out.T, R = 0 without a head; so slots are independent given rows."""
    tgt = target()
    drafter = make_drafter(kind, tgt)
    hidden, prev = torch.randn(2, 3, G, tgt.spec.dim), torch.randint(0, V, (2, 3, G))
    with torch.no_grad():
        rows, want = drafter.rows(hidden, prev), tgt.vocab.logits(hidden)
        assert rows.shape[-1] == (0 if drafter.rows_out is None else drafter.rows_out.shape[1])
        if drafter.rows_out is not None:
            assert rows.abs().max() > 1e-2
            want = want + rows @ drafter.rows_out.T
        torch.testing.assert_close(drafter.logits(hidden, prev), want, **CLOSE)


@pytest.mark.parametrize("markov", [True, False])
def test_confidence_reads_the_token_before_where_asked(markov):
    """With confidence_with_markov the confidence moves with prev, without it it does not; stop-gradient keeps its loss
    from the backbone and from the Markov embedding, and from nothing of its own."""
    tgt = target()
    hidden, prev = torch.randn(1, 2, G, tgt.spec.dim), torch.zeros(1, 2, G, dtype=torch.long)
    drafter = make_drafter("vanilla", tgt, confidence_with_markov=markov)
    assert (not torch.equal(drafter.confidence(hidden, prev), drafter.confidence(hidden, prev + 1))) == markov
    for stop in (False, True):
        drafter = make_drafter("vanilla", tgt, confidence_with_markov=markov, confidence_stop_gradient=stop)
        h = hidden.clone().requires_grad_()
        drafter.confidence(h, prev).sum().backward()
        assert (h.grad is None) == stop and drafter.confidence_head.proj.weight.grad.abs().sum() > 0
        grad = drafter.markov_head.markov_w1.weight.grad
        assert (grad is not None and bool(grad.any())) == (markov and not stop)


def test_layers_tapped_and_layers_drafted_are_free_of_each_other():
    """1 or 3 draft layers over 1 or 4 tapped ones: train == decode for each."""
    tgt = target()
    for layers, depth in itertools.product(((3,), (0, 1, 2, 3)), (1, 3)):
        drafter = make_drafter("vanilla", tgt, target_layer_ids=layers, num_draft_layers=depth)
        tokens = torch.tensor([text(9, 1)])
        features, _ = tgt.features(tokens, [9], layers)
        state = drafter.new_state(1, 20)
        drafter.observe(state, features[:, :5], tokens[:, 1:6], [5])
        proposal = drafter.propose(state, HOT, coins(1))
        full = torch.cat([tokens[:, :6], proposal.tokens], 1)
        f, h = tgt.features(full, [10], layers)
        probs, _ = teacher_forced(drafter, Batch(full, full > -1, f, h), torch.tensor([[5]]))
        torch.testing.assert_close(proposal.probs, probs[:, 0], **CLOSE)


# -- backends ------------------------------------------------------------------------------------------------------


def backbone(drafter, batch, anchors, backend):
    drafter.attention = backend
    return drafter.hidden(batch, anchors)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("kind, count", [("dflash", 1), ("dflash", 5), ("dflash-masks", 33)])
def test_flex_equals_sdpa(family, kind, count):
    """Both backends give the same states, with grouped heads and without, packed documents, anchors closer than the
    block, and A * block no multiple of 128 (4, 20, 165). Forward only: flex has no backward on the CPU."""
    tgt = target(family)
    drafter = make_drafter(kind, tgt)
    document = torch.tensor([[0] * 20 + [1] * 20, [0] * 33 + [-1] * 7])
    position = torch.tensor([[*range(20)] * 2, [*range(33)] + [0] * 7])
    batch = make_batch(tgt, length=40, document=document, position=position)
    anchors = torch.randint(0, 33, (2, count), generator=torch.Generator().manual_seed(0)).sort(1).values
    anchors[:, 0] = 0  # sees nothing but itself
    with torch.no_grad():
        flex, sdpa = (backbone(drafter, batch, anchors, b) for b in ("flex", "sdpa"))
    torch.testing.assert_close(flex, sdpa, **CLOSE)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_slices_and_what_is_kept_change_nothing(family, monkeypatch):
    """Attention in one slice of anchors, in slices that do not divide them and one by one, scores kept for backward or
    made again: the same values and gradients."""
    tgt = target(family)
    batch, anchors = make_batch(tgt), torch.tensor([[0, 2, 3, 5, 8], [1, 4, 6, 7, 9]])
    made, real = [], two_parts._scores
    monkeypatch.setattr(two_parts, "_scores", lambda *a: made.append(1) or real(*a))
    results, counts = [], []
    for queries, kept in ((1000, 1 << 26), (1000, 1), (3 * G, 1 << 26), (3 * G, 1), (1, 1)):
        monkeypatch.setattr(two_parts, "SLICE", queries)
        monkeypatch.setattr(attention, "_SCORES_KEPT", kept)
        drafter = make_drafter("dflash", tgt)
        made.clear()
        hidden = drafter.hidden(batch, anchors)
        (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
        results.append((hidden.detach(), {n: p.grad for n, p in drafter.named_parameters()}))
        counts.append(len(made))
    group = drafter.spec.heads // drafter.spec.kv_heads
    slices = [-(-5 // -(-queries // (group * G))) for queries in (1000, 1000, 3 * G, 3 * G, 1)]
    layers = len(drafter.layers)
    assert slices[0] == 1 < slices[2] < slices[4] == 5
    assert counts == [layers * n * (2 if again else 1) for n, again in zip(slices, (0, 1, 0, 1, 1))]
    for hidden, grads in results[1:]:
        torch.testing.assert_close(hidden, results[0][0], **CLOSE)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, results[0][1][name], atol=1e-4, rtol=1e-3)


# -- anchors -------------------------------------------------------------------------------------------------------


@kinds
def test_anchors_stand_where_decoding_could(kind):
    """Real anchors are distinct, ascending positions of supervised tokens whose successor, in the same document, is
    supervised too; A is fixed; where there are too few, the rest is not real and stands at 0."""
    drafter = make_drafter(kind, target(), num_anchors=7)
    tgt = target()
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        T = int(torch.randint(1, 30, (1,), generator=g))
        mask = torch.rand(3, T, generator=g) < (0.9, 0.4, 0.0)[seed % 3]
        document = (torch.rand(3, T, generator=g) < 0.2).long().cumsum(1)
        batch = make_batch(tgt, rows=3, length=T, loss_mask=mask, document=document)
        anchors, real = drafter.anchors(batch, torch.tensor([1, 2, 3]) + seed)
        assert anchors.shape == real.shape == (3, 7) and real.dtype == torch.bool
        for b in range(3):
            usable = {t for t in range(T - 1) if mask[b, t] and mask[b, t + 1] and document[b, t] == document[b, t + 1]}
            chosen = anchors[b][real[b]].tolist()
            assert chosen == sorted(set(chosen)) and set(chosen) <= usable
            assert len(chosen) == min(7, len(usable))
            assert not anchors[b][~real[b]].any() and real[b].tolist() == sorted(real[b].tolist(), reverse=True)


@kinds
def test_anchors_depend_on_the_rows_own_seed_and_mask(kind):
    """Deterministic; the same for a row alone, in any order and with more padding; other seeds, other anchors."""
    tgt = target()
    drafter = make_drafter(kind, tgt)
    mask = torch.ones(4, 24, dtype=torch.bool)
    mask[:, :3] = False
    mask[2, 10:] = False
    batch = make_batch(tgt, rows=4, length=24, loss_mask=mask)
    seeds = torch.tensor([5, -1, 2**62, 5])
    anchors, real = drafter.anchors(batch, seeds)
    assert torch.equal(anchors[0], anchors[3]) and not torch.equal(anchors[0], anchors[1])
    again = drafter.anchors(make_batch(tgt, rows=4, length=24, loss_mask=mask, seed=9), seeds)
    assert torch.equal(again[0], anchors) and torch.equal(again[1], real)
    longer = torch.cat([mask[[2, 1]], torch.zeros(2, 9, dtype=torch.bool)], 1)
    part, part_real = drafter.anchors(make_batch(tgt, rows=2, length=33, loss_mask=longer), seeds[[2, 1]])
    assert torch.equal(part, anchors[[2, 1]]) and torch.equal(part_real, real[[2, 1]])


def test_anchors_are_drawn_evenly():
    """Over 3,000 seeds every usable position is chosen equally often: chi-square of 12 positions, 5 chosen at a time
    (without replacement, which only lowers the statistic). Fixed seeds; fresh ones would fail in under 1 of 10,000."""
    from helpers import chi_square_p

    tgt = target()
    batch = make_batch(tgt, rows=1, length=13, loss_mask=torch.ones(1, 13, dtype=torch.bool))
    batch = Batch(
        *(
            getattr(batch, n).expand(3000, *getattr(batch, n).shape[1:])
            for n in ("tokens", "loss_mask", "features", "hidden")
        )
    )
    anchors, real = make_drafter("dflash", tgt).anchors(batch, torch.arange(3000))
    assert real.all()
    assert chi_square_p(torch.bincount(anchors.flatten(), minlength=13)[:12], torch.ones(12)) > 1e-4


# -- decoding state ------------------------------------------------------------------------------------------------


@kinds
def test_propose_leaves_the_state_as_it_was(kind):
    """Proposing once or thrice, hot or greedy, changes neither the next proposal nor what is observed after."""
    tgt = target()
    drafter = make_drafter(kind, tgt)
    want, quiet = decode(drafter, tgt, ROWS)
    _, busy = decode(drafter, tgt, ROWS)
    drafter.propose(busy, Sampling(), coins(4, 1))
    again = drafter.propose(busy, HOT, coins(4))
    assert torch.equal(again.tokens, want.tokens) and torch.equal(again.probs, want.probs)
    features = torch.randn(4, 2, len(LAYERS) * tgt.spec.dim)
    tokens = torch.randint(0, V - 1, (4, 2))
    laws = []
    for state in (quiet, busy):
        drafter.observe(state, features, tokens, [2, 0, 1, 2])
        laws.append(drafter.propose(state, HOT, coins(4)).probs)
    torch.testing.assert_close(laws[0], laws[1], **CLOSE)
    assert (laws[0][0] - want.probs[0]).abs().max() > 1e-3  # and something new was taken in


@kinds
def test_reset_rows_start_anew_and_leave_the_others_alone(kind):
    """With some rows reset, the rest propose as before; a reset row that observes another text proposes as a fresh
    state does, next to rows that were never reset."""
    tgt = target()
    drafter = make_drafter(kind, tgt)
    want, state = decode(drafter, tgt, ROWS)
    drafter.reset_rows(state, [0, 2])
    part = drafter.propose(state, HOT, coins(4))
    for b in (1, 3):
        torch.testing.assert_close(part.probs[b], want.probs[b], **CLOSE)
        torch.testing.assert_close(part.confidence[b], want.confidence[b], **CLOSE)
    assert torch.equal(part.tokens[[1, 3]], want.tokens[[1, 3]]) and part.tokens.shape == want.tokens.shape
    fresh_rows = [text(6, 8), ROWS[1], text(11, 9), ROWS[3]]
    fresh, _ = decode(drafter, tgt, fresh_rows)
    features, following, counts = context(tgt, fresh_rows)
    drafter.observe(state, features, following, [counts[0], 0, counts[2], 0])
    reused = drafter.propose(state, HOT, coins(4))
    torch.testing.assert_close(reused.probs, fresh.probs, **CLOSE)
    assert torch.equal(reused.tokens, fresh.tokens)


@kinds
def test_a_batch_proposes_as_its_rows_do(kind):
    """A ragged batch's proposals are those of each row alone: same uniforms, same tokens."""
    tgt = target()
    drafter = make_drafter(kind, tgt)
    whole, _ = decode(drafter, tgt, ROWS)
    for b, row in enumerate(ROWS):
        features, following, counts = context(tgt, [row])
        state = drafter.new_state(1, 48)
        drafter.observe(state, features, following, counts)
        alone = drafter.propose(state, HOT, coins(4)[b : b + 1])
        assert torch.equal(alone.tokens[0], whole.tokens[b])
        torch.testing.assert_close(alone.probs[0], whole.probs[b], **CLOSE)


@kinds
def test_proposed_tokens_come_from_the_proposed_law(kind):
    """Token g is the inverse CDF of probs[g] at uniform g; at temperature 0 the law is a one-hot of the token; filters
    apply to the drafter as to the target."""
    from deepspec.sampling import draw

    tgt = target()
    drafter = make_drafter(kind, tgt)
    for sampling in (HOT, Sampling(), Sampling(temperature=0.8, top_k=3), Sampling(temperature=1.0, top_p=0.5)):
        proposal, _ = decode(drafter, tgt, ROWS, sampling=sampling)
        assert torch.equal(draw(proposal.probs, coins(4)), proposal.tokens)
        torch.testing.assert_close(proposal.probs.sum(-1), torch.ones(4, G))
        if sampling.temperature == 0:
            assert torch.equal(proposal.probs, torch.nn.functional.one_hot(proposal.tokens, V).float())
        if sampling.top_k:
            assert ((proposal.probs > 0).sum(-1) == 3).all()


def test_state_of_a_row_at_full_length():
    """A row may fill its state to max_length and still propose."""
    tgt = target()
    drafter = make_drafter("vanilla", tgt)
    state = drafter.new_state(1, 6)
    drafter.observe(state, torch.randn(1, 6, len(LAYERS) * tgt.spec.dim), torch.randint(0, V, (1, 6)), [6])
    assert drafter.propose(state, HOT, coins(1)).probs.isfinite().all()


# -- dtypes and ownership ------------------------------------------------------------------------------------------


@kinds
def test_moving_a_drafter_leaves_the_target_alone(kind):
    """to(bfloat16), half(), double(): the vocabulary keeps its dtype, storage and values; rotary frequencies stay
    float32 to the bit; a bfloat16 drafter proposes near what the float32 one does."""
    tgt = target()
    drafter = make_drafter(kind, tgt)
    exact = drafter.rotary.inv_freq.clone()
    head, values = tgt.vocab.head.data_ptr(), tgt.vocab.head.clone()
    want, _ = decode(drafter, tgt, ROWS)
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.bfloat16):
        drafter.to(dtype)
        assert drafter.fc.weight.dtype == dtype
        assert tgt.vocab.head.dtype == torch.float32 and tgt.vocab.head.data_ptr() == head
        assert drafter.rotary.inv_freq.dtype == torch.float32 and torch.equal(drafter.rotary.inv_freq, exact)
    assert torch.equal(tgt.vocab.head, values) and drafter.vocab is tgt.vocab
    near, _ = decode(drafter, tgt, ROWS)
    assert (near.probs[:, 0] - want.probs[:, 0]).abs().max() < 0.1


@kinds
def test_a_drafter_owns_its_weights_only(kind):
    """No tensor of the target is a parameter, buffer or saved tensor of the drafter, and a copy shares the vocabulary's
    values, not its own weights."""
    drafter = make_drafter(kind, target())
    frozen = {target().vocab.head.data_ptr(), target().vocab.embedding.data_ptr()}
    own = [*drafter.parameters(), *drafter.buffers()]
    assert not frozen & {p.data_ptr() for p in own}
    assert all(p.requires_grad for p in drafter.parameters())
    assert not any("embed" in n or "lm_head" in n or "vocab" in n or "inv_freq" in n for n in drafter.state_dict())
    other = clone(drafter)
    assert not {p.data_ptr() for p in other.parameters()} & {p.data_ptr() for p in drafter.parameters()}


def test_masks_predict_their_own_position():
    """Without sample_from_anchor the slots are those of the masks, places 1 and on of the same block; the anchor's own
    place is no slot."""
    tgt = target()
    masks = make_drafter("dflash-masks", tgt)
    whole = make_drafter("dflash-masks", tgt, sample_from_anchor=True)
    batch, anchors = make_batch(tgt), torch.tensor([[2, 6], [3, 9]])
    with torch.no_grad():
        states = whole.hidden(batch, anchors)
        assert states.shape[2] == 5 and torch.equal(masks.hidden(batch, anchors), states[:, :, 1:])


def test_masks_fill_the_block():
    """The slots after the anchor hold the mask token's embedding: another mask id is another law."""
    tgt = target()
    a = make_drafter("dflash", tgt)
    b = make_drafter("dflash", tgt, mask_token_id=MASK - 1)
    b.load_state_dict(a.state_dict())
    batch, anchors = make_batch(tgt), torch.tensor([[2], [3]])
    with torch.no_grad():
        assert (a.hidden(batch, anchors) - b.hidden(batch, anchors)).abs().max() > 1e-3


@kinds
def test_settings_that_cannot_be_are_refused(kind):
    """Block size, layers, anchors, rank and mask out of range: ConfigError that names the setting and its value."""
    from deepspec import ConfigError

    bad = [dict(block_size=0), dict(target_layer_ids=()), dict(target_layer_ids=(2, 1)), dict(target_layer_ids=(-1, 1)),
           dict(target_layer_ids=(1, 1)), dict(num_draft_layers=0), dict(num_anchors=0), dict(mask_token_id=-1),
           dict(block_size="7"), dict(num_anchors=2.5), dict(sample_from_anchor=1)]  # fmt: skip
    bad += [dict(block_size=1)] if "masks" in kind else []
    bad += [dict(markov_rank=-1), dict(markov_head_type="lstm")] if "dflash" not in kind else []
    for changes in bad:
        name = next(iter(changes))
        with pytest.raises(ConfigError, match=name):
            drafter_config(kind, **changes)
