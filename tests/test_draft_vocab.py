"""Laws of a reduced draft vocabulary: which tokens it keeps, what files say, what is trained, that it stays lossless.

Letters: B rows, A anchors, G slots, D hidden, V the target's tokens, Vd the kept ones, N slots.
"""

import dataclasses
import functools
import itertools
import json
from collections import Counter

import helpers
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import deepspec
from deepspec import (
    Batch,
    DFlashConfig,
    DSparkConfig,
    Eagle3Config,
    LossConfig,
    Objective,
    Sampling,
    Target,
    generate,
    load_drafter,
)
from deepspec.checked import ConfigError, InputError
from deepspec.modeling import draft_vocab
from deepspec.modeling.drafter import gather_slots
from deepspec.modeling.vocab import Vocab
from deepspec.sampling import uniforms

V, LAYERS, G = 23, (0, 2), 3
KEPT = torch.tensor([0, 2, 3, 7, 11, 12, 20, 22])
KINDS = {
    "eagle3": (Eagle3Config, {}),
    "vanilla": (DSparkConfig, dict(markov_rank=5)),
    "gated": (DSparkConfig, dict(markov_rank=5, markov_head_type="gated")),
    "rnn": (DSparkConfig, dict(markov_rank=5, markov_head_type="rnn")),
    "rank0": (DSparkConfig, dict(markov_rank=0)),
    "dflash": (DFlashConfig, {}),
}


def randomize(model: nn.Module, scale: float = 1.0) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(1 + 0.3 * torch.randn(p.shape)) if "norm" in name else p.normal_(0, scale * p.shape[-1] ** -0.5)


@functools.cache
def target(size: int = V) -> Target:
    config = transformers.Qwen3Config(
        hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=size, max_position_embeddings=128, tie_word_embeddings=False, pad_token_id=None, bos_token_id=None,
        eos_token_id=None, head_dim=8,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config)
    randomize(model, 1.5)
    return Target(model, name="tiny")


def make(kind: str, kept=KEPT, tgt: Target | None = None, seed: int = 1, **own):
    cls, special = KINDS[kind]
    tgt = tgt or target()
    common = dict(block_size=G, target_layer_ids=LAYERS, draft_vocab_size=len(kept))
    block = {} if cls is Eagle3Config else dict(num_draft_layers=1, mask_token_id=tgt.vocab.size - 1, num_anchors=6)
    torch.manual_seed(seed)
    d = cls(**{**common, **block, **special, **own}).build(tgt.spec, draft_vocab.reduce(tgt.vocab, kept))
    randomize(d, 1.5)
    return d.eval()


def batch(rows: int = 2, length: int = 14, seed: int = 0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, length, generator=g) > 0.1
    tokens = torch.randint(0, V, (rows, length), generator=g)
    return Batch(
        tokens, mask, torch.randn(rows, length, 32, generator=g), 2 * torch.randn(rows, length, 16, generator=g)
    )


# -- the tokens kept -------------------------------------------------------------------------------------------------


def test_supervised_tokens_are_counted():
    """Against a Counter; prompts do not count, and neither does the size of a flush."""
    g = torch.Generator().manual_seed(0)
    rows = [
        (torch.randint(0, V, (n,), generator=g).tolist(), (torch.rand(n, generator=g) > 0.5).tolist())
        for n in (5, 40, 3)
    ]
    want = Counter(t for tokens, mask in rows for t, m in zip(tokens, mask) if m)
    old, draft_vocab.FLUSH = draft_vocab.FLUSH, 4
    try:
        counts = draft_vocab.count(rows, V)
    finally:
        draft_vocab.FLUSH = old
    assert counts.tolist() == [want[t] for t in range(V)] == draft_vocab.count(rows, V).tolist()
    assert draft_vocab.count([], V).sum() == 0


def test_the_most_counted_are_kept():
    """Ascending ids; ties, and more places than tokens seen, go to lower ids."""
    counts = torch.tensor([0, 5, 2, 2, 0, 9, 0])
    assert draft_vocab.choose(counts, 3).tolist() == [1, 2, 5]
    assert draft_vocab.choose(counts, 6).tolist() == [0, 1, 2, 3, 4, 5]
    assert draft_vocab.choose(counts, 7).tolist() == list(range(7))
    for size in (0, 8):
        with pytest.raises(ConfigError, match="draft_vocab_size must be 1 to 7"):
            draft_vocab.choose(counts, size)


