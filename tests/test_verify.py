"""Laws of verification: what is committed follows the target's law exactly, whatever the drafter proposes.

Letters: V vocabulary, G slots, n grid points a coin.
"""

import itertools

import pytest
import torch
from helpers import chi_square_p, drafter_config, exact_law, hf_model, make_drafter, randomize, target

import deepspec
from deepspec import Proposal, Sampling, Target, verify
from deepspec.eval.cost import StepsPerSecond
from deepspec.eval.generate import stream
from deepspec.eval.verify import agree
from deepspec.modeling.cache import Ragged

V, G = 3, 3


def tables(seed: int, sharp: float = 1.0):
    """p(x | prefix) and q(x | prefix) for prefixes of length 0..G."""
    g = torch.Generator().manual_seed(seed)
    prefixes = [p for n in range(G + 1) for p in itertools.product(range(V), repeat=n)]
    law = lambda scale: {p: (torch.rand(V, generator=g) * scale).softmax(-1) for p in prefixes}  # noqa: E731
    return law(sharp), law(4 * sharp)


def cuts(judge, rows: int) -> torch.Tensor:
    """[rows, G] where each slot's coin changes sides, found by bisecting: with every earlier coin at its luckiest and
    every later one at its worst, a slot is passed exactly below its cut. (1 where the coin does not matter.)"""
    tiny, found = 1e-15, []
    for g in range(G):
        low, high = torch.zeros(rows, dtype=torch.float64), torch.ones(rows, dtype=torch.float64)
        for _ in range(50):
            middle = (low + high) / 2
            coins = torch.cat(
                [torch.full((rows, g), tiny), middle[:, None], torch.full((rows, G - g - 1), 1 - tiny)], 1
            )
            passed = judge(coins.double(), torch.full((rows,), 0.5).double()).accepted > g
            low, high = torch.where(passed, middle, low), torch.where(passed, high, middle)
        found.append(torch.where(high < 1e-14, 0.0, torch.where(low > 1 - 1e-14, 1.0, high)))
    return torch.stack(found, 1)


def joint(p: dict, q: dict, lengths, rule: str = "token") -> tuple[torch.Tensor, float]:
    """[V] * (G + 1) law of the first G + 1 committed tokens, and the expected number of accepted drafts, by calling
    verify on every draft and every interval of every coin and integrating analytically: verify is constant between the
    points at which a coin, or the next token's draw, changes sides.

    `lengths(draft)` is the schedule. What a round leaves open is filled with the target's own law, so the result must
    be the target's joint law."""
    drafts = list(itertools.product(range(V), repeat=G))
    target_probs = torch.stack([torch.stack([p[d[:g]] for g in range(G + 1)]) for d in drafts])
    probs = torch.stack([torch.stack([q[d[:g]] for g in range(G)]) for d in drafts])
    made = torch.tensor([lengths(d) for d in drafts])

    def judge(at):
        parts = Proposal(torch.tensor(drafts)[at], probs[at], torch.ones(len(at), G))
        return lambda coins, u: verify(target_probs[at], parts, made[at], torch.cat([coins, u[:, None]], 1), rule)

    edges = cuts(judge(torch.arange(len(drafts))), len(drafts))
    rows = []  # (weight, draft's number, coin midpoints)
    for i, draft in enumerate(drafts):
        weight = 1.0
        for g in range(G):
            weight *= (q[draft[:g]][draft[g]].double() / q[draft[:g]].double().sum()).item()
        sides = [[c for c in ((e, e / 2), (1 - e, (1 + e) / 2)) if c[0] > 0] for e in edges[i].tolist()]
        for combination in itertools.product(*sides):
            w = weight
            for width, _ in combination:
                w *= width
            rows.append((w, i, [middle for _, middle in combination]))
    law, expected = torch.zeros(*[V] * (G + 1), dtype=torch.float64), 0.0
    ahead = {tokens: after(p, tokens) for n in range(G + 2) for tokens in itertools.product(range(V), repeat=n)}
    coins = torch.tensor([r[2] for r in rows]).double()
    for token, width, accepted in next_tokens(judge(torch.tensor([r[1] for r in rows])), coins):
        for (w, number, _), size, n in zip(rows, width.tolist(), accepted.tolist()):
            if size:
                committed = (*drafts[number][:n], token)
                expected += w * size * n
                law[committed] += w * size * ahead[committed]
    return law, expected


