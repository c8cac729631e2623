"""Laws of the decoding loop: batches, refill, budgets and stop ids change nothing about what a request says.

Letters: G slots, V vocabulary.
"""

import contextlib
import functools
import math

import pytest
import torch
from helpers import KINDS, G, Planned, V, hf_model, make_drafter, target

import deepspec
from deepspec import InputError, Sampling, generate

HOT = Sampling(temperature=1.0)
SCHEDULES = {"all": deepspec.verify_all, "threshold": lambda: deepspec.threshold(0.5)}
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5], [8], [9, 7, 9, 3, 2], [3, 8, 4, 6, 2, 6, 4], [3, 3]]
FAMILIES = ("qwen3", "llama", "qwen2", "mistral")


def same(a, b):
    return [(x.tokens, x.rounds, x.finish) for x in a] == [(x.tokens, x.rounds, x.finish) for x in b]


# -- one request, any batch ----------------------------------------------------------------------------------------


CERTAIN = ("dflash", "dflash-masks", "no-confidence", None)
"""Kinds whose confidence is 1: a threshold below that is verify_all."""


@pytest.mark.parametrize(
    "kind, temperature, schedule",
    [
        pytest.param(k, t, s, marks=pytest.mark.slow if k in CERTAIN[:3] and s == "threshold" else [])
        for k, t in [*((k, 1.0) for k in [*KINDS, None]), ("dflash-masks", 0.0), ("rnn", 0.0), (None, 0.0)]
        for s in SCHEDULES
    ],
    ids=str,
)
def test_a_request_is_the_same_in_any_batch(kind, temperature, schedule):
    """A ragged batch with refill equals one by one: tokens, rounds and finish, for 2, 3, 5 and 16 in flight, sampled
    and greedy, with verify_all and threshold. Six prompts of different lengths, some of which stop early."""
    tgt = target()
    drafter = make_drafter(kind, tgt) if kind else None
    settings = dict(max_new_tokens=10, sampling=Sampling(temperature=temperature), stop_ids=range(0, V, 8))
    alone = generate(tgt, drafter, PROMPTS, schedule=SCHEDULES[schedule](), seed=7, concurrency=1, **settings)
    for i in (0, 3):  # in a run of its own, too
        own = generate(tgt, drafter, [PROMPTS[i]], schedule=SCHEDULES[schedule](), seed=7 + i, **settings)
        assert same(own, [alone[i]])
    for concurrency in (2, 3, 5, None):
        together = generate(
            tgt, drafter, PROMPTS, schedule=SCHEDULES[schedule](), seed=7, concurrency=concurrency, **settings
        )
        assert same(alone, together), concurrency
    assert temperature == 0 or len({len(g.tokens) for g in alone}) > 2


