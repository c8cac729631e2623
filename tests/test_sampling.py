"""Laws of sampling: the filters, the drawing, the uniforms. Letters: V vocabulary."""

import itertools
import math

import pytest
import torch
from helpers import chi_square_p

from deepspec import ConfigError, Sampling, sampling
from deepspec.sampling import ACCEPT, ANCHOR, DRAFT, TARGET, draw, fold, slot_streams, uniforms

STREAMS = (DRAFT, ACCEPT, TARGET, ANCHOR, *slot_streams(DRAFT, 2)[1:].tolist(), *slot_streams(ACCEPT, 2)[1:].tolist())


def reference(logits: list[float], s: Sampling) -> list[float]:
    """The law by its definition, in Python floats: temperature, top-k, top-p, min-p, each on the renormalised rest."""
    top = max(logits)
    mass = [math.exp((x - top) / s.temperature) for x in logits]
    order = sorted(range(len(mass)), key=lambda i: (-mass[i], i))
    if s.top_k:
        least = mass[order[min(s.top_k, len(order)) - 1]]
        mass = [m if m >= least else 0.0 for m in mass]
    total = sum(mass)
    p = [m / total for m in mass]
    if s.top_p < 1:
        kept, before = set(), 0.0
        for i in sorted(range(len(p)), key=lambda i: (-p[i], i)):
            if before < s.top_p:
                kept.add(i)
            before += p[i]
        p = [x if i in kept else 0.0 for i, x in enumerate(p)]
        total = sum(p)
        p = [x / total for x in p]
    if s.min_p:
        bar = s.min_p * max(p)
        p = [x if x >= bar else 0.0 for x in p]
        total = sum(p)
        p = [x / total for x in p]
    return p


@pytest.mark.parametrize(
    "top_k, top_p, min_p", [*itertools.product((0, 1, 3, 50), (1.0, 0.9, 0.4, 1e-6), (0.0, 0.2, 1.0))]
)
def test_filters_equal_their_definition(top_k, top_p, min_p):
    """probs == brute force for every combination of filters, at several temperatures; mass is 1."""
    logits = torch.randn(20, 11, generator=torch.Generator().manual_seed(top_k)) * 2
    for temperature in (0.3, 1.0, 2.5):
        s = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        probs = s.probs(logits)
        want = torch.tensor([reference(row, s) for row in logits.double().tolist()], dtype=torch.float64)
        torch.testing.assert_close(probs.double(), want, atol=1e-6, rtol=1e-5)
        assert ((probs == 0) == (want == 0)).all()  # support to the token
        assert (probs.sum(-1) - 1).abs().max() < 1e-5