def next_tokens(judge, coins):
    """For each token: the measure of draws that yield it, found by bisecting the monotone draw; and accepted."""
    rows = len(coins)

    def at(u):
        return judge(coins, u)

    edges = [torch.zeros(rows, dtype=torch.float64)]
    for token in range(V - 1):  # the largest u that yields a token <= `token`
        low, high = torch.zeros(rows, dtype=torch.float64), torch.ones(rows, dtype=torch.float64)
        for _ in range(50):
            middle = (low + high) / 2
            below = at(middle).next_token <= token
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        edges.append(torch.where(high < 1e-14, 0.0, high))
    edges.append(torch.ones(rows, dtype=torch.float64))
    accepted = at(torch.full((rows,), 0.5, dtype=torch.float64)).accepted
    for token in range(V):
        yield token, (edges[token + 1] - edges[token]).clamp(min=0), accepted


def after(p: dict, tokens: tuple[int, ...]) -> torch.Tensor:
    """[V] for each token that is missing: the target's law of what follows `tokens`, G + 1 tokens in all."""
    if len(tokens) == G + 1:
        return torch.ones((), dtype=torch.float64)
    law = p[tokens].double() / p[tokens].double().sum()
    return torch.stack([law[x] * after(p, (*tokens, x)) for x in range(V)])


def exact(p: dict) -> torch.Tensor:
    return after(p, ())


SCHEDULES = {
    "all": lambda draft: G,
    "none": lambda draft: 0,
    "first": lambda draft: 1,
    "by the first token": lambda draft: 1 + (draft[0] == 1),  # slot 1 admitted on what precedes it: allowed
    "by each token": lambda draft: next((g for g in range(1, G) if draft[g - 1] == 0), G),
}


RULES = ("token", "block")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_joint_law_is_the_targets(schedule, seed, rule):
    """All drafts, all coins, all draws, integrated analytically on 3 tokens and 3 slots: the joint law of four
    tokens is the target's to 1e-6, the rounding of float32 probabilities. Under both rules."""
    p, q = tables(seed, sharp=1.0 + seed)
    assert (joint(p, q, SCHEDULES[schedule], rule)[0] - exact(p)).abs().max() < 1e-6


@pytest.mark.parametrize("rule", RULES)
def test_joint_law_is_exact_for_exact_numbers(rule):
    """With probabilities that are binary fractions, zeros among them, nothing rounds: the joint law is the target's to
    1e-12."""
    p, q = tables(0)
    eighths = [
        torch.tensor(x) / 8 for x in ([1.0, 2, 5], [4.0, 4, 0], [0.0, 1, 7], [2.0, 4, 2], [8.0, 0, 0], [3.0, 3, 2])
    ]
    for i, prefix in enumerate(p):
        p[prefix], q[prefix] = eighths[i % 6], eighths[(2 * i + 1) % 6]
    for schedule in SCHEDULES.values():
        assert (joint(p, q, schedule, rule)[0] - exact(p)).abs().max() < 1e-12


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_the_block_rule_never_keeps_fewer(schedule):
    """Expected accepted drafts: block verification at least those of token by token, for every schedule, and clearly
    more where all three slots are judged."""
    for seed in range(4):
        p, q = tables(seed, sharp=2.0)
        token, block = (joint(p, q, SCHEDULES[schedule], rule)[1] for rule in RULES)
        assert block > token - 1e-9 and (schedule != "all" or block > token + 0.02)


