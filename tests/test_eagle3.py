"""Laws of Eagle3: training is decoding, unrolled attention has a naive twin, rows see what they may, files round-trip.

Letters: B rows, T positions, A anchors, G slots, L tapped layers, D hidden, V vocabulary.
"""

import functools
import itertools
import json
from pathlib import Path

import pytest
import torch
import transformers
from helpers import by_heart
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from twins import naive_objective

import deepspec
from deepspec import Batch, Eagle3Config, LossConfig, Objective, Sampling, Target, generate
from deepspec.checked import ConfigError, InputError
from deepspec.modeling import two_parts, unrolled
from deepspec.modeling.eagle3 import ROUND, Eagle3
from deepspec.modeling.unrolled import Unrolled
from deepspec.sampling import uniforms

V, LAYERS, G = 40, (0, 2), 4
LOSS = LossConfig(kl=1.0, slot_decay=0.8, reduce="document", chunk=16)
KINDS = {
    "plain": {},
    "qk_norm": dict(qk_norm=True),
    "norm_before_residual": dict(norm_before_residual=True),
    "norm_before_fc": dict(norm_before_fc=True),
    "fc_norm": dict(fc_norm=True),
    "norm_output": dict(norm_output=True),
}


def randomize(model: nn.Module) -> None:
    """Weights that let no wrong term hide behind a one or a zero."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(1 + 0.3 * torch.randn(p.shape)) if "norm" in name else p.normal_(0, 1.2 * p.shape[-1] ** -0.5)
        for name, x in model.named_buffers():
            if "layer_scalar" in name:
                x.uniform_(0.5, 1.5)


FAMILIES = {
    "qwen3": ("qwen3", dict(head_dim=16)),
    "llama": ("llama", dict(num_key_value_heads=4)),
    "gemma3": ("gemma3_text", dict(head_dim=8, query_pre_attn_scalar=24, final_logit_softcapping=4.0)),
    "gemma4": (
        "gemma4_text",
        dict(head_dim=8, global_head_dim=16, num_global_key_value_heads=1, attention_k_eq_v=True,
             hidden_size_per_layer_input=0, final_logit_softcapping=4.0),
    ),
}  # fmt: skip


@functools.cache
def target(family: str = "qwen3") -> Target:
    kind, own = FAMILIES[family]
    common = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=V, max_position_embeddings=256, tie_word_embeddings=False, pad_token_id=0, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    if family.startswith("gemma"):
        common |= dict(layer_types=["sliding_attention", "full_attention"] * 4, sliding_window=5)
    config = transformers.AutoConfig.for_model(kind, **{**common, **own})
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(made)
    return Target(made, name=f"tiny-{family}")


def drafter(tgt: Target | None = None, seed: int = 1, **own) -> Eagle3:
    tgt = tgt or target()
    torch.manual_seed(seed)
    made = Eagle3Config(**{**dict(block_size=G, target_layer_ids=LAYERS), **own}).build(tgt.spec, tgt.vocab)
    randomize(made)
    return made.eval()


def batch(rows: int = 2, length: int = 17, seed: int = 0, layers: int = len(LAYERS), **own) -> Batch:
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, length, generator=g) > 0.15
    return Batch(
        torch.randint(0, V, (rows, length), generator=g),
        own.pop("loss_mask", mask),
        torch.randn(rows, length, layers * 32, generator=g),
        torch.randn(rows, length, 32, generator=g),
        **own,
    )


def close(a: Tensor, b: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, atol=atol, rtol=1e-4)


# -- what is trained is what is decoded ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, kind", [("qwen3", k) for k in KINDS] + [(f, "plain") for f in FAMILIES if f != "qwen3"]
)
def test_training_is_decoding(family, kind):
    """Slot g's law, teacher-forced, is the law decoding draws from after the same tokens: slot by slot, in a ragged
    batch, whatever was observed in how many calls, proposals in between or not."""
    d, b = drafter(target(family), **KINDS[kind]), batch(3, 15)
    ends = [14, 6, 10]  # the anchors
    state = d.new_state(4, 30)
    follow = torch.cat([b.tokens[:, 1:], b.tokens[:, :1]], 1)
    pad = lambda x: torch.cat([x, torch.zeros_like(x[:1])])  # noqa: E731  a fourth row, never used
    cut = [9, 6, 1]
    d.observe(state, pad(b.features), pad(follow), [*cut, 0])
    u = uniforms(torch.arange(4)[:, None], torch.arange(G), 0)
    d.propose(state, Sampling(temperature=1.0), u)  # leaves no trace
    rest = [e - c for e, c in zip(ends, cut)]
    shifted = torch.stack([torch.roll(x, -c, 0) for x, c in zip(b.features, cut)])
    shifted_next = torch.stack([torch.roll(x, -c, 0) for x, c in zip(follow, cut)])
    d.observe(state, pad(shifted), pad(shifted_next), [*rest, 0])
    proposal = d.propose(state, Sampling(temperature=1.0), u)
    again = d.propose(state, Sampling(temperature=1.0), u)
    assert torch.equal(proposal.tokens, again.tokens) and torch.equal(proposal.probs, again.probs)
    assert (proposal.confidence[:3] == 1).all()
    for row, end in enumerate(ends):
        tokens = torch.cat([b.tokens[row, : end + 1], proposal.tokens[row]])[None]
        T = tokens.shape[1]
        junk = torch.full((1, T - end, b.features.shape[2]), 9.0)  # no features at or after the anchor
        features = torch.cat([b.features[row : row + 1, :end], junk], 1)
        one = Batch(tokens, torch.ones_like(tokens).bool(), features, torch.zeros(1, T, 32))
        hidden = d.hidden(one, torch.tensor([[end]]))
        close(d.logits(hidden, tokens[:, None, end : end + G]).softmax(-1)[0, 0], proposal.probs[row])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_observe_is_two(temperature):
    """State after any split of the context into calls proposes the same."""
    d, b = drafter(), batch(2, 12)
    u = uniforms(torch.arange(2)[:, None], torch.arange(G), 0)
    found = []
    for sizes in ([12], [5, 7], [1] * 12):
        state, at = d.new_state(2, 20), 0
        for size in sizes:
            cut = slice(at, at + size)
            d.observe(state, b.features[:, cut], b.tokens[:, cut], [size, size])
            at += size
        found.append(d.propose(state, Sampling(temperature=temperature), u))
    for other in found[1:]:
        assert torch.equal(found[0].tokens, other.tokens)
        close(found[0].probs, other.probs)


def test_a_row_that_is_reset_starts_anew():
    """After reset_rows a row knows nothing of what it held, and the others are as they were."""
    d, b, c = drafter(), batch(2, 12), batch(2, 5, seed=3)
    u = uniforms(torch.arange(2)[:, None], torch.arange(G), 0)
    state = d.new_state(2, 20)
    d.observe(state, b.features, b.tokens, [12, 12])
    before = d.propose(state, Sampling(temperature=1.0), u)
    d.reset_rows(state, [1])
    assert torch.equal(d.propose(state, Sampling(temperature=1.0), u).tokens[0], before.tokens[0])
    d.observe(state, c.features, c.tokens, [0, 5])
    fresh = d.new_state(2, 20)
    d.observe(fresh, c.features, c.tokens, [5, 5])
    mixed, alone = (d.propose(s, Sampling(temperature=1.0), u) for s in (state, fresh))
    close(mixed.probs[1], alone.probs[1])
    close(mixed.probs[0], before.probs[0])


# -- the unrolled attention ------------------------------------------------------------------------------------------


def naive(q, k, v, own, rows, document, scale):
    """Query by query and head by head: a list of the keys it sees, a softmax, a sum."""
    (B, A, Q, _), K = q.shape, k.shape[2]
    out = []
    for b, a, h in itertools.product(range(B), range(A), range(Q)):
        row, kv = int(rows[b, a]), h * K // Q
        seen = [j for j in range(row + 1) if document[b, j] == document[b, row]]
        keys = torch.cat([k[b, seen, kv], *[pair[0][b, a, kv][None] for pair in own]])
        values = torch.cat([v[b, seen, kv], *[pair[1][b, a, kv][None] for pair in own]])
        out.append((keys @ q[b, a, h] * scale).softmax(0) @ values)
    return torch.stack(out).view(q.shape)


@pytest.mark.parametrize("earlier", [0, 1, 3])
@pytest.mark.parametrize("slices", [1, 4])
@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_unrolled_attention_is_its_naive_twin(earlier, slices, kept, monkeypatch):
    """Output and every gradient, to 1e-10 in float64, of slots that add their own keys one after another and look;
    packed rows, unsorted anchors, any number of slices, scores that are kept and scores that are made again; twice."""
    monkeypatch.setattr(two_parts, "SLICE", 16 if slices == 1 else 4)
    monkeypatch.setattr(unrolled, "SCORES_KEPT", kept)
    torch.manual_seed(earlier)
    B, T, A, Q, K, H = 2, 9, 7, 4, 2, 6
    rows = torch.randint(0, T, (B, A))
    document = torch.tensor([[0] * 9, [0, 0, 0, 0, 1, 1, 1, 2, -1]])
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    k, v = make(B, T, K, H), make(B, T, K, H)
    q, weight = make(earlier + 1, B, A, Q, H), torch.randn(earlier + 1, B, A, Q, H, dtype=torch.float64)
    own = [(make(B, A, K, H), make(B, A, K, H)) for _ in range(earlier)]
    view = Unrolled(rows, document, 0.4, (Q, K), earlier + 1)
    assert len(view.parts.slices) == slices and view.parts.keep == bool(kept)
    inputs = [q, k, v, *[x for pair in own for x in pair]]
    view.start(k, v)
    ours = [view(q[0])]
    for g, pair in enumerate(own, 1):
        view.add(*pair)
        ours.append(view(q[g]))
    twin = torch.stack([naive(q[g], k, v, own[:g], rows, document, 0.4) for g in range(earlier + 1)])
    torch.testing.assert_close(torch.stack(ours), twin, atol=1e-10, rtol=0)
    right = torch.autograd.grad((twin * weight).sum(), inputs)
    loss = (torch.stack(ours) * weight).sum()
    for again in (True, False):
        for x, y in zip(torch.autograd.grad(loss, inputs, retain_graph=again), right):
            torch.testing.assert_close(x, y, atol=1e-10, rtol=0)


@pytest.mark.parametrize("kind", ["plain", "qk_norm", "norm_output"])
def test_loss_and_gradients_are_those_of_the_layer_written_out(kind):
    """The whole objective, packed, against a decoder that runs every anchor alone through plain modules: loss and the
    gradient of every parameter to 1e-5."""
    d = drafter(**KINDS[kind])
    document = torch.tensor([[0] * 6 + [1] * 5, [0] * 9 + [-1] * 2])
    position = torch.tensor([[*range(6), *range(5)], [*range(9), 0, 0]])
    b = batch(2, 11, document=document, position=position)
    anchors, real = d.anchors(b, torch.zeros(2, dtype=torch.long))
    loss, weight, _ = Objective(d, LOSS)(b, anchors=(anchors, real))
    (loss / weight).backward()
    ours = {n: p.grad.clone() for n, p in d.named_parameters()}
    d.zero_grad()
    twin = Twin(d)
    loss2, weight2, _, mask = naive_objective(twin, LOSS, b, anchors, real)
    (loss2 / weight2).backward()
    assert mask.sum() > 20
    close(loss / weight, loss2 / weight2)
    for name, p in d.named_parameters():
        assert p.grad is not None and p.grad.abs().max() > 0, name
        close(ours[name], p.grad, atol=1e-5)


class Twin:
    """Eagle3's hidden(), one block at a time, out of F.linear and softmax."""

    def __init__(self, d: Eagle3):
        self.d, self.num_slots, self.vocab, self.logits = d, d.num_slots, d.vocab, d.logits

    def hidden(self, b: Batch, anchors: Tensor) -> Tensor:
        return torch.stack([torch.stack([self.block(b, r, int(a)) for a in row]) for r, row in enumerate(anchors)])

    def block(self, b: Batch, r: int, a: int) -> Tensor:
        d, layer = self.d, self.d.layers[0]
        row = max(a - 1, 0)
        seen = [j for j in range(row + 1) if b.documents[r, j] == b.documents[r, row]]
        T, start = b.tokens.shape[1], b.positions[r, row]

        def enter(x, token, at):
            h = torch.cat(
                [layer.input_layernorm(self.vocab.embed(b.tokens[r, min(token, T - 1)])), layer.hidden_norm(x)]
            )
            rotary = d.rotary(at)
            k, v = layer.self_attn.kv(h, rotary)
            return layer.self_attn.q(h, rotary), k, v

        keys, values, slots = [], [], []
        for j in seen:
            x = d.fc(b.features[r, j])
            q, k, v = enter(x, j + 1, b.positions[r, j])
            keys.append(k), values.append(v)
        for g in range(self.num_slots):
            if g:
                q, k, v = enter(x, a + g, start + g)
                keys.append(k), values.append(v)
            K, W = torch.stack(keys, 1), torch.stack(values, 1)
            heads = q.view(K.shape[0], -1, q.shape[-1])
            p = (heads @ K.mT * layer.self_attn.scale).softmax(-1)
            x = x + layer.self_attn.o_proj((p @ W).flatten())
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            slots.append(d.norm(x))
            x = slots[-1] if d.config.norm_output else x
        return torch.stack(slots)