def test_all_tokens_kept_is_the_target_s_own_vocabulary():
    vocab = target().vocab
    assert draft_vocab.reduce(vocab, torch.arange(V)) is vocab
    assert draft_vocab.for_training(vocab, None, []) is vocab
    rows = [([5, 5, 1, 7, 7, 7], [True] * 3 + [False] * 3)]
    assert draft_vocab.for_training(vocab, 2, rows).kept.tolist() == [1, 5]
    assert draft_vocab.to_tensors(vocab) == {}
    for bad in ([3, 2], [2, 2], [0, V]):
        with pytest.raises(InputError, match="strictly increasing"):
            draft_vocab.reduce(vocab, torch.tensor(bad))


def test_both_numberings():
    """Every draft id and every token, there and back; laws too."""
    vocab = draft_vocab.reduce(target().vocab, KEPT)
    assert vocab.to_target(torch.arange(8)).tolist() == KEPT.tolist()
    row, known = vocab.to_draft(torch.arange(V))
    assert known.nonzero()[:, 0].tolist() == KEPT.tolist() and row[known].tolist() == list(range(8))
    h = torch.linspace(-1, 1, 48).view(3, 16)
    torch.testing.assert_close(vocab.logits(h), target().vocab.logits(h)[:, KEPT])
    assert torch.equal(vocab.target_logits(h), target().vocab.logits(h))
    law = torch.rand(2, 8)
    spread = vocab.spread(law)
    part, mass = vocab.keep(spread)
    assert torch.equal(part, law) and torch.allclose(mass, spread.sum(-1)) and spread.shape == (2, V)


# -- training --------------------------------------------------------------------------------------------------------


def naive(d, config: LossConfig, b: Batch, anchors, real):
    """The contract's sentence with tensors over all V tokens: q is 0 outside the kept ones. Loss, weight, metrics."""
    at = anchors[..., None] + torch.arange(d.num_slots)
    T = b.tokens.shape[1]
    mask = (real[..., None] & (at + 1 < T) & gather_slots(b.loss_mask, at + 1)).cumprod(-1).bool()
    prev, label = gather_slots(b.tokens, at), gather_slots(b.tokens, at + 1)
    hidden = d.hidden(b, anchors)
    log_q = d.logits(hidden, prev).log_softmax(-1)
    p = target().vocab.logits(gather_slots(b.hidden, at))
    p = (p if d.vocab.softcap is None else d.vocab.softcap * (p / d.vocab.softcap).tanh()).softmax(-1)
    q = torch.zeros_like(p).index_copy(-1, KEPT, log_q.exp())
    l1 = (q - p).abs().sum(-1)
    kl = -(p[..., KEPT] * log_q).sum(-1)
    inside = torch.isin(label, KEPT)
    ce = -log_q.gather(-1, torch.searchsorted(KEPT, label).clamp(max=7)[..., None])[..., 0] * inside
    accept = 1 - l1.detach() / 2
    loss = config.ce * ce + config.kl * kl + config.tv * l1
    if config.confidence:
        guess = d.confidence(hidden, prev)
        loss = loss + config.confidence * nn.functional.binary_cross_entropy_with_logits(
            guess, accept, reduction="none"
        )
    weight = config.slot_decay ** torch.arange(d.num_slots) * mask
    whole = mask.all(-1)
    metrics = {f"accept@{g}": (accept * mask)[..., g].sum() / mask[..., g].sum() for g in range(d.num_slots)}
    metrics["ce"] = (ce * mask).sum() / (inside & mask).sum()
    metrics["tau"] = (whole * (1 + accept.cumprod(-1).sum(-1))).sum() / whole.sum()
    return (torch.where(mask, loss, 0) * weight).sum(), weight.sum(), metrics


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(
    "terms", [dict(ce=1.0), dict(kl=1.0), dict(tv=1.0), dict(ce=0.1, kl=0.3, tv=0.9, confidence=1.0)]
)
@pytest.mark.parametrize("kind", ["eagle3", "vanilla", "rnn"])
def test_objective_is_its_naive_twin(kind, terms, softcap):
    """Loss, metrics and every gradient to 1e-5; labels outside have no ce term, the target's mass outside is a miss."""
    if kind == "eagle3":
        terms = {k: v for k, v in terms.items() if k != "confidence"}
    d, b = make(kind), batch()
    d.vocab.softcap = softcap
    config = LossConfig(**terms, slot_decay=0.8, chunk=5)
    anchors, real = d.anchors(b, torch.arange(2))
    loss, weight, metrics = Objective(d, config)(b, anchors=(anchors, real))
    (loss / weight).backward()
    ours = {n: p.grad for n, p in d.named_parameters() if p.grad is not None}
    d.zero_grad(set_to_none=True)
    twin, twin_weight, twin_metrics = naive(d, config, b, anchors, real)
    (twin / twin_weight).backward()
    torch.testing.assert_close(loss / weight, twin / twin_weight, atol=1e-5, rtol=1e-5)
    for name, p in d.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(ours[name], p.grad, atol=1e-5, rtol=1e-4)
    for name, value in twin_metrics.items():
        total, count = metrics[name]
        torch.testing.assert_close(total / count, value, atol=1e-5, rtol=1e-5)