@pytest.mark.parametrize("rule", RULES)
def test_a_length_that_looks_ahead_breaks_the_law(rule):
    """The sum above has teeth: admitting slot 1 by its own token shifts the law of what is committed."""
    q, p = tables(1)
    assert (joint(p, q, lambda draft: int(draft[0] == 1) * G, rule)[0] - exact(p)).abs().max() > 5e-3


def test_of_one_hot_laws_both_rules_keep_the_agreeing_prefix():
    """At temperature 0 there is one answer: the longest agreeing prefix, then the target's token, whatever the coin;
    `agree` finds it without laws."""
    g = torch.Generator().manual_seed(3)
    B, S, n = 256, 4, 2
    own, drafted = (torch.randint(0, n, (B, S + k), generator=g) for k in (1, 0))
    p, q = (torch.nn.functional.one_hot(x, n).float() for x in (own, drafted))
    u = torch.rand(B, S + 1, generator=g, dtype=torch.float64)
    lengths = torch.randint(0, S + 1, (B,), generator=g)
    kept = ((own[:, :S] == drafted) & (torch.arange(S) < lengths[:, None])).cumprod(1).sum(1)
    assert set(kept.tolist()) == set(range(S + 1))
    for rule in RULES:
        verdict = verify(p, Proposal(drafted, q, torch.ones(B, S)), lengths, u, rule)
        assert torch.equal(verdict.accepted, kept)
        assert torch.equal(verdict.next_token, own.gather(1, kept[:, None])[:, 0])
        spread = torch.rand(B, S, n, generator=g).softmax(-1)  # of a drafter that is not certain, too
        assert torch.equal(verify(p, Proposal(drafted, spread, torch.ones(B, S)), lengths, u, rule).accepted, kept)
    verdict = agree(own, drafted, lengths)
    assert torch.equal(verdict.accepted, kept)
    assert torch.equal(verdict.next_token, own.gather(1, kept[:, None])[:, 0])


def appendix(length_of) -> torch.Tensor:
    """The law of the first token in the paper's Appendix A: target (0.7, 0.3), drafter (0.5, 0.5), one slot."""
    n = 5000
    u = ((torch.arange(n) + 0.5) / n).double()
    first = torch.zeros(2, dtype=torch.float64)
    target_probs = torch.tensor([0.7, 0.3]).expand(n, 2, 2)
    for token in (0, 1):
        proposal = Proposal(
            torch.full((n, 1), token), torch.full((n, 1, 2), 0.5), torch.full((n, 1), 0.9 if token == 0 else 0.1)
        )
        lengths = length_of(proposal)
        for coin in (0.3, 0.8):  # one either side of p / q = 0.6 for token 1; token 0 is accepted at every coin
            weight = 0.5 * (0.6 if coin == 0.3 else 0.4)
            v = verify(target_probs, proposal, lengths, torch.stack([torch.full((n,), coin).double(), u], 1))
            committed = torch.where(v.accepted > 0, token, v.next_token)
            first += weight * torch.bincount(committed, minlength=2).double() / n
    return first


def test_appendix_a():
    """The paper's example: a schedule that admits without looking gives the target's (0.7, 0.3); one that admits
    token 0 only, by a confidence that has seen the token it would cut, gives (0.85, 0.15)."""
    active, room = torch.ones(5000, dtype=torch.bool), torch.full((5000,), 9)
    everything = appendix(lambda proposal: deepspec.verify_all()(proposal.confidence, active, room))
    nothing = appendix(lambda proposal: deepspec.threshold(1.0)(proposal.confidence, active, room))
    torch.testing.assert_close(everything, torch.tensor([0.7, 0.3], dtype=torch.float64), atol=2e-4, rtol=0)
    torch.testing.assert_close(nothing, torch.tensor([0.7, 0.3], dtype=torch.float64), atol=1e-4, rtol=0)
    ahead = appendix(lambda proposal: deepspec.threshold(0.5)(proposal.confidence, active, room))
    torch.testing.assert_close(ahead, torch.tensor([0.85, 0.15], dtype=torch.float64), atol=1e-4, rtol=0)