def test_memory_kept_for_backward_has_no_term_in_length_squared_times_slots(monkeypatch):
    """Numbers that autograd keeps past its budget for scores: a second difference in T finds the T^2 term, and more
    slots do not raise it. Within the budget it keeps no more than that."""

    def kept(T: int, slots: int) -> int:
        seen: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
            return x

        d = drafter(block_size=slots)
        b = batch(1, T, loss_mask=torch.ones(1, T).bool())
        anchors = torch.arange(1, T - 1)[None]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            hidden = d.hidden(b, anchors)
        assert hidden.requires_grad
        return sum(seen.values())

    monkeypatch.setattr(unrolled, "SCORES_KEPT", 0)
    sizes = {(T, g): kept(T, g) for T in (130, 258, 386) for g in (2, 6)}
    for g in (2, 6):
        bend = sizes[386, g] - 2 * sizes[258, g] + sizes[130, g]
        assert abs(bend) < 0.02 * 128 * 128, (g, bend)  # one matrix of scores a slot and head would bend by 2 * 128^2
    for g in (2, 6):
        budget = g * (130 - 2) * 130 * drafter().spec.heads
        for room in (budget - g, budget):
            monkeypatch.setattr(unrolled, "SCORES_KEPT", room)
            more = kept(130, g) - sizes[130, g]
            assert (0 < more <= budget) if room == budget else more == 0, (g, room, more)


