"""Drafters of another width than their target, and drafters that see a window of the context only.

One thread, fixed seeds, nothing left to chance.
"""

import dataclasses
import warnings

import pytest
import torch
from torch import nn

import deepspec
from deepspec.checked import ConfigError, InputError
from deepspec.hub.files import read_config
from deepspec.hub.load import from_json
from deepspec.modeling.attention import sees_context
from deepspec.modeling.cache import KVCache
from deepspec.modeling.spec import BlockSpec
from deepspec.modeling.vocab import Vocab

V, D, T, G = 53, 32, 40, 4
SPEC = BlockSpec(
    dim=D,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_dim=48,
    inv_freq=tuple((1 / 1e4 ** (torch.arange(0, 8, 2) / 8)).tolist()),
    attn_scale=8**-0.5,
    rope=(("rope_theta", "10000.0"), ("rope_type", '"default"')),
)
COMMON = {"block_size": G, "target_layer_ids": (1, 3), "num_draft_layers": 2, "mask_token_id": 52, "num_anchors": 5}
CONFIGS = {
    "dflash": deepspec.DFlashConfig(**COMMON),
    "dspark": deepspec.DSparkConfig(**COMMON, markov_rank=8),
    "dspark_rnn": deepspec.DSparkConfig(**COMMON, markov_rank=8, markov_head_type="rnn"),
    "dspark_gated": deepspec.DSparkConfig(**COMMON, markov_rank=8, markov_head_type="gated"),
    "dflash_masks": deepspec.DFlashConfig(**COMMON, sample_from_anchor=False),
}


class Stub:
    """What loading a drafter asks of a target."""

    name, spec, num_layers, device, dtype = "stub", SPEC, 6, torch.device("cpu"), torch.float32

    def __init__(self, vocab: Vocab) -> None:
        self.vocab = vocab


@pytest.fixture
def vocab():
    torch.manual_seed(0)
    return Vocab(torch.randn(V, D), torch.randn(V, D) * 0.3)


def build(config, vocab):
    torch.manual_seed(1)
    return config.build(SPEC, vocab).eval()


def random_batch(seed=2):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, V - 1, (2, T), generator=g)
    features, hidden = torch.randn(2, T, 2 * D, generator=g), torch.randn(2, T, D, generator=g)
    return deepspec.Batch(tokens, torch.ones_like(tokens).bool(), features, hidden)