# -- the edges of the rule -----------------------------------------------------------------------------------------


def one(p, q, token, coin, u, length=1):
    proposal = Proposal(torch.tensor([[token]]), torch.tensor([[q]]), torch.ones(1, 1))
    coins = torch.tensor([[coin, u]], dtype=torch.float64)
    v = verify(torch.tensor([[p, p]]), proposal, torch.tensor([length]), coins)
    return int(v.accepted), int(v.next_token)


def test_equal_laws_never_refuse():
    """p == q accepts at every coin: u < 1, so u q < p."""
    for token in range(3):
        assert one([0.2, 0.3, 0.5], [0.2, 0.3, 0.5], token, 1 - 2.0**-49, 0.5)[0] == 1


def test_refusal_of_a_token_without_mass_and_of_none_with_it():
    """A token the target gives 0 is refused at every coin; the drafter's own zero cannot divide."""
    assert one([0.0, 1.0], [1.0, 0.0], 0, 2.0**-49, 0.5) == (0, 1)
    assert one([0.0, 1.0], [0.0, 1.0], 0, 0.5, 0.5) == (0, 1)  # proposed against its own law: refused all the same
    assert one([0.5, 0.5], [0.0, 1.0], 0, 1 - 2.0**-49, 0.5)[0] == 1


def test_residual_rounded_to_nothing_falls_back_to_the_target():
    """Where q >= p everywhere by rounding, a refusal has no residual; the target's own law is drawn, not the last token
    nor one without mass."""
    p, q = [0.0, 0.25, 0.75 - 1e-7, 0.0], [0.0, 0.25 + 1e-7, 0.75, 0.0]
    for u, token in ((0.1, 1), (0.9, 2), (2.0**-49, 1), (1 - 2.0**-49, 2)):
        assert one(p, q, 1, 1 - 2.0**-49, u) == (0, token)


def test_unverified_slots_are_not_judged():
    """Length 0 draws from the target at the anchor; slots beyond the length change nothing."""
    p = torch.tensor([[[0.1, 0.9], [1.0, 0.0], [0.5, 0.5]]])
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 2, (1, 2), generator=g)
        probs = torch.rand(1, 2, 2, generator=g).softmax(-1)
        u = torch.rand(1, 3, generator=g, dtype=torch.float64)
        v = verify(p, Proposal(tokens, probs, torch.ones(1, 2)), torch.tensor([0]), u)
        assert (int(v.accepted), int(v.next_token)) == (0, int(u[0, -1] > 0.1))
        # and with length 1, no matter what slot 1 holds
        outcomes = set()
        for second in (0, 1):
            t = torch.tensor([[1, second]])
            v = verify(p, Proposal(t, torch.tensor([[[0.5, 0.5], [0.5, 0.5]]]), torch.ones(1, 2)), torch.tensor([1]), u)
            outcomes.add((int(v.accepted), int(v.next_token)))
        assert outcomes == {(1, 0)}


@pytest.mark.parametrize("rule", RULES)
def test_rows_do_not_touch_each_other(rule):
    """A batch of ragged lengths == its rows one by one."""
    g = torch.Generator().manual_seed(4)
    B, S, n = 16, 5, 7
    p = torch.rand(B, S + 1, n, generator=g).mul(3).softmax(-1)
    q = torch.rand(B, S, n, generator=g).mul(3).softmax(-1)
    tokens = torch.randint(0, n, (B, S), generator=g)
    lengths = torch.randint(0, S + 1, (B,), generator=g)
    u = torch.rand(B, S + 1, generator=g, dtype=torch.float64)
    whole = verify(p, Proposal(tokens, q, torch.ones(B, S)), lengths, u, rule)
    assert (whole.accepted <= lengths).all() and len(set(whole.accepted.tolist())) > 2
    for b in range(B):
        cut = slice(b, b + 1)
        n_b = int(lengths[b])
        part = Proposal(tokens[cut], q[cut], torch.ones(1, S))
        alone = verify(p[cut, : n_b + 1], part, lengths[cut], u[cut], rule)
        assert (alone.accepted, alone.next_token) == (whole.accepted[b], whole.next_token[b])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("wide", [0, 2])