def test_columns_without_an_anchor_are_left_out_and_stand_there():
    """More than a round number of columns, the last of which hold no anchor: what the objective makes of them is what
    it makes of the others alone, row by row."""
    d, b = drafter(block_size=2), batch(3, 80)
    anchors, real = d.anchors(b, torch.arange(3))
    few = int(real.sum(1).max())
    more = [nn.functional.pad(x, (0, 140 - x.shape[1])) for x in (anchors, real)]
    less = [x[:, :few] for x in (anchors, real)]
    assert ROUND < few < 2 * ROUND < 140
    states = [d.hidden(b, x[0]) for x in (more, less)]
    assert states[0].shape[:2] == (3, 140) and not states[0][:, 2 * ROUND :].any()
    close(states[0][:, :few][less[1]], states[1][less[1]])
    close(*(Objective(d, LOSS)(b, anchors=tuple(x))[0] for x in (more, less)))


# -- what a row sees -------------------------------------------------------------------------------------------------


def laws(d: Eagle3, b: Batch, anchors: Tensor) -> Tensor:
    return d.logits(d.hidden(b, anchors), anchors[..., None].expand(-1, -1, G))


def test_visibility_by_perturbation():
    """Slot g of anchor a reads features before a and tokens up to a + g, and nothing else: not the anchor's own
    features, not what comes later. What it should read moves it."""
    d, b, a = drafter(), batch(1, 16), 7
    base = laws(d, b, torch.tensor([[a]]))[0, 0]
    for t in range(16):
        features, tokens = b.features.clone(), b.tokens.clone()
        features[:, t] += 1.0
        tokens[:, t] = (tokens[:, t] + 1) % V
        moved = laws(d, Batch(b.tokens, b.loss_mask, features, b.hidden), torch.tensor([[a]]))[0, 0]
        assert torch.equal(moved, base) == (t >= a)
        if t < a:
            assert (moved - base).abs().amax(-1).min() > 1e-4
        moved = laws(d, Batch(tokens, b.loss_mask, b.features, b.hidden), torch.tensor([[a]]))[0, 0]
        changed = (moved - base).abs().amax(-1) > 1e-4
        # the first token pairs with no features
        assert changed.tolist() == [0 < t <= a + g for g in range(G)]