def decoded(drafter, batch, ends):
    """The proposal of rows that have observed ends[b] positions, in two unequal parts."""
    state = drafter.new_state(2, T)
    half = [e // 3 for e in ends]
    drafter.observe(state, batch.features, batch.tokens[:, 1:], half)
    rest = [e - h for e, h in zip(ends, half)]
    parts = [torch.stack([x[b].roll(-h, 0) for b, h in enumerate(half)]) for x in (batch.features, batch.tokens)]
    drafter.observe(state, parts[0], parts[1][:, 1:], rest)
    return drafter.propose(state, deepspec.Sampling(temperature=1.0), torch.full((2, drafter.num_slots), 0.4))


def check_train_is_decode(drafter, batch, ends):
    with torch.no_grad():
        proposal = decoded(drafter, batch, ends)
        anchors = torch.tensor(ends)[:, None]
        prev = torch.cat([batch.tokens.gather(1, anchors), proposal.tokens[:, :-1]], 1)[:, None]
        law = drafter.logits(drafter.hidden(batch, anchors), prev)[:, 0].softmax(-1)
    torch.testing.assert_close(proposal.probs, law, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width,mlp_width", [(16, None), (48, 40), (None, 24)])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_drafter_of_another_width(kind, width, mlp_width, vocab, tmp_path):
    """It trains, decodes as it trains, and comes back from its file; heads and vocabulary see the target's width."""
    config = dataclasses.replace(CONFIGS[kind], width=width, mlp_width=mlp_width)
    drafter = build(config, vocab)
    assert drafter.spec.dim == (width or D)
    assert drafter.spec.mlp_dim == (mlp_width or 24)
    batch = random_batch()
    anchors, _ = drafter.anchors(batch, torch.tensor([0, 1]))
    assert drafter.hidden(batch, anchors).shape == (2, 5, drafter.num_slots, D)
    loss, _, _ = deepspec.Objective(drafter, deepspec.LossConfig(ce=1.0))(batch)
    loss.backward()
    for name, p in drafter.named_parameters():
        assert p.grad is not None or "confidence" in name, name
    check_train_is_decode(drafter, batch, [21, 13])
    drafter.save(tmp_path / "d")
    raw = read_config(tmp_path / "d")
    assert (raw["hidden_size"], raw["target_hidden_size"]) == (width or D, D)
    loaded = deepspec.load_drafter(tmp_path / "d", Stub(vocab))
    assert loaded.config == config and loaded.spec == drafter.spec
    with torch.no_grad():
        assert torch.equal(loaded.hidden(batch, anchors), drafter.hidden(batch, anchors))


def test_widths_are_checked(vocab, tmp_path):
    with pytest.raises(ConfigError, match=r"drafter\.width must be >= 1"):
        dataclasses.replace(CONFIGS["dflash"], width=0)
    build(dataclasses.replace(CONFIGS["dflash"], width=16), vocab).save(tmp_path / "d")
    narrow = Stub(Vocab(torch.randn(V, 16), torch.randn(V, 16)))
    narrow.spec = dataclasses.replace(SPEC, dim=16)
    with pytest.raises(InputError, match="target of hidden size 32; 'stub' has 16"):
        deepspec.load_drafter(tmp_path / "d", narrow)


@pytest.mark.parametrize("window", [5, 9, 128])
@pytest.mark.parametrize("kind", CONFIGS)
def test_windowed_drafters_decode_as_they_train_and_say_so(kind, window, vocab, tmp_path):
    config = dataclasses.replace(CONFIGS[kind], sliding_window=window)
    drafter = build(config, vocab)
    batch = random_batch()
    for ends in ([30, 30], [33, 7], [4, 6]):
        check_train_is_decode(drafter, batch, ends)
    drafter.save(tmp_path / "d")
    raw = read_config(tmp_path / "d")
    assert raw["layer_types"] == ["sliding_attention"] * 2 and raw["sliding_window"] == window
    assert raw["dflash_config"]["causal"] is False
    assert deepspec.load_drafter(tmp_path / "d", Stub(vocab)).config == config
    del raw["deepspec"]  # as another trainer would have written it
    assert from_json(raw, set(drafter.state_dict())).sliding_window == window


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
@pytest.mark.parametrize("masks", [False, True])
def test_only_the_window_matters(backend, masks, vocab):
    """One layer, so nothing is passed on: slot g at a + g sees the context from a + g - W + 1 to a - 1. A state outside
    changes nothing to the bit; one inside changes the slot. Training, both backends, and decoding."""
    window, anchor = 9, 30
    config = dataclasses.replace(
        CONFIGS["dflash"], num_draft_layers=1, sliding_window=window, sample_from_anchor=not masks
    )
    drafter = build(config, vocab)
    drafter.attention = backend
    anchors = torch.tensor([[12, anchor], [12, anchor]])
    batch = random_batch()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # flex without a compiler says it is slow
        before = drafter.hidden(batch, anchors)[0, 1]
        drawn = decoded(drafter, batch, [anchor, 20]).probs[0]
        for place in range(T):
            features = batch.features.clone()
            features[0, place] += 1.0
            changed = dataclasses.replace(batch, features=features)
            after = drafter.hidden(changed, anchors)[0, 1]
            law = decoded(drafter, changed, [anchor, 20]).probs[0]
            for slot in range(drafter.num_slots):
                at = slot + masks
                seen = anchor + at - window < place < anchor
                assert torch.equal(before[slot], after[slot]) != seen, (place, slot)
                assert torch.equal(drawn[slot], law[slot]) != seen, (place, slot)


def test_a_window_larger_than_the_sequence_is_none(vocab):
    batch, anchors = random_batch(), torch.tensor([[3, 17, 38], [0, 1, 2]])
    plain = build(CONFIGS["dflash"], vocab)
    windowed = build(dataclasses.replace(CONFIGS["dflash"], sliding_window=T + G), vocab)
    with torch.no_grad():
        torch.testing.assert_close(plain.hidden(batch, anchors), windowed.hidden(batch, anchors))
        for a, b in zip(
            vars(decoded(plain, batch, [30, 9])).values(), vars(decoded(windowed, batch, [30, 9])).values()
        ):
            torch.testing.assert_close(a, b)


def test_decoding_reads_the_window_alone(vocab, monkeypatch):
    """However long the context, a proposal reads the cache from the first place that any row's window reaches."""
    window = 9
    drafter = build(dataclasses.replace(CONFIGS["dflash"], sliding_window=window), vocab)
    asked, read = [], KVCache.read
    monkeypatch.setattr(
        KVCache, "read", lambda self, layer, length, rows=None, first=0: (
            asked.append((first, length)) or read(self, layer, length, rows, first)
        ),
    )  # fmt: skip
    decoded(drafter, random_batch(), [30, 20])
    assert set(asked) == {(20 + 1 - window, 30 + drafter.config.block_size)}


def test_the_rule_counts_the_slot_itself():
    """Window 3, slot 1 of the block at 10: position 11 sees 9, 10, 11, of which 9 is context."""
    place = torch.arange(12)
    zero = torch.zeros(1, dtype=torch.long)
    seen = sees_context(torch.tensor(10), zero, place, zero, 1, 3)
    assert seen.nonzero().flatten().tolist() == [9]


def test_unreadable_windows_are_refused(vocab, tmp_path):
    with pytest.raises(ConfigError, match=r"sliding_window \(4\) must be greater than drafter\.block_size"):
        dataclasses.replace(CONFIGS["dflash"], sliding_window=4)
    build(CONFIGS["dflash_masks"], vocab).save(tmp_path / "d")
    raw = read_config(tmp_path / "d")
    del raw["deepspec"]
    raw |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    with pytest.raises(InputError, match="all layers are sliding"):
        from_json(raw, {"fc.weight"})


def test_heads_read_the_targets_width(vocab):
    drafter = build(dataclasses.replace(CONFIGS["dspark_gated"], width=16), vocab)
    gate = drafter.markov_head.gate_proj
    assert isinstance(gate, nn.Linear) and gate.in_features == D + 8
    assert drafter.confidence_head.proj.in_features == D + 8