def test_real_places_alone_are_judged_as_a_padded_grid(rule, wide):
    """Laws packed row after row, of each row's verified tokens alone or of some more, one row with none: the verdicts
    of the others are those of the whole grid, whatever its padding holds."""
    g = torch.Generator().manual_seed(5)
    B, S, n = 256, 4, 6
    p = torch.rand(B, S + 1 + wide, n, generator=g).mul(3).softmax(-1)
    q = torch.rand(B, S, n, generator=g).mul(3).softmax(-1)
    proposal = Proposal(torch.randint(0, n, (B, S), generator=g), q, torch.ones(B, S))
    lengths = torch.randint(0, S + 1, (B,), generator=g)
    u = torch.rand(B, S + 1, generator=g, dtype=torch.float64)
    whole = verify(p, proposal, lengths, u, rule)
    more = torch.randint(0, 1 + wide, (B,), generator=g)
    counts = [0 if b == 3 else int(lengths[b] + 1 + more[b]) for b in range(B)]
    lengths[3] = 0
    places = Ragged(counts, torch.device("cpu"))
    alone = verify(torch.cat([row[:c] for row, c in zip(p, counts)]), proposal, lengths, u, rule, places)
    real = [b for b in range(B) if b != 3]
    assert torch.equal(alone.accepted[real], whole.accepted[real])
    assert torch.equal(alone.next_token[real], whole.next_token[real])
    assert len(set(whole.accepted.tolist())) == S + 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_of_the_vocabularys_size_is_formed_for_padding(monkeypatch, temperature):
    """Prompts that join, rows that idle, lengths of all sizes: as many of the target's logits and laws are formed as
    tokens verified and prompts read."""
    from deepspec.modeling.target import Session

    tgt, sizes, wanted = target(), {"logits": 0, "laws": 0}, 0

    class Uneven:
        name = "uneven"

        def __call__(self, confidence, active, room):
            return torch.minimum(torch.arange(len(active)) % (1 + confidence.shape[1]), room) * active

    def score(self, *args, **kwargs):
        found = own_score(self, *args, **kwargs)
        sizes["logits"] += len(found.packed)
        return found

    def probs(self, logits):
        sizes["laws"] += logits.shape[:-1].numel() * (self.temperature > 0)  # drafts are greedy
        return own_probs(self, logits)

    def count(verified, kept):
        nonlocal wanted
        wanted += sum(v + 1 for v, k in zip(verified, kept) if k)

    own_score, own_probs = Session.score, Sampling.probs
    monkeypatch.setattr(Session, "score", score)
    monkeypatch.setattr(Sampling, "probs", probs)
    prompts = [[3, 1, 4, 1, 5][: 1 + i % 5] for i in range(9)]
    made = stream(
        tgt, make_drafter("vanilla", tgt), prompts, max_new_tokens=[5 + i % 4 for i in range(9)], draft="greedy",
        sampling=Sampling(temperature=temperature), schedule=Uneven(), concurrency=5, on_round=count,
    )  # fmt: skip
    assert len(list(made)) == 9
    assert sizes == {"logits": 9 + wanted, "laws": (9 + wanted) * bool(temperature)} and wanted > 60


# -- through the whole loop ----------------------------------------------------------------------------------------

SAMPLINGS = {
    "plain": Sampling(temperature=1.0),
    "top-k": Sampling(temperature=1.3, top_k=3),
    "top-p": Sampling(temperature=0.9, top_p=0.8),
    "min-p": Sampling(temperature=1.5, min_p=0.2),
    "all filters": Sampling(temperature=2.0, top_k=5, top_p=0.9, min_p=0.05),
}