@pytest.mark.parametrize(
    "kind, how",
    [
        ("vanilla", dict(sampling=Sampling())),
        ("rnn", dict(sampling=HOT, verify="block")),
        pytest.param("vanilla", dict(sampling=HOT), marks=pytest.mark.slow),
        pytest.param(
            "dflash", dict(sampling=Sampling(temperature=0.8, top_k=9), draft="greedy"), marks=pytest.mark.slow
        ),
        pytest.param(None, dict(sampling=HOT), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_fifty_requests_alone_and_in_a_batch_with_refill(kind, how):
    """50 requests of many lengths and budgets, each in a run of its own, equal the same in a batch of 8 with refill, in
    any order: tokens, rounds, finish."""
    tgt = target()
    drafter = make_drafter(kind, tgt) if kind else None
    g = torch.Generator().manual_seed(9)
    prompts = [torch.randint(0, V - 1, (1 + 5 * i % 23,), generator=g).tolist() for i in range(50)]
    budgets = [1 + 7 * i % 19 for i in range(50)]
    schedule = SCHEDULES["threshold" if kind == "rnn" else "all"]
    settings = dict(stop_ids=range(0, V, 13), **how)
    alone = [
        generate(tgt, drafter, [p], max_new_tokens=n, seed=100 + i, schedule=schedule(), **settings)[0]
        for i, (p, n) in enumerate(zip(prompts, budgets))
    ]
    order = torch.randperm(50, generator=g).tolist()
    batch = generate(
        tgt, drafter, [prompts[i] for i in order], max_new_tokens=[budgets[i] for i in order],
        seeds=[100 + i for i in order], schedule=schedule(), concurrency=8, **settings,
    )  # fmt: skip
    assert same([alone[i] for i in order], batch)
    assert {g.finish for g in batch} == {"stop", "length"} and len({len(g.tokens) for g in batch}) > 9


def test_seeds_belong_to_requests():
    """Request i draws with seed + i or seeds[i]: the order of requests and their neighbours do not matter, equal seeds
    give equal answers, other seeds others; at temperature 0 the seed does not matter."""
    tgt = target()
    drafter = make_drafter("rnn", tgt)
    settings = dict(max_new_tokens=12, sampling=HOT)
    one = generate(tgt, drafter, PROMPTS, seed=40, **settings)
    two = generate(tgt, drafter, PROMPTS[::-1], seeds=[45, 44, 43, 42, 41, 40], concurrency=2, **settings)
    assert same(one, two[::-1])
    assert not same(one, generate(tgt, drafter, PROMPTS, seed=41, **settings))
    equal = generate(tgt, drafter, [PROMPTS[0]] * 3, seeds=[5, 5, -(2**60)], **settings)
    assert equal[0].tokens == equal[1].tokens != equal[2].tokens
    assert same(
        generate(tgt, drafter, PROMPTS, seed=1, max_new_tokens=9),
        generate(tgt, drafter, PROMPTS, seed=2, max_new_tokens=9),
    )


def test_no_number_is_used_twice(monkeypatch):
    """All drafts, coins and own tokens of a request have uniforms of their own, also where a later round drafts the
    same places again: a schedule may have learnt from what was cut there, so repeating its number would anticipate."""
    from deepspec.eval import loop

    tgt, used = target(), []

    class Listening(Planned):
        def propose(self, state, sampling, uniforms, rows=None):
            used.extend(uniforms.flatten().tolist())
            return super().propose(state, sampling, uniforms, rows)

    def listen(probs, proposal, lengths, uniforms, *rest):
        used.extend(uniforms.flatten().tolist())
        return verify(probs, proposal, lengths, uniforms, *rest)

    verify = loop.verify
    monkeypatch.setattr(loop, "verify", listen)
    drafter = Listening(tgt, texts(tgt), G, right=lambda n, g: g != n % (G + 1))
    generate(tgt, drafter, PROMPTS[:1], max_new_tokens=24, sampling=Sampling(temperature=1.0, top_k=1))
    assert len(used) > 80 and len(set(used)) == len(used)


def test_global_random_state_is_neither_read_nor_changed():
    """Decoding draws nothing from torch's generator."""
    tgt = target()
    drafter = make_drafter("vanilla", tgt)
    torch.manual_seed(1)
    a, state = generate(tgt, drafter, PROMPTS, max_new_tokens=8, sampling=HOT), torch.get_rng_state()
    torch.manual_seed(2)
    b = generate(tgt, drafter, PROMPTS, max_new_tokens=8, sampling=HOT)
    torch.manual_seed(1)
    assert same(a, b) and torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_baseline_is_transformers_greedy_generate(family):
    """Plain decoding in a ragged batch equals transformers' own greedy generate, prompt by prompt, past the window."""
    model = hf_model(family)
    for prompt, g in zip(PROMPTS, generate(target(family), None, PROMPTS, max_new_tokens=16)):
        p = torch.tensor([prompt])
        settings = dict(max_new_tokens=16, do_sample=False, pad_token_id=0, eos_token_id=None)
        own = model.generate(p, attention_mask=torch.ones_like(p), **settings)
        assert own[0, len(prompt) :].tolist() == g.tokens


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_is_the_targets(kind):
    """In float32 greedy output equals the baseline's token for token, for every drafter and family, both schedules."""
    for family in FAMILIES:
        tgt = target(family)
        drafter = make_drafter(kind, tgt)
        for name, schedule in SCHEDULES.items():
            if name == "threshold" and kind in CERTAIN:
                continue
            out = generate(tgt, drafter, PROMPTS, max_new_tokens=12, schedule=schedule(), concurrency=5)
            assert [p + g.tokens for p, g in zip(PROMPTS, out)] == [
                t[: len(p) + 12] for p, t in zip(PROMPTS, texts(tgt))
            ]


def test_greedy_acceptance_is_agreement():
    """The round records say what happened: accepted is how far the drafter's own greedy block agrees with the
    output."""
    tgt = target()
    drafter = make_drafter("vanilla", tgt)
    (out,) = generate(tgt, drafter, [PROMPTS[1]], max_new_tokens=30)
    text, at = [*PROMPTS[1], *out.tokens], len(PROMPTS[1])
    for verified, accepted in out.rounds[:-1]:
        features, _ = tgt.features(torch.tensor([text[:at]]), [at], drafter.config.target_layer_ids)
        state = drafter.new_state(1, 64)
        drafter.observe(state, features, torch.tensor([text[1 : at + 1]]), [at])
        block = drafter.propose(state, Sampling(), torch.full((1, G), 0.5).double()).tokens[0].tolist()
        agree = next((g for g in range(G) if at + 1 + g >= len(text) or block[g] != text[at + 1 + g]), G)
        assert (verified, accepted) == (G, agree)
        at += accepted + 1


# -- fake drafters ---------------------------------------------------------------------------------------------------


@functools.cache
def texts(tgt, n: int = 40):
    """The prompts with their greedy answers, by plain decoding."""
    return [p + g.tokens for p, g in zip(PROMPTS, generate(tgt, None, PROMPTS, max_new_tokens=n))]


@pytest.mark.parametrize("concurrency", [1, 4])
def test_an_oracle_accepts_everything(concurrency):
    """A drafter that proposes the target's own greedy continuation: every round is (G, G) but a trimmed last one."""
    tgt = target()
    known = texts(tgt)
    oracle = Planned(tgt, known, G)
    out = generate(tgt, oracle, PROMPTS, max_new_tokens=22, concurrency=concurrency)
    for g, text, prompt in zip(out, known, PROMPTS):
        assert g.tokens == text[len(prompt) :][:22]
        assert g.rounds == [(G, G)] * 4 + [(1, 1)]  # 1 + 4 * 5 + 1 tokens
        assert g.tau == 21 / 5


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_mixed_drafter_accepts_exactly_its_right_slots(concurrency):
    """Right up to slot n % (G + 1) in its n-th round, then wrong, then right again: exactly that prefix is accepted."""
    tgt = target()
    known = texts(tgt)
    mixed = Planned(tgt, known, G, right=lambda n, g: g != n % (G + 1))
    out = generate(tgt, mixed, PROMPTS, max_new_tokens=32, concurrency=concurrency)
    for g, text, prompt in zip(out, known, PROMPTS):
        assert g.tokens == text[len(prompt) :][:32]
        assert g.rounds[:-1] == [(G, n % (G + 1)) for n in range(len(g.rounds) - 1)]
        assert len(g.rounds) == 11  # 1 + (1 + 2 + 3 + 4 + 5) * 2 + 1


def test_a_wrong_drafter_accepts_nothing():
    """Always wrong: every round is (G, 0), and the output is still the target's. In the last rounds, too."""
    tgt = target()
    known = texts(tgt)
    out = generate(tgt, Planned(tgt, known, G, right=lambda n, g: False), PROMPTS, max_new_tokens=12)
    for g, text, prompt in zip(out, known, PROMPTS):
        assert g.tokens == text[len(prompt) :][:12] and g.rounds == [(G, 0)] * 11 and g.tau == 1


def test_a_sampled_oracle_is_judged_by_the_target():
    """At temperature 1 a one-hot proposal survives with the target's own probability: over some hundred first slots the
    rate equals the mean probability within 4 standard errors (chance of a fresh seed to fail: 1 in 16,000)."""
    tgt = target()
    prompt = PROMPTS[1]
    logits = tgt.open(1, 64).score(torch.tensor([prompt])).logits[0, -1]
    first = int(logits.argmax())
    after = tgt.open(1, 64).score(torch.tensor([[*prompt, first]])).logits[0, -1].softmax(-1)
    guess = int(after.argmax())
    seeds = list(range(2000))
    drafter = Planned(tgt, [[*prompt, t, guess] for t in range(V)], 1)
    out = generate(tgt, drafter, [prompt] * 2000, max_new_tokens=2, sampling=HOT, seeds=seeds, concurrency=2000)
    mine = [g for g in out if g.tokens[0] == first]
    rate = sum(g.tokens[1] == guess for g in mine) / len(mine)
    p = float(after[guess])
    assert len(mine) > 200 and 0.05 < p < 0.95
    assert abs(rate - p) < 4 * math.sqrt(p * (1 - p) / len(mine))


# -- where a request ends --------------------------------------------------------------------------------------------


VARIED = [25, 4, 14, 10, 1, 24, 10, 36]
"""A prompt whose greedy answer begins with 11 different tokens."""


@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.parametrize("at", range(2 * G + 3))
def test_a_stop_id_ends_the_answer_wherever_it_falls(at, drafted):
    """As first token, at every slot of a block, as bonus, as residual: the answer ends with it, the token is kept,
    nothing after it leaks, and rounds count what was kept. With an oracle and with a drafter that is always wrong."""
    tgt = target()
    (whole,) = generate(tgt, None, [VARIED], max_new_tokens=20)
    answer = whole.tokens
    assert len(set(answer[: 2 * G + 3])) == 2 * G + 3
    drafter = Planned(tgt, [VARIED + answer], G, right=lambda n, g: drafted)
    (g,) = generate(tgt, drafter, [VARIED], max_new_tokens=20, stop_ids=[answer[at], V - 1])
    assert g.tokens == answer[: at + 1] and g.finish == "stop"
    if drafted:
        full, rest = divmod(at, G + 1)
        assert g.rounds == [(G, G)] * full + [(rest, rest)] * (rest > 0)
    else:
        assert g.rounds == [(G, 0)] * at


def test_several_stop_ids():
    """Any of several ids ends the answer; one nobody writes ends none; no ids, no end before the budget."""
    tgt = target()
    answer = texts(tgt)[1][len(PROMPTS[1]) :]
    drafter = make_drafter("vanilla", tgt)
    run = lambda ids: generate(tgt, drafter, [PROMPTS[1]], max_new_tokens=20, stop_ids=ids)[0]  # noqa: E731
    never = next(i for i in range(V) if i not in answer)
    for ids in ([answer[6], answer[3]], (answer[3], answer[6]), {answer[6], answer[3], never}):
        g = run(ids)
        assert g.tokens == answer[: min(answer.index(answer[3]), answer.index(answer[6])) + 1] and g.finish == "stop"
    for ids in ((), [never]):
        g = run(ids)
        assert g.tokens == answer[:20] and g.finish == "length"


@pytest.mark.parametrize(
    "kind, budget",
    [  # the loop does not ask which drafter it has: one that is never, often and always right stand for the others
        pytest.param(kind, n, marks=[] if kind in ("rnn-masks", "oracle", None) or n == G + 2 else pytest.mark.slow)
        for kind in [*KINDS, "oracle", None]
        for n in (1, 2, G - 1, G, G + 1, G + 2, 2 * G + 3)
    ],
    ids=str,
)
def test_budgets(kind, budget):
    """Exactly max_new_tokens are written, whatever a round would commit; rounds are trimmed to what was kept; a
    budget of one needs no round."""
    tgt = target()
    known = texts(tgt)
    drafter = Planned(tgt, known, G) if kind == "oracle" else make_drafter(kind, tgt) if kind else None
    for g, text, prompt in zip(generate(tgt, drafter, PROMPTS, max_new_tokens=budget), known, PROMPTS):
        assert g.tokens == text[len(prompt) :][:budget] and g.finish == "length"
        assert all(0 <= a <= v <= G for v, a in g.rounds)
        written = 1 + sum(a + 1 for _, a in g.rounds)
        assert written - len(g.tokens) in (0, 1)  # a trimmed round has no bonus
        assert (budget == 1) == (not g.rounds)
        if kind is None:
            assert g.rounds == [(0, 0)] * (budget - 1)
        if kind == "oracle":
            whole, rest = divmod(budget - 1, G + 1)
            assert g.rounds == [(G, G)] * whole + [(rest, rest)] * (rest > 0)


@pytest.mark.parametrize("kind", [*KINDS, None], ids=str)
def test_tau_is_tokens_after_the_first_a_round(kind):
    """tau == (len(tokens) - 1) / rounds, so the token drawn from the prefill belongs to no round; NaN without a
    round."""
    tgt = target()
    drafter = make_drafter(kind, tgt) if kind else None
    for g in generate(tgt, drafter, PROMPTS, max_new_tokens=15, sampling=HOT, stop_ids=(4,)):
        if g.rounds:
            assert g.tau == (len(g.tokens) - 1) / len(g.rounds) and 1 <= g.tau <= G + 1
        else:
            assert math.isnan(g.tau) and len(g.tokens) == 1
    if kind is None:
        assert {g.tau for g in generate(tgt, None, PROMPTS, max_new_tokens=5)} == {1.0}


# -- the loop's dealings with its parts ------------------------------------------------------------------------------


def test_schedules_see_probabilities_and_room():
    """A schedule gets confidence [B, G] in (0, 1], active [B] and room [B]; its lengths are what is verified, 0 too,
    and rows that are done are inactive. What it says changes rounds, not greedy tokens."""
    tgt = target()
    drafter = make_drafter("vanilla", tgt)
    base = generate(tgt, None, PROMPTS, max_new_tokens=14)

    class Odd:
        name = "odd"

        def __init__(self):
            self.n, self.said = 0, []

        def __call__(self, confidence, active, room):
            assert confidence.shape == (3, G) and active.shape == room.shape == (3,)
            assert active.dtype == torch.bool and active.any() and (room[active] >= 1).all()
            assert (confidence[active] > 0).all() and (confidence <= 1).all()
            self.n += 1
            lengths = torch.tensor([(self.n + b) % (G + 1) for b in range(3)]).minimum(room) * active
            self.said += lengths[active].tolist()
            return lengths

    odd = Odd()
    out = generate(tgt, drafter, PROMPTS, max_new_tokens=14, schedule=odd, concurrency=3)
    assert [g.tokens for g in out] == [g.tokens for g in base]
    verified = sorted(v for g in out for v, _ in g.rounds[:-1])
    said = sorted(odd.said)
    assert len(said) == sum(len(g.rounds) for g in out) and set(verified) == set(range(G + 1))
    for v in verified:
        said.remove(v)


def test_a_schedule_that_admits_nothing_is_plain_decoding():
    """threshold(1) with an uncertain drafter verifies nothing: every round is (0, 0), the output is the baseline's,
    also when sampled with the same seeds."""
    tgt = target()
    drafter = make_drafter("vanilla", tgt)
    for sampling in (Sampling(), HOT):
        out = generate(
            tgt, drafter, PROMPTS, max_new_tokens=9, schedule=deepspec.threshold(1.0), sampling=sampling, seed=3
        )
        assert same(out, generate(tgt, None, PROMPTS, max_new_tokens=9, sampling=sampling, seed=3))
        assert all(r == (0, 0) for g in out for r in g.rounds)


class Fussy:
    """Wants every row in every third round only, and rows of odd number one round more often."""

    name = "fussy"

    def __init__(self):
        self.n, self.calls = 0, 0

    def wants(self, active):
        self.n += 1
        odd = torch.arange(len(active)) % 2 == 1
        return torch.full_like(active, self.n % 3 == 0) | (odd & (self.n % 3 == 1))

    def __call__(self, confidence, active, room):
        self.calls += 1
        skipped = room == 0
        assert (confidence[skipped] == 0).all() and (confidence[~skipped & active] > 0).all()
        assert active.any() and skipped.any() == (self.n % 3 == 1 or not active.all())
        return room.clamp(max=confidence.shape[1])


@pytest.mark.parametrize("kind", ["vanilla", "dflash-masks", "rnn"])
@pytest.mark.parametrize("concurrency", [1, 3])
def test_rows_that_nothing_is_drafted_for(kind, concurrency):
    """A schedule that wants no draft of some rows, or of none: those rounds are (0, 0), the drafter runs for the others
    alone, and its context stays right: every block it drafts later is the one it drafts in a run without gaps."""
    tgt = target()
    drafter = make_drafter(kind, tgt)
    ran = []
    propose = drafter.propose

    def counted(state, sampling, uniforms, rows=None):
        proposal = propose(state, sampling, uniforms, rows)
        ran.append(len(state.live if rows is None else rows))
        everything = propose(state, sampling, uniforms)
        for row in range(len(state.lengths)):
            if row in rows:
                assert torch.equal(proposal.tokens[row], everything.tokens[row])
                torch.testing.assert_close(proposal.probs[row], everything.probs[row])
            else:
                assert not proposal.probs[row].any() and not proposal.confidence[row].any()
        return proposal

    drafter.propose = counted
    fussy = Fussy()
    out = generate(tgt, drafter, PROMPTS, max_new_tokens=14, schedule=fussy, concurrency=concurrency)
    assert [p + g.tokens for p, g in zip(PROMPTS, out)] == [t[: len(p) + 14] for p, t in zip(PROMPTS, texts(tgt))]
    assert len(ran) == fussy.calls < fussy.n
    if concurrency == 1:
        assert all(r == (0, 0) for g in out[:1] for n, r in enumerate(g.rounds, 1) if n % 3)
        del drafter.propose
        for prompt, g in zip(PROMPTS, out):  # in the rounds that drafted, what it does with that context
            at, text = len(prompt), [*prompt, *g.tokens]
            for verified, accepted in g.rounds[:-1]:
                if verified:
                    (again,) = generate(tgt, drafter, [text[:at]], max_new_tokens=G + 3)
                    assert again.rounds[0][1] == accepted
                at += accepted + 1
    else:
        assert {1, 3} & set(ran)


def test_confidences_are_kept_on_request():
    """record=True: a row of G confidences for each round, what the schedule saw; nothing without it, and the same
    answers either way. 0 where nothing was drafted."""
    tgt = target()
    drafter = make_drafter("vanilla", tgt)

    class Seen:
        name, seen = "seen", []

        def __call__(self, confidence, active, room):
            self.seen += confidence[active].tolist()
            return room.clamp(max=2) * active

    settings = dict(max_new_tokens=12, sampling=HOT, concurrency=3)
    out = generate(tgt, drafter, PROMPTS, schedule=Seen(), record=True, **settings)
    kept = [row for g in out for row in g.confidence]
    assert all(len(g.confidence) == len(g.rounds) for g in out) and all(len(row) == G for row in kept)
    assert sorted(kept) == sorted(Seen.seen) and all(0 < c < 1 for row in kept for c in row)
    plain = generate(tgt, drafter, PROMPTS, schedule=Seen(), **settings)
    assert same(out, plain) and not any(g.confidence for g in plain)
    fussy = generate(tgt, drafter, PROMPTS[:1], schedule=Fussy(), record=True, **settings)[0]
    assert [any(c) for c in fussy.confidence] == [n % 3 == 0 for n in range(1, len(fussy.rounds) + 1)]


def test_greedy_drafts_of_a_sampled_answer():
    """draft="greedy" at temperature 1: one-hot drafts, so the block is the one of temperature 0; the answers differ
    from those of sampled drafts in tokens (not in law), and equal those of plain decoding where nothing is drafted."""
    tgt = target()
    drafter = make_drafter("vanilla", tgt)
    laws = []
    propose = drafter.propose

    def seen(state, sampling, uniforms, rows=None):
        laws.append(sampling)
        return propose(state, sampling, uniforms, rows)

    drafter.propose = seen
    settings = dict(max_new_tokens=12, sampling=HOT, seed=5)
    greedy = generate(tgt, drafter, PROMPTS, draft="greedy", **settings)
    assert set(laws) == {Sampling()}
    laws.clear()
    assert not same(greedy, generate(tgt, drafter, PROMPTS, **settings)) and set(laws) == {HOT}


def test_time_in_flight():
    """A request's seconds run from its own admission to its end: positive, and of a refilled row less than the run."""
    import time

    began = time.perf_counter()
    out = generate(target(), None, PROMPTS, max_new_tokens=8, concurrency=2)
    took = time.perf_counter() - began
    assert all(0 < g.seconds < took for g in out) and sum(g.seconds for g in out) < 2 * took


def test_one_state_serves_all_requests():
    """Rows are refilled, not rebuilt: one session and one drafter state of `concurrency` rows, whatever comes."""
    tgt = target()
    made = []

    class Once(Planned):
        def new_state(self, rows, max_length):
            made.append((rows, max_length))
            return super().new_state(rows, max_length)

    generate(tgt, Once(tgt, texts(tgt), G), PROMPTS * 3, max_new_tokens=6, concurrency=4)
    assert made == [(4, made[0][1])] and made[0][1] >= 8 + 6
    made.clear()
    generate(tgt, Once(tgt, texts(tgt), G), PROMPTS[:2], max_new_tokens=6, concurrency=50)
    assert made[0][0] == 2  # no rows for requests that do not exist


def test_the_clock_sees_every_part():
    """clock.part is entered for 'prefill', 'draft' and 'verify', never twice at once; where prompts alone are read,
    what target and drafter do is prefill."""
    tgt = target()

    class Clock:
        def __init__(self):
            self.inside, self.seen = 0, []

        @contextlib.contextmanager
        def part(self, name):
            assert self.inside == 0
            self.inside += 1
            self.seen.append(name)
            yield
            self.inside -= 1

    clock = Clock()
    out = generate(tgt, make_drafter("vanilla", tgt), PROMPTS[:1], max_new_tokens=10, clock=clock)
    rounds = len(out[0].rounds)
    assert clock.seen.count("verify") == rounds and clock.seen[:2] == ["prefill"] * 2
    assert rounds <= clock.seen.count("draft") <= 2 * rounds and clock.inside == 0
    assert clock.seen.count("prefill") == 2


def test_prompts_join_the_pass_of_those_who_are_on(monkeypatch):
    """Refilled rows cost no pass of their own: 12 requests in 3 rows, as many passes as the busiest row has tokens, the
    prefill of the first three among them; the same with a drafter that is always wrong. With passes of one shape a
    prompt has its own."""
    tgt, passes = target(), []
    score = type(tgt.open(1, 8)).score

    def counted(session, tokens, counts, **rest):
        passes.append([n for n in counts if n])
        return score(session, tokens, counts, **rest)

    monkeypatch.setattr(type(tgt.open(1, 8)), "score", counted)
    prompts = [p for _ in range(2) for p in PROMPTS]
    budgets = [4, 2, 3, 1, 5, 3, 2, 4, 3, 3, 2, 4]
    ends = [0, 0, 0]  # the pass after which each row is free
    for n in budgets:
        row = ends.index(min(ends))
        ends[row] += n
    wrong = Planned(tgt, [t[: len(p) + 8] for p, t in zip(PROMPTS, texts(tgt))], G, right=lambda n, g: False)
    for drafter in (None, wrong):
        passes.clear()
        out = generate(tgt, drafter, prompts, max_new_tokens=budgets, concurrency=3)
        assert [g.tokens for g in out] == [
            t[len(p) :][:n] for p, t, n in zip(prompts, [*texts(tgt), *texts(tgt)], budgets)
        ]
        assert len(passes) == max(ends) and max(map(len, passes)) == 3
        assert sum(map(sum, passes)) == sum(map(len, prompts)) + (sum(budgets) - 12) * (1 if drafter is None else G + 1)


def test_requests_are_yielded_as_they_finish():
    """stream yields (index, Generation) when a request is done: short answers overtake long ones; each exactly once."""
    from deepspec.eval.generate import stream

    tgt = target()
    known = texts(tgt)
    answers = [t[len(p) :] for t, p in zip(known, PROMPTS)]
    stop = answers[2][2]
    order = [i for i, _ in stream(tgt, None, PROMPTS, max_new_tokens=30, stop_ids=[stop])]
    length = [a[:30].index(stop) + 1 if stop in a[:30] else 30 for a in answers]
    assert sorted(order) == list(range(6)) and [length[i] for i in order] == sorted(length)
    assert len(set(length)) > 1


def test_the_callers_modes_are_the_callers():
    """Between two answers and after a broken-off stream the caller is in no inference mode, and gradients flow through
    the same target and drafter: nothing that decoding made is in the way of training."""
    from helpers import make_batch

    from deepspec.eval.generate import stream

    tgt = deepspec.Target(hf_model("qwen3"))
    drafter = make_drafter("rnn", tgt)
    for _ in stream(tgt, drafter, PROMPTS, max_new_tokens=4, concurrency=2):
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        loss = deepspec.Objective(drafter, deepspec.LossConfig(tv=1.0, confidence=1.0))(make_batch(tgt))[0]
        loss.backward()
        break
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert all(p.grad is not None for p in drafter.parameters())
    with torch.no_grad():
        drafter.fc.weight.add_(0.1)  # and weights may change between two runs
    assert [g.tokens for g in generate(tgt, drafter, PROMPTS, max_new_tokens=4)] == [
        t[len(p) :][:4] for p, t in zip(PROMPTS, texts(target()))
    ]


def test_long_prompts_are_read_in_chunks(monkeypatch):
    """With a prefill of a few tokens a pass, answers and rounds are those of one pass."""
    from deepspec.modeling import target as target_module

    tgt = target()
    drafter = make_drafter("vanilla", tgt)
    whole = generate(tgt, drafter, PROMPTS, max_new_tokens=8, concurrency=3)
    monkeypatch.setattr(target_module, "PREFILL_CHUNK", 5)
    assert same(whole, generate(tgt, drafter, PROMPTS, max_new_tokens=8, concurrency=3))


@pytest.mark.parametrize("kind", ["dflash-masks", "gated", "rnn", "confidence-alone"])
@pytest.mark.parametrize("theirs, own", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_drafter_and_target_of_two_dtypes(kind, theirs, own):
    """A float32 drafter on a bfloat16 target and the reverse: both decode, laws are float32, greedy output is the
    target's own where it is float32."""
    tgt = deepspec.Target(hf_model("qwen3").to(getattr(torch, theirs)))
    drafter = make_drafter(kind, tgt).to(getattr(torch, own))
    out = generate(tgt, drafter, PROMPTS, max_new_tokens=6, concurrency=3)
    if theirs == "float32":
        assert [g.tokens for g in out] == [t[len(p) :][:6] for p, t in zip(PROMPTS, texts(target()))]
    assert all(len(g.tokens) == 6 for g in generate(tgt, drafter, PROMPTS, max_new_tokens=6, sampling=HOT))


def test_no_prompts_no_answers():
    """An empty list of prompts is an empty list of answers."""
    assert generate(target(), None, []) == []
    assert generate(target(), make_drafter("dflash", target()), []) == []


def test_text_needs_a_tokenizer():
    """g.text decodes where a tokenizer is known, and says what is missing where none is."""
    tgt = target()
    (g,) = generate(tgt, None, [[1, 2]], max_new_tokens=3)
    with pytest.raises(ValueError, match="tokenizer"):
        g.text  # noqa: B018


@pytest.mark.parametrize(
    "prompts, settings, words",
    [
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, V]], {}, f"0 to {V - 1}"),
        ([[-1]], {}, "prompt 0"),
        ([[1] * 250], dict(max_new_tokens=7), "256 positions"),
        ([[1]], dict(max_new_tokens=0), "max_new_tokens"),
        ([[1]], dict(concurrency=0), "concurrency"),
        ([[1]], dict(seeds=[1, 2]), "1 prompts, 2 seeds"),
        ([[1]], dict(max_new_tokens=[1, 2]), "1 prompts, 2 max_new_tokens"),
        ([[1], [2]], dict(max_new_tokens=[1, 0]), "got 0 for prompt 1"),
        ([[1]], dict(verify="tree"), "verify must be token or block"),
        ([[1]], dict(draft="best"), "draft must be sample or greedy"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_nonsense_is_refused_before_anything_runs(prompts, settings, words):
    """Empty prompts, ids outside the vocabulary, prompts beyond the target's positions, senseless settings: InputError
    naming the prompt or setting, when generate is called."""
    for drafter in (None, make_drafter("dflash", target())):
        with pytest.raises(InputError, match=words):
            generate(target(), drafter, prompts, **{"max_new_tokens": 4, **settings})


def test_prompts_up_to_the_last_position():
    """A prompt that just fits is decoded to the end, drafts running past it notwithstanding."""
    tgt = target()
    prompt = [int(i) % (V - 1) for i in range(250)]
    drafter = make_drafter("vanilla", tgt)
    out = generate(tgt, drafter, [prompt], max_new_tokens=6)
    assert out[0].tokens == generate(tgt, None, [prompt], max_new_tokens=6)[0].tokens and len(out[0].tokens) == 6


def test_bfloat16_runs():
    """A bfloat16 target and drafter decode; where the output departs from plain decoding the two best tokens were
    near."""
    tgt = deepspec.Target(hf_model("qwen3").bfloat16())
    drafter = make_drafter("vanilla", tgt)
    spec, base = (generate(tgt, d, PROMPTS, max_new_tokens=20) for d in (drafter, None))
    for prompt, a, b in zip(PROMPTS, spec, base):
        if a.tokens != b.tokens:
            n = next(i for i in range(20) if a.tokens[i] != b.tokens[i])
            logits = tgt.open(1, 64).score(torch.tensor([prompt + b.tokens[:n]])).logits[0, -1].float()
            assert abs(logits[a.tokens[n]] - logits[b.tokens[n]]) < 0.1
