"""Laws of the objective: it equals its naive twin in value and gradient, and never holds [slots, V].

Letters: B rows, T positions, A anchors, G slots, N supervised slots, D hidden, R rank, V vocabulary.
"""

import types

import pytest
import torch
import worlds
from helpers import KINDS, G, V, clone, make_batch, make_drafter, target
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from twins import naive_divergence, naive_objective

from deepspec import Batch, LossConfig, Objective
from deepspec.modeling.drafter import Drafter
from deepspec.modeling.spec import BlockSpec
from deepspec.modeling.vocab import Vocab
from deepspec.train import divergence as divergence_module

TERMS = {
    "ce": dict(ce=1.0),
    "kl": dict(kl=0.7),
    "tv": dict(tv=0.9),
    "ce+tv": dict(ce=0.1, tv=0.9),
    "ce+kl": dict(ce=0.4, kl=0.6),
    "kl+tv": dict(kl=0.3, tv=0.7),
    "all": dict(ce=0.2, kl=0.3, tv=0.5),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def capped(tgt, softcap):
    """The target's vocabulary, with a cap on its logits."""
    return Vocab(tgt.vocab.embedding, tgt.vocab.head, softcap=softcap)


def with_vocab(drafter: Drafter, vocab: Vocab) -> Drafter:
    drafter = clone(drafter)
    object.__setattr__(drafter, "vocab", vocab)
    return drafter


def setting(tgt, drafter, *, documents=True, seed=0):
    """A batch with packed documents and gaps in the mask, and hand-picked anchors: near the end, not real, too
    close."""
    document = torch.tensor([[0] * 8 + [1] * 8, [0] * 11 + [2] * 3 + [-1] * 2]) if documents else None
    batch = make_batch(tgt, length=16, seed=seed, document=document)
    anchors = torch.tensor([[0, 1, 3, 4, 8, 14], [2, 5, 9, 11, 12, 0]])
    real = torch.tensor([[True] * 6, [True, True, True, True, True, False]])
    return batch, anchors, real


def gradients(drafter):
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in drafter.named_parameters()}