@pytest.fixture(scope="module")
def small():
    """A target of 6 tokens, and drafters of 2 slots that agree with it now and then."""
    target = Target(hf_model("qwen3", vocab_size=6, num_hidden_layers=2, seed=3))
    drafters = {}
    for kind in ("dflash", "vanilla", "rnn"):
        torch.manual_seed(5)
        config = drafter_config(kind, target_layer_ids=(0, 1), num_draft_layers=1, mask_token_id=5, block_size=2)
        drafters[kind] = config.build(target.spec, target.vocab).eval()
        randomize(drafters[kind], 0.7)
    return target, drafters


WAYS = [
    ("dflash", "all", {}),
    ("vanilla", "threshold", {}),
    ("rnn", "all", {}),
    (None, "all", {}),
    ("vanilla", "all", {"verify": "block"}),
    ("rnn", "threshold", {"verify": "block"}),
    ("dflash", "all", {"draft": "greedy"}),
    ("dflash", "all", {"draft": "greedy", "verify": "block"}),
]
FEW = ("plain", "all filters")
"""One filter alone is slow but for two of the ways: all filters stand for it."""


@pytest.mark.parametrize(
    "kind, schedule, how, sampling",
    [
        pytest.param(*way, s, marks=[] if s in FEW or i in (3, 4) else pytest.mark.slow)
        for i, way in enumerate(WAYS)
        for s in SAMPLINGS
    ],
    ids=str,
)
def test_sampled_output_has_the_targets_law(small, kind, schedule, how, sampling):
    """Chi-square of 1,500 generated triples of tokens against the law by enumeration of all 216; no triple of
    probability 0. Both rules, drafts sampled and greedy. Fixed seeds; fresh ones would fail in 1 of 10,000 for each
    of 40 tests."""
    target, drafters = small
    s, n, prompt = SAMPLINGS[sampling], 1500, [1, 4, 2, 0]
    law = exact_law(target, prompt, 3, s).flatten()
    assert abs(law.sum() - 1) < 1e-5
    made = deepspec.threshold(0.5) if schedule == "threshold" else deepspec.verify_all()
    out = deepspec.generate(
        target, drafters.get(kind), [prompt] * n, max_new_tokens=3, sampling=s, schedule=made, seed=1, concurrency=n,
        **how,
    )  # fmt: skip
    triples = torch.tensor([g.tokens for g in out])
    counts = torch.bincount(triples[:, 0] * 36 + triples[:, 1] * 6 + triples[:, 2], minlength=216)
    assert chi_square_p(counts, law) > 1e-4
    if kind is not None and schedule == "all":  # both ways through the rule were taken
        accepted = [a for g in out for _, a in g.rounds]
        assert 0 < sum(a == 0 for a in accepted) < len(accepted)


@pytest.mark.parametrize("make", [deepspec.throughput, deepspec.lagged])
def test_schedules_across_requests_keep_the_law(small, make):
    """The same for schedules whose lengths depend on other requests and on earlier rounds, at a jagged cost, with 20 in
    flight. Fixed seeds; fresh ones would fail in 1 of 10,000."""
    target, drafters = small
    cost = StepsPerSecond(
        sample_batch_tokens=tuple(range(1, 61)),
        sample_steps_per_sec=tuple(1 / (10 + n + 5 * (n % 3 == 1)) for n in range(1, 61)),
        max_batch_tokens=60,
    )
    prompt, n = [1, 4, 2, 0], 2000
    law = exact_law(target, prompt, 3, Sampling(temperature=1.0)).flatten()
    out = deepspec.generate(
        target, drafters["vanilla"], [prompt] * n, max_new_tokens=3, sampling=Sampling(temperature=1.0),
        schedule=make(cost), seed=1, concurrency=20,
    )  # fmt: skip
    triples = torch.tensor([g.tokens for g in out])
    counts = torch.bincount(triples[:, 0] * 36 + triples[:, 1] * 6 + triples[:, 2], minlength=216)
    assert chi_square_p(counts, law) > 1e-4
    lengths = [v for g in out for v, _ in g.rounds]
    assert len(set(lengths)) > 1