def test_shapes_of_the_sequential_head():
    """It reads any token and adds to the kept ones."""
    d = make("vanilla")
    assert d.markov_head.markov_w1.weight.shape == (V, 5) and d.rows_out.shape == (8, 5)
    assert all(p.requires_grad for p in d.parameters())
    assert not d.vocab.draft_head.requires_grad


# -- decoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_decoding(kind):
    """A proposal's law is one over all V tokens: what training teaches on the kept ones, 0 elsewhere."""
    d, b = make(kind), batch()
    state, n = d.new_state(2, 30), 9
    d.observe(state, b.features[:, :n], b.tokens[:, 1 : n + 1], [n, n])
    u = uniforms(torch.arange(2)[:, None], torch.arange(G), 0)
    p = d.propose(state, Sampling(temperature=1.0), u)
    assert p.probs.shape == (2, G, V) and torch.allclose(p.probs.sum(-1), torch.ones(2, G))
    assert torch.isin(p.tokens, KEPT).all() and (p.probs.gather(-1, p.tokens[..., None]) > 0).all()
    tokens = torch.cat([b.tokens[:, : n + 1], p.tokens], 1)
    junk = torch.full((2, tokens.shape[1] - n, 32), 9.0)
    b = Batch(
        tokens, torch.ones_like(tokens).bool(), torch.cat([b.features[:, :n], junk], 1), torch.zeros(*tokens.shape, 16)
    )
    hidden = d.hidden(b, torch.full((2, 1), n))
    law = d.logits(hidden, tokens[:, None, n : n + G]).softmax(-1)[:, 0]
    torch.testing.assert_close(p.probs[..., KEPT], law, atol=1e-5, rtol=1e-4)
    assert (p.probs.index_fill(-1, KEPT, 0.0) == 0).all()


@pytest.mark.parametrize("kind", ["eagle3", "vanilla"])
def test_greedy_output_is_the_target_s(kind):
    """Token for token, though half of what the target writes cannot be drafted."""
    tgt, prompts = target(), [[1, 2, 3], [4] * 9, [7]]
    base = generate(tgt, None, prompts, max_new_tokens=20)
    written = {t for g in base for t in g.tokens}
    kept = torch.tensor(sorted({*list(written)[::2], 0, 1}))
    assert written - set(kept.tolist())
    out = generate(tgt, make(kind, kept), prompts, max_new_tokens=20)
    assert [g.tokens for g in out] == [g.tokens for g in base]