def test_packed_is_separate():
    """Two documents in a row, with padding, give what each gives alone: anchors, states, loss."""
    d, parts = drafter(), [batch(1, 9, seed=5), batch(1, 7, seed=6)]
    join = lambda name: torch.cat([getattr(p, name) for p in parts] + [getattr(batch(1, 3), name)], 1)  # noqa: E731
    mask = join("loss_mask")
    mask[:, -3:] = False
    b = Batch(
        join("tokens"), mask, join("features"), join("hidden"),
        document=torch.tensor([[0] * 9 + [1] * 7 + [-1] * 3]), position=torch.tensor([[*range(9), *range(7), 0, 0, 0]]),
    )  # fmt: skip
    anchors, real = d.anchors(b, torch.zeros(1, dtype=torch.long))
    hidden = d.hidden(b, anchors)
    loss, weight, metrics = Objective(d, LOSS)(b)
    total, found, tau = 0, [], 0
    for part, offset in zip(parts, (0, 9)):
        mine, ok = d.anchors(part, torch.zeros(1, dtype=torch.long))
        states = d.hidden(part, mine)
        for i in ok[0].nonzero()[:, 0].tolist():
            at = int(mine[0, i])
            found.append(at + offset)
            where = anchors[0].tolist().index(at + offset)
            inside = min(G, part.tokens.shape[1] - at - 1)
            close(hidden[0, where, :inside], states[0, i, :inside])
        own, w, own_metrics = Objective(d, LOSS)(part)
        total, tau = total + own / w, tau + own_metrics["tau"][0]
    assert found == anchors[real].tolist() and weight == 2
    close(loss, total)
    close(metrics["tau"][0], tau)