def whole_sort(probs, top_p):
    """The nucleus by sorting everything: [..., V] bool."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    mass = ordered.double().cumsum(-1)
    before = torch.cat([torch.zeros_like(mass[..., :1]), mass[..., :-1]], -1)
    return torch.zeros_like(probs, dtype=torch.bool).scatter_(-1, order, before < top_p)


@pytest.mark.parametrize("most", [1, 2, 16, 4096])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.95, 1 - 1e-9])
def test_the_nucleus_is_that_of_a_whole_sort(top_p, most, monkeypatch):
    """To the token, however few of the likeliest are looked at first: peaked and flat laws beside each other, ties of
    all kinds (logits in bfloat16, whole rows of equals, pairs), in any shape, zeros among them."""
    monkeypatch.setattr(sampling, "NUCLEUS", most)
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 8, 1000, generator=g) * torch.tensor([0.0, 0.1, 1, 2, 3, 5, 10, 40])[:, None]
    logits[1] = logits[1].bfloat16().float()
    logits[2] = logits[2].round()
    logits[2, :, torch.randperm(1000, generator=g)[:300]] = -torch.inf
    probs = logits.softmax(-1)
    keep, want = sampling.nucleus(probs, top_p), whole_sort(probs, top_p)
    assert keep.shape == want.shape and torch.equal(keep, want)
    assert len(want.sum(-1).unique()) > 5 or top_p < 0.1
    assert torch.equal(sampling.nucleus(probs[0, 3], top_p), want[0, 3])
    assert torch.equal(sampling.nucleus(probs[:0], top_p), want[:0])


def test_ties_with_the_kth_stay():
    """top-k keeps every token as likely as the k-th, so that drafter and target cut alike."""
    probs = Sampling(temperature=1.0, top_k=2).probs(torch.tensor([1.0, 0.0, 0.0, -1.0]))
    assert (probs > 0).tolist() == [True, True, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_temperature_zero_is_one_hot(dtype):
    """Temperature 0 is a one-hot at the argmax, whatever the filters say, in float32."""
    logits = torch.randn(7, 13, generator=torch.Generator().manual_seed(1)).to(dtype)
    for s in (Sampling(), Sampling(temperature=0.0, top_k=3, top_p=0.1, min_p=0.5)):
        probs = s.probs(logits)
        assert probs.dtype == torch.float32
        assert (probs == torch.nn.functional.one_hot(logits.argmax(-1), 13)).all()


def test_low_temperature_approaches_greedy_and_stays_finite():
    """As the temperature falls the law approaches the one-hot, without NaN at large logits."""
    logits = torch.tensor([[100.0, 99.0, -1e4], [0.0, 1e-3, -5.0]])
    for t in (1e-2, 1e-4, 1e-30):
        probs = Sampling(temperature=t).probs(logits)
        assert probs.isfinite().all()
    torch.testing.assert_close(probs, Sampling().probs(logits))


@pytest.mark.parametrize(
    "bad",
    [
        dict(temperature=-0.1),
        dict(top_k=-1),
        dict(top_p=0.0),
        dict(top_p=1.1),
        dict(min_p=-0.1),
        dict(min_p=1.5),
        dict(temperature="hot"),
        dict(top_k=1.5),
    ],
    ids=str,
)
def test_nonsense_is_refused(bad):
    """Values outside their range are refused when they are made, with the name and the value."""
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Sampling(**bad)


# -- draw ----------------------------------------------------------------------------------------------------------


def test_draw_is_the_exact_inverse_cdf():
    """Token i is drawn exactly for u in [F(i - 1), F(i)): checked at every step of a fine grid, weights of any sum."""
    weights = torch.tensor([0.0, 2.0, 0.0, 1.0, 5.0, 0.0]).double()  # sum 8: every bound is a binary fraction
    n = 4096
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    tokens = draw(weights.expand(n, -1), u)
    assert torch.bincount(tokens, minlength=6).tolist() == [0, n // 4, 0, n // 8, n * 5 // 8, 0]
    assert (tokens.diff() >= 0).all()
    bounds = torch.tensor([0.0, 0.25, 0.375], dtype=torch.float64)  # a bound belongs to the token above it
    assert draw(weights.expand(3, -1), bounds).tolist() == [1, 3, 4]


def test_draw_is_exact_over_a_large_vocabulary():
    """Of 150,000 equal float32 weights, token floor(150,000 u) is drawn: the running sum is kept in float64, where
    one in float32 would draw the token before."""
    n = 150_000
    u = (torch.arange(0, n, 997, dtype=torch.float64) + 1e-3) / n  # just above the bounds
    weights = torch.full((1, n), 0.1)
    assert draw(weights.expand(len(u), -1), u).tolist() == list(range(0, n, 997))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draw_never_yields_a_weightless_token(dtype):
    """Not at the smallest and largest uniforms there are, with zeros at both ends, for sums far from 1."""
    g = torch.Generator().manual_seed(0)
    for scale in (1e-30, 1.0, 1e20):
        weights = torch.rand(400, 37, generator=g, dtype=dtype) * scale
        weights = weights * (torch.rand(400, 37, generator=g) < 0.3)
        weights[:, 0] = weights[:, -3:] = 0
        weights[:, 17] += scale * 1e-3
        for u in (2.0**-49, 0.5, 1 - 2.0**-49):
            tokens = draw(weights, torch.full((400,), u, dtype=torch.float64))
            assert (tokens < 37).all()
            assert (weights.gather(1, tokens[:, None]) > 0).all()


def test_draw_follows_the_weights():
    """Chi-square of 20,000 draws with keyed uniforms. Fixed seed; a fresh one would fail once in 10,000."""
    law = Sampling(temperature=1.0).probs(torch.randn(12, generator=torch.Generator().manual_seed(3)))
    u = uniforms(torch.tensor(7), torch.arange(20000), DRAFT)
    counts = torch.bincount(draw(law.expand(20000, -1), u), minlength=12)
    assert chi_square_p(counts, law) > 1e-4


# -- uniforms ------------------------------------------------------------------------------------------------------

SEEDS = [0, 1, 2, 41, -1, -2, 2**31, 2**32, 2**32 + 1, 2**33, 2**40 + 5, 2**62 + 3, 2**63 - 1, -(2**63), -(2**63) + 1]


def test_uniforms_depend_on_their_key_only():
    """The number of (seed, position, stream) is the same alone and in any broadcast shape, for every int64 seed."""
    seeds, places = torch.tensor(SEEDS), torch.arange(300)
    for stream in STREAMS:
        grid = uniforms(seeds[:, None], places, stream)
        assert len(grid.unique()) == grid.numel()  # other seeds, other numbers: every bit of the seed counts
        assert grid.dtype == torch.float64 and grid.shape == (len(SEEDS), 300)
        for i, seed in enumerate(SEEDS):
            for j in (0, 1, 77, 299):
                assert uniforms(torch.tensor(seed), torch.tensor(j), stream) == grid[i, j]


def test_uniforms_are_pinned():
    """The numbers themselves, to their last bit, so that a later release decodes, draws anchors and resumes as this one
    did."""
    found = uniforms(torch.tensor([0, 42, -1]), torch.tensor([0, 9, 1000]), TARGET)
    assert (found * 2**48).long().tolist() == [38359904523044, 3503979470328, 277943594910843]
    found = fold(3, torch.tensor([0, 2**40]), torch.tensor([7, -1]))
    assert found.tolist() == [2344910297472578039, 2159195726292261618]


def test_uniforms_lie_strictly_inside_the_unit_interval():
    """0 < u < 1, and u * total < total for float32 totals of every size: no draw can run off the end."""
    u = uniforms(torch.arange(2000)[:, None], torch.arange(500), TARGET)
    assert u.min() > 0 and u.max() < 1
    largest = torch.tensor(1 - 2.0**-49, dtype=torch.float64)
    for total in (1.0, 0.9999999, 1e-30, 3e20):
        assert largest * total < total


def test_uniforms_are_uniform():
    """Chi-square over 64 cells: along positions, along seeds, for each stream. Fixed seeds; fresh ones would fail in
    1 of 10,000 for each of 20 tests."""
    flat = torch.ones(64)
    for stream in STREAMS:
        for key in (
            (torch.tensor(0), torch.arange(20000)),
            (torch.arange(20000), torch.tensor(5)),
            (torch.arange(20000) << 8, torch.tensor(5)),  # the seeds of training anchors
            (torch.arange(20000) << 40, torch.tensor(0)),
            (-torch.arange(1, 20001), torch.tensor(1)),
        ):
            cells = (uniforms(*key, stream) * 64).long()
            assert chi_square_p(torch.bincount(cells, minlength=64), flat) > 1e-4


def test_streams_are_uncorrelated():
    """Pairs of streams, of neighbouring seeds, of neighbouring positions: chi-square of the pair over 16 x 16 cells.
    Fixed seeds; fresh ones would fail in 1 of 10,000 for each of 21 tests."""
    seeds, places = torch.arange(200)[:, None], torch.arange(300)
    grids = {s: uniforms(seeds, places, s) for s in STREAMS}
    pairs = [(grids[a], grids[b]) for a, b in itertools.combinations(STREAMS, 2)]
    # one anchor's draft, coin and own token have a number each, and so have two anchors after each other
    pairs += [(grids[s][:, 1:], grids[s][:, :-1]) for s in STREAMS[:3]] + [
        (grids[s][1:], grids[s][:-1]) for s in STREAMS[:3]
    ]
    for a, b in pairs:
        cells = (a * 16).long() * 16 + (b * 16).long()
        assert chi_square_p(torch.bincount(cells.flatten(), minlength=256), torch.ones(256)) > 1e-4


def test_every_slot_has_a_stream_of_its_own():
    """Streams of 300 slots of drafts and coins, and the two without slots, are all different."""
    streams = [*slot_streams(DRAFT, 300).tolist(), *slot_streams(ACCEPT, 300).tolist(), TARGET, ANCHOR]
    assert len(set(streams)) == 602 and streams[0] == DRAFT and streams[300] == ACCEPT


def test_requests_do_not_share_numbers():
    """Among 2,000 requests of 256 positions, 3 streams, hardly any number occurs twice: with 48 bits one pair in 10^15
    would, 0.004 in all; 1.5 million numbers of 32 bits would repeat about 275 times."""
    u = torch.stack([uniforms(torch.arange(2000)[:, None], torch.arange(256), s) for s in STREAMS[:3]]).flatten()
    assert len(u.unique()) >= len(u) - 2