@pytest.mark.parametrize("sampling", [Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=4)])
@pytest.mark.parametrize("kind", ["eagle3", "vanilla"])
def test_sampled_law_is_the_target_s(kind, sampling):
    """Joint law of three tokens over a vocabulary of 5, of which 2 can be drafted, from 1500 requests: chi-square below
    its 1 - 1e-6 quantile. Seeds are fixed, so chance decides once."""
    tgt, n = target(5), 1500
    d = make(kind, torch.tensor([1, 4]), tgt)
    out = generate(tgt, d, [[1, 2, 3]] * n, max_new_tokens=3, sampling=sampling, concurrency=500)
    seen = Counter(tuple(g.tokens) for g in out)
    assert sum(a for g in out for _, a in g.rounds) > 100
    cells = list(itertools.product(range(5), repeat=3))
    session = tgt.open(125, 8)
    logits = session.score(torch.tensor([[1, 2, 3, *c] for c in cells])).logits
    law = sampling.probs(logits)
    want = torch.stack([law[i, 2, a] * law[i, 3, b] * law[i, 4, c] for i, (a, b, c) in enumerate(cells)]).double() * n
    got = torch.tensor([seen[c] for c in cells]).double()
    assert got[want == 0].sum() == 0
    big = want >= 5
    pairs = [(got[big], want[big]), (got[~big].sum()[None], want[~big].sum()[None])]
    g, w = (torch.cat(x) for x in zip(*pairs))
    statistic, freedom = ((g - w)[w > 0] ** 2 / w[w > 0]).sum().item(), int((w > 0).sum()) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 4.753 * (2 / (9 * freedom)) ** 0.5) ** 3  # Wilson and Hilferty
    assert statistic < limit, (statistic, freedom)


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_save_then_load(kind, tmp_path):
    """d2t holds offsets, t2d a mask, lm_head the kept rows; loaded, it is the same drafter."""
    tgt, d, b = target(), make(kind), batch()
    d.save(tmp_path / "d")
    saved, raw = (
        load_file(tmp_path / "d" / "model.safetensors"),
        json.loads((tmp_path / "d" / "config.json").read_text()),
    )
    assert raw["draft_vocab_size"] == 8 and raw["vocab_size"] == V
    assert saved["d2t"].dtype == torch.int64 and (torch.arange(8) + saved["d2t"]).tolist() == KEPT.tolist()
    assert saved["t2d"].dtype == torch.bool and saved["t2d"].nonzero()[:, 0].tolist() == KEPT.tolist()
    assert torch.equal(saved["lm_head.weight"], tgt.vocab.head[KEPT])
    anchors = torch.tensor([[4, 6], [3, 5]])
    prev = gather_slots(b.tokens, anchors[..., None] + torch.arange(G))
    for ours in (True, False):  # also as another trainer would have written it
        if not ours:
            raw.pop("deepspec")
            (tmp_path / "d" / "config.json").write_text(json.dumps(raw))
        back = deepspec.load_drafter(tmp_path / "d", tgt)
        assert torch.equal(back.vocab.kept, KEPT) and back.config.draft_vocab_size == 8
        assert torch.equal(back.logits(back.hidden(b, anchors), prev), d.logits(d.hidden(b, anchors), prev))


def test_a_full_vocabulary_saves_no_map(tmp_path):
    make("vanilla", torch.arange(V), draft_vocab_size=None).save(tmp_path / "d")
    assert not {"d2t", "t2d", "lm_head.weight"} & load_file(tmp_path / "d" / "model.safetensors").keys()
    assert json.loads((tmp_path / "d" / "config.json").read_text()).get("draft_vocab_size") is None


@pytest.mark.parametrize(
    "broken, message",
    [
        (lambda t: t | {"d2t": KEPT}, "no map of offsets"),
        (lambda t: t | {"d2t": KEPT - torch.arange(8) + 3}, "leaves 0 to 22"),
        (lambda t: t | {"t2d": ~t["t2d"]}, "do not name the same tokens"),
        (lambda t: t | {"d2t": t["d2t"][:7]}, "7 entries, lm_head.weight 8 rows"),
        (lambda t: {k: v for k, v in t.items() if k not in ("d2t", "t2d")}, "no d2t to say which"),
    ],
)
def test_broken_maps_are_refused(broken, message, tmp_path):
    """Absolute ids where offsets belong, maps that disagree or leave the vocabulary: one line, the drafter named."""
    make("eagle3").save(tmp_path / "d")
    file = tmp_path / "d" / "model.safetensors"
    save_file(broken(load_file(file)), file)
    with pytest.raises(InputError, match=message) as error:
        deepspec.load_drafter(tmp_path / "d", target())
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("kind", ["eagle3", "vanilla", "dflash"])
def test_setting_and_vocabulary_must_agree(kind):
    """draft_vocab_size with the whole vocabulary says what is missing; so does the reverse."""
    cls, own = KINDS[kind]
    block = {} if kind == "eagle3" else dict(mask_token_id=22, num_draft_layers=1)
    config = cls(block_size=G, target_layer_ids=LAYERS, draft_vocab_size=8, **block, **own)
    with pytest.raises(ConfigError, match="draft_vocab_size is 8, the vocabulary drafts 23 of 23"):
        config.build(target().spec, target().vocab)
    with pytest.raises(ConfigError, match="draft_vocab_size is None, the vocabulary drafts 8 of 23"):
        make(kind, draft_vocab_size=None)