def test_anchors_are_every_position_whose_successor_is_supervised():
    """By brute force over a packed batch; positions without features before them are none."""
    document = torch.tensor([[0] * 8 + [1] * 6, [0] * 11 + [-1] * 3])
    b = batch(2, 14, document=document)
    b.loss_mask[1, 11:] = False
    anchors, real = drafter().anchors(b, torch.zeros(2, dtype=torch.long))
    for row in range(2):
        right = [
            a for a in range(1, 13) if b.loss_mask[row, a + 1] and len(set(document[row, a - 1 : a + 2].tolist())) == 1
        ]
        assert anchors[row][real[row]].tolist() == right
    for T in (1, 2):  # nothing to predict: no anchor, no error
        small = batch(2, T, loss_mask=torch.ones(2, T).bool())
        anchors, real = drafter().anchors(small, torch.zeros(2, dtype=torch.long))
        assert not real.any() and drafter().hidden(small, anchors).shape[2:] == (G, 32)
        loss, weight, _ = Objective(drafter(), LOSS)(small)
        assert loss == 0 and weight == 0


# -- learning and decoding -------------------------------------------------------------------------------------------


def overfit(tgt: Target, config: Eagle3Config, vocab=None, steps: int = 150) -> tuple[Eagle3, list[int]]:
    """A drafter trained on one greedy answer, and the prompt that leads to it."""
    prompt = [3, 1, 4, 1, 5]
    answer = generate(tgt, None, [prompt], max_new_tokens=40)[0].tokens
    tokens = torch.tensor([prompt + answer])
    features, hidden = tgt.features(tokens, [tokens.shape[1]], config.target_layer_ids)
    mask = torch.arange(tokens.shape[1])[None] >= len(prompt)
    b = Batch(tokens, mask, features, hidden)
    torch.manual_seed(0)
    d = config.build(tgt.spec, vocab or tgt.vocab)
    return by_heart(d, LOSS, b, lr=3e-3, steps=steps), prompt


def conditional(rounds: list[tuple[int, int]], slots: int) -> list[float]:
    """Acceptance of each slot in rounds that verified it with every earlier slot accepted."""
    rates = []
    for g in range(slots):
        tried = [accepted > g for verified, accepted in rounds if verified > g and accepted >= g]
        rates.append(sum(tried) / len(tried))
    return rates


def test_overfit_one_sequence_then_decode():
    """Trained on one answer, the drafter is believed at every slot when that answer is decoded: >= 0.9."""
    tgt = target.__wrapped__()  # its own, because it is made sharp: with near ties an argmax is not learned
    tgt.vocab.head.data.mul_(10)
    d, prompt = overfit(tgt, Eagle3Config(block_size=G, target_layer_ids=LAYERS))
    out = generate(tgt, d, [prompt], max_new_tokens=40)[0]
    assert out.tokens == generate(tgt, None, [prompt], max_new_tokens=40)[0].tokens
    assert min(conditional(out.rounds, G)) >= 0.9, out.rounds


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_the_target_s(family):
    """Prompts of several lengths, refilled rows: token for token the baseline's; sampled, the same in any batch."""
    tgt = target(family)
    d = drafter(tgt)
    prompts = [[1, 2, 3], [4] * 9, [7], [5, 6, 5, 6, 5]]
    base = generate(tgt, None, prompts, max_new_tokens=16)
    out = generate(tgt, d, prompts, max_new_tokens=16, concurrency=3)
    assert [g.tokens for g in out] == [g.tokens for g in base]
    hot = Sampling(temperature=0.8, top_k=12)
    alone = generate(tgt, d, prompts, max_new_tokens=8, sampling=hot, concurrency=1)
    assert [g.tokens for g in alone] == [g.tokens for g in generate(tgt, d, prompts, max_new_tokens=8, sampling=hot)]