def compare(drafter, config, batch, anchors, real):
    """Objective against its twin: loss, weight, acceptance, every gradient of the weighted mean."""
    drafter.zero_grad()
    loss, weight, metrics = Objective(drafter, config)(batch, anchors=(anchors, real))
    (loss / weight).backward()
    ours = gradients(drafter)
    drafter.zero_grad()
    want, want_weight, accept, mask = naive_objective(drafter, config, batch, anchors, real)
    (want / want_weight).backward()
    theirs = gradients(drafter)
    torch.testing.assert_close(loss, want.detach(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(weight, want_weight, atol=1e-5, rtol=1e-5)
    for g in range(drafter.num_slots):
        total, count = metrics[f"accept@{g}"]
        assert count == mask[..., g].sum()
        torch.testing.assert_close(total, (accept * mask)[..., g].sum(), atol=1e-4, rtol=1e-4)
    for name in theirs:
        scale = theirs[name].abs().max().clamp(min=1e-6)
        assert (ours[name] - theirs[name]).abs().max() / scale < 1e-3, name
    return ours, metrics, accept, mask


@kinds
@pytest.mark.parametrize("reduce", ["slot", "document"])
def test_equals_its_twin(kind, reduce):
    """Loss, weight, acceptance and all gradients equal the naive twin's, for every kind of drafter, packed documents,
    gaps in the mask and anchors that are not real, several terms."""
    tgt = target()
    drafter = make_drafter(kind, tgt)
    # the terms meet a drafter in its logits alone, and all of them below; here those of the paper, and all at once
    for terms in TERMS.values() if kind == "rnn" else (TERMS["ce"], TERMS["ce+tv"], TERMS["all"]):
        confidence = 0.8 if drafter.has_confidence and len(terms) % 2 else 0.0
        config = LossConfig(**terms, confidence=confidence, slot_decay=0.8, reduce=reduce, chunk=5)
        ours, _, _, mask = compare(drafter, config, *setting(tgt, drafter))
        assert mask.sum() > 15 and not mask.all()
        assert all(g.isfinite().all() for g in ours.values())
        moved = [n for n, g in ours.items() if g.any()]
        still = [] if confidence else ["confidence_head.proj.weight", "confidence_head.proj.bias"]
        assert set(ours) - set(moved) <= set(still), "a trainable tensor without a gradient"


@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_equals_its_twin_with_and_without_a_cap(terms, softcap):
    """The same with soft-capped logits: the cap is on base logits only, of drafter and teacher, before the Markov
    head."""
    tgt = target()
    drafter = with_vocab(make_drafter("gated", tgt), capped(tgt, softcap))
    config = LossConfig(**TERMS[terms], confidence=1.0, slot_decay=0.7, chunk=3)
    compare(drafter, config, *setting(tgt, drafter))


@pytest.mark.parametrize("kind", ["dflash", "rnn"])
def test_chunks_change_nothing(kind):
    """Chunks of 1, 3 and 64 slots: the same loss, metrics and gradients."""
    tgt = target()
    drafter = make_drafter(kind, tgt)
    results = []
    for chunk in (1, 3, 64):
        drafter.zero_grad()
        config = LossConfig(ce=0.2, kl=0.3, tv=0.5, slot_decay=0.9, chunk=chunk)
        batch, anchors, real = setting(tgt, drafter)
        loss, weight, metrics = Objective(drafter, config)(batch, anchors=(anchors, real))
        loss.backward()
        results.append(
            [loss.detach(), weight, *(x for pair in metrics.values() for x in pair), *gradients(drafter).values()]
        )
    for other in results[1:]:
        for a, b in zip(results[0], other):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_which_slots_are_supervised():
    """A slot counts while the token it predicts, and every one before it in the block, is supervised, inside the row
    and in the anchor's document: found by which labels move a cross-entropy loss."""
    tgt = target()
    drafter = make_drafter("dflash", tgt)
    mask = torch.ones(1, 12, dtype=torch.bool)
    mask[0, 6] = False
    batch = make_batch(tgt, rows=1, length=12, loss_mask=mask, document=torch.tensor([[0] * 10 + [1] * 2]))
    config = LossConfig(ce=1.0)
    for anchor, predicted in (
        (1, {2, 3, 4, 5}),
        (3, {4, 5}),
        (5, set()),
        (6, {7, 8, 9}),
        (8, {9}),
        (9, set()),
        (10, {11}),
        (11, set()),
    ):
        pick = (torch.tensor([[anchor]]), torch.tensor([[True]]))
        with torch.no_grad():
            base, weight, _ = Objective(drafter, config)(batch, anchors=pick)
            assert weight == len(predicted)
            moved = set()
            for t in range(12):
                if t != anchor:  # that one is an input
                    tokens = batch.tokens.clone()
                    tokens[0, t] = (tokens[0, t] + 1) % V
                    other = Batch(tokens, mask, batch.features, batch.hidden, batch.document)
                    moved |= {t} if abs(Objective(drafter, config)(other, anchors=pick)[0] - base) > 1e-6 else set()
        assert moved == predicted


def test_the_teacher_is_the_position_before_the_label():
    """Slot g of the block at a is compared with the target's law at a + g: moving hidden elsewhere moves nothing."""
    tgt = target()
    drafter = make_drafter("vanilla", tgt)
    batch = make_batch(tgt, rows=1, length=12, loss_mask=torch.ones(1, 12, dtype=torch.bool))
    pick = (torch.tensor([[3]]), torch.tensor([[True]]))
    with torch.no_grad():
        base = Objective(drafter, LossConfig(tv=1.0))(batch, anchors=pick)[0]
        for t in range(12):
            hidden = batch.hidden.clone()
            hidden[0, t] += 1
            other = Batch(batch.tokens, batch.loss_mask, batch.features, hidden)
            moved = abs(Objective(drafter, LossConfig(tv=1.0))(other, anchors=pick)[0] - base) > 1e-6
            assert moved == (3 <= t < 3 + G)


def test_slot_weights_and_documents():
    """slot_decay ** g weighs slot g; with reduce="document" each document's weights sum to one, and the weight is the
    number of documents that have a supervised slot."""
    tgt = target()
    drafter = make_drafter("dflash", tgt)
    batch, anchors, real = setting(tgt, drafter)
    _, _, _, mask = naive_objective(drafter, LossConfig(ce=1.0), batch, anchors, real)
    weight = Objective(drafter, LossConfig(ce=1.0, slot_decay=0.5))(batch, anchors=(anchors, real))[1]
    assert abs(weight - (mask * 0.5 ** torch.arange(G)).sum()) < 1e-5
    weight = Objective(drafter, LossConfig(ce=1.0, slot_decay=0.5, reduce="document"))(batch, anchors=(anchors, real))[
        1
    ]
    ids = batch.document.gather(1, anchors)
    assert weight == len({(b, int(d)) for b in (0, 1) for d, m in zip(ids[b], mask[b].any(-1)) if m}) >= 3


@pytest.mark.parametrize("reduce", ["slot", "document"])
@kinds
def test_nothing_supervised_is_a_finite_zero(kind, reduce):
    """No supervised slot, or rows too short for one: loss, weight and gradients are zero, nothing is NaN."""
    tgt = target()
    drafter = make_drafter(kind, tgt)
    config = LossConfig(ce=0.1, kl=0.1, tv=0.9, confidence=1.0 if drafter.has_confidence else 0.0, reduce=reduce)
    for length in (1, 2, 3, G, G + 1):
        batch = make_batch(tgt, length=length, loss_mask=torch.zeros(2, length, dtype=torch.bool))
        drafter.zero_grad()
        loss, weight, metrics = Objective(drafter, config)(batch)
        assert loss == 0 and weight == 0 and all(s == 0 and c == 0 for s, c in metrics.values())
        loss.backward()
        assert not any(p.grad is not None and p.grad.any() for p in drafter.parameters())
    lively = make_batch(tgt, length=2, loss_mask=torch.ones(2, 2, dtype=torch.bool))
    loss, weight, _ = Objective(drafter, config)(lively)
    assert loss.isfinite() and loss > 0 and weight == 2


@kinds
def test_tau_is_of_whole_blocks(kind):
    """tau is the mean over fully supervised blocks of 1 + sum of products of a block's own rates, not a product of
    averages: 1.5 for two blocks with rates (1, 0) and (0, 1) of two slots, where averages would give 1.75."""
    tgt = target()
    drafter = make_drafter(kind, tgt)
    batch, anchors, real = setting(tgt, drafter)
    with torch.no_grad():
        _, _, metrics = Objective(drafter, LossConfig(tv=1.0))(batch, anchors=(anchors, real))
        _, _, accept, mask = naive_objective(drafter, LossConfig(tv=1.0), batch, anchors, real)
    whole = mask.all(-1)
    assert metrics["tau"][1] == whole.sum() > 0
    want = (1 + accept.cumprod(-1).sum(-1))[whole].sum()
    torch.testing.assert_close(metrics["tau"][0], want, atol=1e-4, rtol=1e-4)


def test_anchors_are_drawn_by_seeds():
    """Without anchors the objective draws the drafter's own, by seeds; equal seeds, equal loss."""
    tgt = target()
    drafter = make_drafter("dflash", tgt, num_anchors=2)
    batch, config = make_batch(tgt, length=30), LossConfig(ce=1.0)
    with torch.no_grad():
        run = lambda **k: Objective(drafter, config)(batch, **k)[0]  # noqa: E731
        seeds = torch.tensor([4, 9])
        assert run(seeds=seeds) == run(anchors=drafter.anchors(batch, seeds)) != run(seeds=seeds + 1)
        assert run() == run(seeds=torch.tensor([0, 1]))


def test_confidence_without_a_head_is_refused():
    """loss.confidence > 0 needs a drafter with a confidence head."""
    for kind in ("dflash", "no-confidence"):
        with pytest.raises(ValueError, match="confidence head"):
            Objective(make_drafter(kind, target()), LossConfig(ce=1.0, confidence=0.5))


def test_confidence_learns_the_acceptance_rate():
    """The confidence term is least where the head says 1 - L1 / 2: its target is detached, so it moves no logits."""
    tgt = target()
    drafter = make_drafter("vanilla", tgt)
    batch, anchors, real = setting(tgt, drafter)
    grads = []
    for weight in (0.0, 3.0):
        drafter.zero_grad()
        Objective(drafter, LossConfig(tv=1.0, confidence=weight))(batch, anchors=(anchors, real))[0].backward()
        grads.append(gradients(drafter)["markov_head.markov_w2.weight"])
    torch.testing.assert_close(*grads)


# -- the gradient itself -------------------------------------------------------------------------------------------


def divergence(h, r, w2, vocab, teacher, place, label, weight, config):
    return divergence_module.Divergence.apply(
        h, r, w2, vocab, teacher, place, label, weight, config, True, divergence_module.block_terms
    )


@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("rank", [0, 3])
def test_gradients_are_those_of_differences(terms, softcap, rank):
    """Formed gradients against central differences in float64, entry by entry: states, rows and the head's matrix.
    (torch's gradcheck asks for a second backward.)"""
    torch.manual_seed(1)
    N, D, n_v = 7, 5, 9
    vocab = Vocab(torch.randn(n_v, D).double(), torch.randn(n_v, D).double(), softcap=softcap)
    h = torch.randn(N, D).double().requires_grad_()
    r = torch.randn(N, rank).double().requires_grad_(rank > 0)
    w2 = torch.randn(n_v, rank).double().requires_grad_() if rank else torch.empty(0, 0).double()
    teacher = torch.randn(6, D).double()
    place, label = torch.tensor([0, 0, 1, 3, 3, 3, 5]), torch.randint(0, n_v, (N,))
    weight = torch.rand(N).double()
    config = LossConfig(**TERMS[terms], chunk=3)

    def loss():
        return divergence(h, r, w2, vocab, teacher, place, label, weight, config)[0]

    loss().backward()
    for x in (h, r, w2) if rank else (h,):
        flat, numbers = x.detach().view(-1), []
        for i in range(len(flat)):
            value, sides = float(flat[i]), []
            for step in (1e-5, -1e-5):
                flat[i] = value + step
                sides.append(loss().item())
            flat[i] = value
            numbers.append((sides[0] - sides[1]) / 2e-5)
        torch.testing.assert_close(x.grad.view(-1), torch.tensor(numbers).double(), atol=1e-7, rtol=1e-6)


def near_equal(agreement: float, dtype):
    """States whose law accepts the teacher's with about this rate, over 512 tokens."""
    torch.manual_seed(0)
    N, D, n_v = 48, 64, 512
    vocab = Vocab(torch.zeros(n_v, D), torch.randn(n_v, D) * 0.25)
    teacher = torch.randn(N, D)
    h = teacher + torch.randn(N, D) * (1 - agreement)
    return (
        h.to(dtype).float(),
        teacher.to(dtype).float(),
        vocab,
        torch.arange(N),
        torch.randint(0, n_v, (N,)),
        torch.rand(N),
    )


@pytest.mark.parametrize("terms", ["kl", "tv", "ce+tv"], ids=str)
def test_bfloat16_autocast_keeps_the_gradient(terms):
    """At acceptance 0.98 the difference of two laws is small, and softmaxes in bfloat16 would lose a fifth of it. Under
    autocast the gradient of the divergence by the logits stays within 2 % of float64's on the same bfloat16 logits."""
    h, teacher, vocab, place, label, weight = near_equal(0.976, torch.bfloat16)
    N, n_v = len(h), vocab.size
    config = LossConfig(**TERMS[terms], chunk=16)
    # the head matrix of a rank-N head with one-hot rows receives the gradient by the logits itself, transposed
    rows, w2 = torch.eye(N).requires_grad_(), torch.zeros(n_v, N).requires_grad_()
    half = Vocab(vocab.embedding.bfloat16(), vocab.head.bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _, _, l1 = divergence(h.bfloat16(), rows, w2, half, teacher, place, label, weight, config)
    loss.backward()
    accept = (1 - l1 / 2).mean()
    assert 0.97 < accept < 0.99, accept
    logits = nn.functional.linear(h.bfloat16(), half.head).double().requires_grad_()
    log_q, p = logits.log_softmax(-1), half.logits(teacher).double().softmax(-1)
    ce = -log_q.gather(-1, label[:, None])[:, 0]
    exact = config.ce * ce - config.kl * (p * log_q).sum(-1) + config.tv * (log_q.exp() - p).abs().sum(-1)
    (exact * weight).sum().backward()
    error = (w2.grad.T.double() - logits.grad).norm() / logits.grad.norm()
    assert error < 0.02, f"{error:.3f}"


def test_losses_are_float32_under_autocast():
    """Under bfloat16 autocast loss, weight and metrics are float32, gradients come in the weights' float32, and the
    loss is near the float32 one."""
    tgt = target()
    drafter = make_drafter("vanilla", tgt)
    config = LossConfig(ce=0.1, tv=0.9, confidence=1.0)
    batch, anchors, real = setting(tgt, drafter)
    exact, weight, _ = Objective(drafter, config)(batch, anchors=(anchors, real))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, weight, metrics = Objective(drafter, config)(batch, anchors=(anchors, real))
    loss.backward()
    assert loss.dtype == weight.dtype == torch.float32
    assert {x.dtype for pair in metrics.values() for x in pair} == {torch.float32}
    assert {p.grad.dtype for p in drafter.parameters()} == {torch.float32}
    assert abs(loss - exact) / exact < 0.05


# -- what it costs -------------------------------------------------------------------------------------------------


class Counting(Vocab):
    """Counts the states that pass through `target_logits`."""

    def __init__(self, vocab: Vocab) -> None:
        super().__init__(vocab.embedding, vocab.head)
        self.count = 0

    def target_logits(self, hidden):
        self.count += hidden.shape[:-1].numel()
        return super().target_logits(hidden)


def test_the_teacher_is_formed_once_per_position():
    """However many slots look at a position, and whatever the chunk, its target distribution is computed once."""
    tgt = target()
    for chunk in (1, 4, 64):
        vocab = Counting(tgt.vocab)
        drafter = with_vocab(make_drafter("rnn", tgt), vocab)
        batch = make_batch(tgt, rows=2, length=20, loss_mask=torch.ones(2, 20, dtype=torch.bool))
        anchors = torch.arange(0, 14).expand(2, -1)  # every position is seen by up to G blocks
        vocab.count = 0
        _, weight, _ = Objective(drafter, LossConfig(kl=1.0, chunk=chunk))(
            batch, anchors=(anchors, torch.ones_like(anchors).bool())
        )
        assert weight == 2 * 14 * G and vocab.count == 2 * (14 + G - 1)


class Peak(TorchDispatchMode):
    """Largest tensor made, in numbers, and how many large ones are alive at once."""

    def __init__(self, floor: int) -> None:
        super().__init__()
        self.floor, self.largest, self.alive, self.most, self.left = floor, 0, {}, 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        import weakref

        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().nbytes() >= self.floor:
                storage = x.untyped_storage()
                self.largest = max(self.largest, storage.nbytes())
                self.alive[storage._cdata] = weakref.ref(storage)
        self.alive = {k: r for k, r in self.alive.items() if r() is not None}
        self.most = max(self.most, sum(s.nbytes() for r in self.alive.values() if (s := r()) is not None))
        return out


def test_no_slots_by_vocabulary_is_made():
    """With N = 480 slots, V = 4,000 and chunks of 16 no tensor of a quarter of [N, V] is made, forward or backward, and
    what autograd keeps holds nothing of a chunk's size [C, V] but the head's own matrices [V, D] and [V, R]."""
    torch.manual_seed(0)
    N, D, R, n_v, C = 480, 8, 4, 4000, 16
    vocab = Vocab(torch.randn(n_v, D), torch.randn(n_v, D))
    h, r, w2 = (
        torch.randn(N, D).requires_grad_(),
        torch.randn(N, R).requires_grad_(),
        torch.randn(n_v, R).requires_grad_(),
    )
    place, label = torch.arange(N) // 3, torch.randint(0, n_v, (N,))
    saved = []
    with Peak(4 * n_v) as peak, torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        loss = divergence(
            h,
            r,
            w2,
            vocab,
            torch.randn(N // 3, D),
            place,
            label,
            torch.ones(N),
            LossConfig(ce=1.0, kl=0.5, tv=0.5, chunk=C),
        )[0]
        loss.backward()
    assert peak.largest <= 4 * n_v * C  # one chunk
    assert sum(x.numel() for x in saved) < N * n_v / 50
    naive = N * n_v * 4
    with Peak(4 * n_v) as twin:
        naive_divergence(h, r, w2, vocab, torch.randn(N, D), label, torch.ones(N), LossConfig(ce=1.0))[0].backward()
    assert twin.largest == naive  # the measure sees what it should


def test_second_backward_says_why():
    """Gradients are formed once: a second backward through one forward is a clear error, not a wrong gradient."""
    tgt = target()
    drafter = make_drafter("vanilla", tgt)
    batch, anchors, real = setting(tgt, drafter)
    loss, _, _ = Objective(drafter, LossConfig(ce=1.0))(batch, anchors=(anchors, real))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="formed once"):
        loss.backward()


def test_scaled_backward_scales_once():
    """loss / weight and (3 loss) give gradients in proportion; two forwards accumulate."""
    tgt = target()
    drafter = make_drafter("vanilla", tgt)
    batch, anchors, real = setting(tgt, drafter)
    run = lambda: Objective(drafter, LossConfig(ce=0.5, tv=0.5))(batch, anchors=(anchors, real))[0]  # noqa: E731
    run().backward()
    one = gradients(drafter)
    drafter.zero_grad()
    (run() * 3).backward()
    run().backward()
    for name, grad in gradients(drafter).items():
        torch.testing.assert_close(grad, 4 * one[name], atol=1e-5, rtol=1e-4)


def test_no_gradient_is_formed_where_none_is_wanted():
    """Under no_grad the loss is the same, has no graph, and costs no product with the head backward."""
    tgt = target()
    drafter = make_drafter("vanilla", tgt)
    batch, anchors, real = setting(tgt, drafter)
    run = lambda: Objective(drafter, LossConfig(ce=0.5, tv=0.5, confidence=1.0))(batch, anchors=(anchors, real))[0]  # noqa: E731
    with torch.no_grad():
        quiet = run()
    assert not quiet.requires_grad
    torch.testing.assert_close(quiet, run().detach())


def test_the_vocabulary_stays_frozen():
    """After steps of an optimiser over the module's own parameters, embedding and head are bit-equal, without a
    gradient, and not in the optimiser; everything else has moved."""
    tgt = target()
    drafter = make_drafter("rnn", tgt)
    objective = Objective(drafter, LossConfig(ce=0.2, tv=0.8, confidence=1.0))
    before = {n: p.detach().clone() for n, p in drafter.named_parameters()}
    head, embedding = tgt.vocab.head.clone(), tgt.vocab.embedding.clone()
    assert not {id(tgt.vocab.head), id(tgt.vocab.embedding)} & {id(p) for p in objective.parameters()}
    optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-2)
    for step in range(3):
        batch, anchors, real = setting(tgt, drafter, seed=step)
        loss, weight, _ = objective(batch, anchors=(anchors, real))
        (loss / weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(tgt.vocab.head, head) and torch.equal(tgt.vocab.embedding, embedding)
    assert tgt.vocab.head.grad is None and tgt.vocab.embedding.grad is None
    assert all(not torch.equal(p, before[n]) for n, p in drafter.named_parameters())


# -- more than one process -----------------------------------------------------------------------------------------


def _rank(folder) -> None:
    """One of two processes: its row of the joint batch through DistributedDataParallel; saves its gradients."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, tgt = dist.get_rank(), bare_target()
    drafter = make_drafter("rnn", tgt)
    module = nn.parallel.DistributedDataParallel(Objective(drafter, DDP_LOSS))
    batch, anchors, real = setting(tgt, drafter)
    mine = slice(rank, rank + 1)
    part = Batch(*(getattr(batch, n)[mine] for n in ("tokens", "loss_mask", "features", "hidden", "document")))
    loss, weight, _ = module(part, anchors=(anchors[mine], real[mine]))
    dist.all_reduce(weight)
    (loss * 2 / weight).backward()  # DDP averages over ranks: 2 / weight makes it the joint mean
    torch.save(gradients(drafter), folder / f"{rank}.pt")


def bare_target():
    """What a drafter needs of a target, without a model."""
    g = torch.Generator().manual_seed(0)
    inv_freq = tuple(100.0 ** -(i / 4) for i in range(4))
    spec = BlockSpec(dim=16, heads=2, kv_heads=1, head_dim=8, mlp_dim=24, inv_freq=inv_freq, attn_scale=8**-0.5)
    vocab = Vocab(torch.randn(V, 16, generator=g), torch.randn(V, 16, generator=g))
    return types.SimpleNamespace(spec=spec, vocab=vocab, dtype=torch.float32)


DDP_LOSS = LossConfig(ce=0.2, tv=0.8, confidence=1.0, slot_decay=0.8, chunk=4)


def test_two_processes_are_one(tmp_path):
    """Under DistributedDataParallel with rows of unequal weight, every parameter's gradient, the heads' included, is
    that of the joint batch in one process, on both ranks."""
    worlds.together(2, _rank, tmp_path)
    drafter = make_drafter("rnn", bare_target())
    batch, anchors, real = setting(bare_target(), drafter)
    loss, weight, _ = Objective(drafter, DDP_LOSS)(batch, anchors=(anchors, real))
    (loss / weight).backward()
    for rank in (0, 1):
        theirs = torch.load(tmp_path / f"{rank}.pt")
        for name, grad in gradients(drafter).items():
            assert grad.any()
            torch.testing.assert_close(theirs[name], grad, atol=1e-6, rtol=1e-4)