def test_vocab_shares_the_target_s_tensors():
    """Nothing of size [V, D] is copied, and the target's own vocabulary is as it was."""
    vocab = target().vocab
    small = draft_vocab.reduce(vocab, KEPT)
    assert small.embedding.data_ptr() == vocab.embedding.data_ptr() and small.head.data_ptr() == vocab.head.data_ptr()
    assert isinstance(small, Vocab) and vocab.kept is None and vocab.draft_size == vocab.size == small.size == V


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dspark", "dflash", "eagle3"])
def test_a_run_with_fewer_tokens(kind, tmp_path):
    """A run drafts from the tokens its rows supervise most; stopped and gone on with, it is the uninterrupted run, map
    and all; what it saves decodes losslessly; another run starts from it with its map, whatever its own rows say."""
    file, V = helpers.write_run(tmp_path), helpers.V
    base = deepspec.load_config(file, "train.save_every=1", "loss.confidence=0")
    common = dict(block_size=4, target_layer_ids=(0, 2), draft_vocab_size=17)
    drafter = {
        "dspark": DSparkConfig(num_draft_layers=1, mask_token_id=39, num_anchors=6, markov_rank=4, **common),
        "dflash": DFlashConfig(num_draft_layers=1, mask_token_id=39, num_anchors=6, **common),
        "eagle3": Eagle3Config(**common),
    }[kind]

    def config(name: str, **train):
        changed = dataclasses.replace(base.train, **train)
        return dataclasses.replace(base, drafter=drafter, train=changed, out=tmp_path / name)

    reports = list(deepspec.fit(config("straight")))
    counts = torch.bincount(torch.tensor([t for r in helpers.token_rows(10) for t in r["answer_ids"]]), minlength=V)
    kept = reports[-1].drafter.vocab.kept
    assert len(kept) == 17 and counts[kept].min() >= counts[~torch.isin(torch.arange(V), kept)].max()
    assert reports[-1].metrics["loss"] < reports[0].metrics["loss"]
    parts = []
    for report in deepspec.fit(config("parts"), stop=lambda: len(parts) >= 3):
        parts.append(report)
    parts += deepspec.fit(config("parts"))
    assert [r.metrics for r in parts] == [r.metrics for r in reports]
    a, b = (load_file(tmp_path / n / "drafter" / "model.safetensors") for n in ("straight", "parts"))
    assert a.keys() == b.keys() and {"lm_head.weight", "d2t", "t2d"} <= a.keys()
    assert all(torch.equal(a[k], b[k]) for k in a)
    tgt = Target.load(str(tmp_path / "target"))
    prompts = [[3, 7, 1], [5, 5, 2, 8]]
    drafted = generate(tgt, load_drafter(tmp_path / "parts", tgt), prompts, max_new_tokens=20)
    assert [g.tokens for g in drafted] == [g.tokens for g in generate(tgt, None, prompts, max_new_tokens=20)]
    helpers.write_jsonl(tmp_path / "rows.jsonl", helpers.token_rows(10, seed=1))
    first = next(deepspec.fit(config("next", init=str(tmp_path / "straight"), lr=1e-9)))
    assert torch.equal(first.drafter.vocab.kept, kept)
    for name, value in first.drafter.state_dict().items():
        torch.testing.assert_close(value, a[name], atol=1e-6, rtol=1e-5)