def test_one_step_in_bfloat16_autocast():
    """Float32 weights under autocast: finite, near the float32 loss, every parameter gets a float32 gradient."""
    d, b = drafter(), batch(2, 20)
    exact = Objective(d, LOSS)(b)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _, _ = Objective(d, LOSS)(b)
    loss.backward()
    assert abs(loss / exact - 1) < 0.03
    for p in d.parameters():
        assert (
            p.grad is not None and p.grad.dtype == torch.float32 and p.grad.isfinite().all() and p.grad.abs().max() > 0
        )


def test_nothing_of_the_target_is_trained_or_moved():
    """Trainable tensors are the layer, the projection and norms; .to() leaves the target's own alone."""
    d = drafter()
    assert {n.split(".")[0] for n, _ in d.named_parameters()} == {"fc", "layers", "norm"}
    d.to(torch.bfloat16)
    assert target().vocab.head.dtype == torch.float32 and d.vocab is target().vocab


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, kind", [("qwen3", k) for k in KINDS] + [(f, "plain") for f in FAMILIES if f != "qwen3"]
)
def test_save_then_load(family, kind, tmp_path):
    """Same settings, same tensors, same drafts; nothing of the target is saved."""
    tgt = target(family)
    d = drafter(tgt, **KINDS[kind])
    d.save(tmp_path / "d", note="x")
    back = deepspec.load_drafter(tmp_path / "d", tgt)
    assert back.config == d.config and back.spec == d.spec and back.vocab is tgt.vocab
    saved = load_file(tmp_path / "d" / "model.safetensors")
    assert saved.keys() == d.state_dict().keys() and not {"lm_head.weight", "embed_tokens.weight"} & saved.keys()
    b = batch(1, 12)
    anchors = torch.tensor([[4, 6]])
    assert torch.equal(d.hidden(b, anchors), back.hidden(b, anchors))


def test_saved_config_serves_both_engines(tmp_path):
    """facts/formats.md 10.3: class names, both layer conventions, every flag written, rope in both forms."""
    drafter(target("llama")).save(tmp_path / "d")
    raw = json.loads((tmp_path / "d" / "config.json").read_text())
    want = dict(
        architectures=["LlamaForCausalLMEagle3"], model_type="llama", num_hidden_layers=1, vocab_size=V,
        target_hidden_size=32, num_aux_hidden_states=2, norm_before_residual=False, norm_before_fc=False, fc_norm=False,
        norm_output=False, tie_word_embeddings=False, attention_bias=False, eagle_aux_hidden_state_layer_ids=[1, 3],
        eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 2]}, draft_vocab_size=None,
    )  # fmt: skip
    assert {k: raw[k] for k in want} == want
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 10000.0
    names = [
        "hidden_norm",
        "input_layernorm",
        "post_attention_layernorm",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ]
    names += [f"self_attn.{x}_proj" for x in "qkvo"]
    keys = {f"layers.0.{n}.weight" for n in names} | {"fc.weight", "norm.weight"}
    assert load_file(tmp_path / "d" / "model.safetensors").keys() == keys
    drafter(qk_norm=True).save(tmp_path / "q")
    raw = json.loads((tmp_path / "q" / "config.json").read_text())
    assert raw["architectures"] == ["Eagle3Qwen3ForCausalLM"] and raw["model_type"] == "qwen3"


def foreign(folder: Path, d: Eagle3, rename=lambda name: name, tensors=(), **config) -> Path:
    """`d` as another trainer writes it: its config, no section of ours."""
    d.save(folder)
    raw = json.loads((folder / "config.json").read_text())
    ours = (
        "deepspec",
        "ttt_length",
        "target_layer_ids",
        "eagle_config",
        "eagle_aux_hidden_state_layer_ids",
        "block_size",
    )
    raw = {k: v for k, v in raw.items() if k not in ours} | config
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v != "drop"}))
    saved = load_file(folder / "model.safetensors")
    save_file({rename(k): v for k, v in saved.items()} | dict(tensors), folder / "model.safetensors")
    return folder


def same(a: Eagle3, b: Eagle3) -> None:
    x = batch(1, 12, layers=len(a.config.target_layer_ids))
    anchors = torch.tensor([[4, 6]])
    assert torch.equal(laws(a, x, anchors), laws(b, x, anchors))


def test_loads_what_eagle_and_specforge_write(tmp_path):
    """midlayer names, a trained head over some tokens (d2t offsets, t2d), no layer ids (1, n/2 - 1, n - 4)."""
    tgt, ids = target("llama"), (1, 3, 4)
    d = drafter(tgt, target_layer_ids=ids)
    kept = torch.tensor([0, 1, 5, 7, 30, 39])
    head, mask = torch.randn(6, 32), torch.zeros(V, dtype=torch.bool)
    mask[kept] = True
    path = foreign(
        tmp_path / "e", d, lambda n: n.replace("layers.0.", "midlayer."),
        {"lm_head.weight": head, "d2t": kept - torch.arange(6), "t2d": mask,
         "embed_tokens.weight": tgt.vocab.embedding.data.clone()},
        draft_vocab_size=6, rope_parameters="drop", norm_before_residual="drop", num_aux_hidden_states="drop",
    )  # fmt: skip
    back = deepspec.load_drafter(path, tgt)
    c = back.config
    assert c.target_layer_ids == ids and c.block_size == 7 and c.draft_vocab_size == 6 and not c.qk_norm
    assert torch.equal(back.vocab.draft_head, head) and torch.equal(back.vocab.kept, kept)
    x, anchors = batch(1, 12, layers=3), torch.tensor([[4, 6]])
    states = d.hidden(x, anchors)
    assert torch.equal(back.hidden(x, anchors)[:, :, :G], states)
    close(back.logits(states, anchors), states @ head.T)
    assert set(
        back.propose(observed(back, x), Sampling(temperature=1.0), torch.rand(1, 7).double()).tokens[0].tolist()
    ) <= set(kept.tolist())
    back.save(tmp_path / "again")
    same(back, deepspec.load_drafter(tmp_path / "again", tgt))
    # the original EAGLE files say LlamaForCausalLM
    raw = json.loads((path / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    (path / "config.json").write_text(json.dumps(raw))
    same(back, deepspec.load_drafter(path, tgt))


def observed(d: Eagle3, b: Batch):
    state = d.new_state(len(b.tokens), 40)
    d.observe(state, b.features, b.tokens, [b.tokens.shape[1]] * len(b.tokens))
    return state


def test_loads_a_full_head_of_its_own(tmp_path):
    """A trained head over the whole vocabulary is kept, and the teacher is still the target's own."""
    tgt, head = target("llama"), torch.randn(V, 32)
    path = foreign(
        tmp_path / "e", drafter(tgt), tensors={"lm_head.weight": head}, target_layer_ids=[0, 2], draft_vocab_size=V
    )
    back = deepspec.load_drafter(path, tgt)
    assert torch.equal(back.vocab.draft_head, head) and back.vocab.kept is None and back.config.draft_vocab_size is None
    h = torch.randn(3, 32)
    assert torch.equal(back.vocab.target_logits(h), tgt.vocab.logits(h))
    back.save(tmp_path / "again")
    same(back, deepspec.load_drafter(tmp_path / "again", tgt))


@pytest.mark.parametrize(
    "keys, ids",
    [
        (dict(eagle_aux_hidden_state_layer_ids=[1, 3]), (0, 2)),
        (dict(eagle_config=dict(eagle_aux_hidden_state_layer_ids=[0, 2])), (0, 2)),
        (dict(target_layer_ids=[0, 2]), (0, 2)),
        (dict(target_layer_ids=[0, 2], eagle_aux_hidden_state_layer_ids=[1, 3]), (0, 2)),
        (dict(target_layer_ids=[0, 2], eagle_aux_hidden_state_layer_ids=[0, 2]), "different target layers"),
        (dict(target_layer_ids=[2, 0]), "strictly increasing"),
        (dict(target_layer_ids=[0, 8]), "out of range"),
        (dict(target_layer_ids=[0, 2], attention_bias=True), "attention_bias"),
        (dict(target_layer_ids=[0, 2], eagle_config=dict(use_aux_hidden_state=False)), "use_aux_hidden_state"),
        (dict(target_layer_ids=[0, 2], target_hidden_size=64), "target_hidden_size"),
        (dict(target_layer_ids=[0, 2], num_hidden_layers=2), "num_draft_layers must be 1"),
        (dict(target_layer_ids=[0, 2], norm_before_fc=True), "missing input_norm.weight"),
        (dict(target_layer_ids=[0, 2], norm_before_fc=True, fc_norm=True), "at most one"),
    ],
)  # fmt: skip
def test_layer_ids_and_flags_of_others(keys, ids, tmp_path):
    """Either convention for layers; what is not implemented is refused by name, in one line that names the drafter."""
    tgt = target("llama")
    path = foreign(tmp_path / "e", drafter(tgt), **keys)
    if isinstance(ids, str):
        with pytest.raises(InputError, match=ids) as error:
            deepspec.load_drafter(path, tgt)
        assert str(path) in str(error.value) and "\n" not in str(error.value)
    else:
        assert deepspec.load_drafter(path, tgt).config.target_layer_ids == ids


def test_plain_eagle3_is_refused_where_embeddings_are_scaled(tmp_path):
    """Servers' Eagle3 classes read Gemma's embeddings unscaled; ours would silently draft worse."""
    path = foreign(tmp_path / "e", drafter(target("llama")), target_layer_ids=[0, 2])
    with pytest.raises(InputError, match="unscaled embeddings"):
        deepspec.load_drafter(path, target("gemma3"))


def test_loads_speculators_configs(tmp_path):
    """A backbone nested in transformer_layer_config; ids that count from 1; the length in speculators_config."""
    tgt, d = target("llama"), drafter(target("llama"), norm_before_residual=True)
    path = foreign(tmp_path / "e", d)
    raw = json.loads((path / "config.json").read_text())
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "draft_vocab_size")
    outer = {k: raw.pop(k) for k in flags} | dict(
        architectures=["Eagle3DraftModel"], speculators_model_type="eagle3", eagle_aux_hidden_state_layer_ids=[1, 3],
        speculators_config=dict(algorithm="eagle3", proposal_methods=[dict(speculative_tokens=G)]),
        transformer_layer_config=raw,
    )  # fmt: skip
    (path / "config.json").write_text(json.dumps(outer))
    back = deepspec.load_drafter(path, tgt)
    assert back.config == d.config
    same(d, back)


@pytest.mark.parametrize(
    "own, message",
    [
        (dict(num_draft_layers=2), "num_draft_layers must be 1"),
        (dict(norm_before_fc=True, fc_norm=True), "at most one"),
        (dict(draft_vocab_size=0), "draft_vocab_size must be >= 1"),
        (dict(block_size=0), "block_size must be >= 1"),
    ],
)
def test_settings_that_are_refused(own, message):
    """Each mistake is one line that names the setting."""
    with pytest.raises(ConfigError, match=message):
        Eagle3Config(**{**dict(target_layer_ids=LAYERS), **own})


# -- golden ----------------------------------------------------------------------------------------------------------

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module", params=[p.name for p in sorted(GOLDEN.glob("eagle3_*"))])
def golden(request):
    folder = GOLDEN / request.param
    tgt = Target.load(str(folder / "target"))
    meta = json.loads((folder / "meta.json").read_text())
    return meta, folder, tgt, deepspec.load_drafter(folder / "drafter", tgt)


@torch.no_grad()
def test_golden_logits(golden):
    """Every step's logits to 1e-5: row t of step g is slot g of the block anchored at t + 1."""
    meta, folder, tgt, d = golden
    x, want = load_file(folder / "inputs.safetensors"), load_file(folder / "expected.safetensors")
    assert d.num_slots == meta["ttt_length"] and list(d.config.target_layer_ids) == meta["target_layer_ids"]
    b = Batch(x["input_ids"], x["loss_mask"].bool(), x["target_hidden_states"], x["target_last_hidden_states"])
    T = b.tokens.shape[1]
    anchors = torch.arange(1, T - 1).expand(len(b.tokens), -1)
    logits = d.logits(d.hidden(b, anchors), anchors)
    for g in range(d.num_slots):
        for row, length in enumerate(x["attention_mask"].sum(1).tolist()):
            n = min(length - 1 - g, T - 2)
            assert n > 20 and (logits[row, :n, g] - want[f"step{g}_logits"][row, :n]).abs().max() < 1e-5
    counts = x["attention_mask"].sum(1)
    features, hidden = tgt.features(b.tokens, counts, d.config.target_layer_ids)
    real = torch.arange(T) < counts[:, None]
    for got, right in ((features, b.features), (hidden, b.hidden)):  # processors round products differently
        close(got[real], right[real], atol=1e-5 * float(right[real].abs().max()))


def test_golden_decoding(golden):
    """Output ids and rounds of the reference's own decoding loop, whose last rounds may pass the budget."""
    meta, _, tgt, d = golden
    want, prompt = meta["decode"], meta["decode"]["prompt"]
    n = want["max_new_tokens"]
    out = generate(tgt, d, [prompt], max_new_tokens=n)[0]
    assert out.tokens == want["output_ids"][len(prompt) :][:n]
    rounds = list(zip(want["proposal_lengths"], [a - 1 for a in want["acceptance_lengths"]]))
    assert out.rounds[:-1] == rounds[: len(out.rounds) - 1]
    assert len(out.rounds) <= len(rounds) <= len(out.rounds) + 1
    assert out.tokens == generate(tgt, None, [prompt], max_new_tokens=n)[0].tokens
