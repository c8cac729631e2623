"""Laws of the throughput schedules: they find the best budget, and what they would cut never decides.

Letters: B rows, G slots, R active rows.
"""

import copy
import itertools

import numpy as np
import pytest
import torch

from deepspec.eval.cost import Additive, StepsPerSecond
from deepspec.eval.throughput import EarlyStop, Lagged, lagged, ranked, rates, throughput
from deepspec.eval.verify import verify
from deepspec.modeling.drafter import Proposal

B, G = 4, 5
APPENDIX = StepsPerSecond(sample_batch_tokens=(1, 2, 3), sample_steps_per_sec=(1.0, 0.5, 0.45), max_batch_tokens=3)
"""The paper's Appendix A."""


class LookAhead(EarlyStop):
    """What must not be done: the best budget for the current proposals, found by looking at all of them."""

    def _admitted(self, requests, survival):
        return int(rates(self.cost, requests, survival).argmax())


def curve(seed: int, tokens: int = B * (G + 1)) -> StepsPerSecond:
    """A random cost, falling on the whole but jagged."""
    rng = np.random.default_rng(seed)
    seconds = 1 + 0.15 * np.arange(tokens) * rng.random() + 0.3 * rng.random(tokens)
    return StepsPerSecond(
        sample_batch_tokens=tuple(range(1, tokens + 1)),
        sample_steps_per_sec=tuple(1 / seconds),
        max_batch_tokens=tokens,
    )


def batch(seed: int):
    g = torch.Generator().manual_seed(seed)
    confidence = torch.rand(B, G, generator=g).sqrt().clamp(min=1e-6)
    confidence[torch.rand(B, G, generator=g) < 0.2] = 1.0
    return confidence, torch.rand(B, generator=g) < 0.85, torch.randint(0, G + 3, (B,), generator=g)


SCHEDULES = {"throughput": EarlyStop, "lagged": Lagged, "lagged, short memory": lambda cost: Lagged(cost, memory=1)}


def anticipates(make, rounds: int = 4, cases: int = 150) -> bool:
    """Whether a change of confidences behind the first refused slot of any row ever changes a length. The rounds before
    are the same, and what their drafts came to."""
    for seed in range(cases):
        g = torch.Generator().manual_seed(seed)
        schedule = make(curve(seed))
        for r in range(rounds):
            before = copy.deepcopy(schedule) if r == rounds - 1 else None
            confidence, active, room = batch(1000 * seed + r)
            lengths = schedule(confidence, active, room)
            schedule.settle([int(n * (seed % 3) / 2) for n in lengths])
        behind = torch.arange(G) > lengths[:, None]
        for changed in (torch.rand(B, G, generator=g).clamp(min=1e-6), torch.ones(B, G)):
            other = copy.deepcopy(before)(torch.where(behind, changed, confidence), active, room)
            if other.tolist() != lengths.tolist():
                return True
    return False


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_would_be_cut_changes_nothing(name):
    """Lossless only so. After three common rounds, whatever the confidences behind each row's first refused slot become
    (random, or all 1), every length stays. 150 jagged costs."""
    assert not anticipates(SCHEDULES[name])


def test_looking_ahead_is_found_out():
    """The same test catches a schedule that takes the best budget of the current proposals."""
    assert anticipates(LookAhead)


def test_early_stop_finds_the_best_of_all_lengths():
    """2,000 random instances whose throughput is unimodal along the greedy path, with a best budget that is neither 0
    nor all: the throughput is that of the best of all 64 length vectors."""
    rng, seen, seed = np.random.default_rng(0), 0, 0
    R, slots = 3, 3
    everything = np.array(list(itertools.product(range(slots + 1), repeat=R)))
    while seen < 2000:
        seed += 1
        cost, confidence = curve(seed, R * (slots + 1)), rng.random((R, slots)) ** 0.3
        room = np.full(R, slots)
        rate = rates(cost, R, ranked(confidence, room)[1])
        best, rising = int(rate.argmax()), np.diff(rate) > 0
        if not 0 < best < R * slots or not rising[:best].all() or rising[best:].any():
            continue
        survival = np.concatenate([np.zeros((R, 1)), confidence.cumprod(1).cumsum(1)], 1)
        every = (R + survival[np.arange(R), everything].sum(1)) / cost.step(R, R + everything.sum(1))
        lengths = EarlyStop(cost)(torch.from_numpy(confidence), torch.ones(R, dtype=torch.bool), torch.from_numpy(room))
        ours = (R + survival[np.arange(R), lengths.numpy()].sum()) / cost.step(R, np.array([R + int(lengths.sum())]))[0]
        assert ours == pytest.approx(every.max(), rel=1e-12)
        seen += 1


def law_of_first_token(length_of, draws: int = 200_000):
    """Appendix A: target (0.7, 0.3), draft (0.5, 0.5), first confidence 0.8, second 0.9 after token 0 and 0 after 1.
    length_of[x] is the length where token x was drafted first. -> share of token 0, its standard deviation."""
    g = torch.Generator().manual_seed(0)
    first = torch.randint(0, 2, (draws,), generator=g)
    probs = torch.tensor([0.5, 0.5]).expand(draws, 2, 2)
    proposal = Proposal(torch.stack([first, first], 1), probs, torch.ones(draws, 2))
    target = torch.tensor([0.7, 0.3]).expand(draws, 3, 2)
    lengths = torch.tensor(length_of)[first]
    verdict = verify(target, proposal, lengths, torch.rand(draws, 3, generator=g, dtype=torch.float64))
    token = torch.where(verdict.accepted > 0, first, verdict.next_token)
    return float((token == 0).double().mean()), (0.7 * 0.3 / draws) ** 0.5


def appendix(schedule, past=()):
    """The length for each value of the first drafted token, after rounds whose first drafted tokens were `past`."""

    def ask(one, x):
        return int(one(torch.tensor([[0.8, 0.9 if x == 0 else 1e-30]]), torch.tensor([True]), torch.tensor([9])))

    result = []
    for x in (0, 1):
        one = schedule(APPENDIX)
        for before in past:
            ask(one, before)
        result.append(ask(one, x))
    return result


def test_appendix_a():
    """Early stop keeps the target's (0.7, 0.3), and so does the budget of two rounds back, whatever the rounds before
    were, although it verifies where the early stop does not; looking ahead makes it (0.85, 0.15). Three standard
    deviations at 200,000 draws of fixed seeds."""
    share, sigma = law_of_first_token(appendix(throughput))
    assert appendix(throughput) == [0, 0] and abs(share - 0.7) < 3 * sigma
    budgets = {}
    for past in itertools.product((0, 1), repeat=2):
        budgets[past] = appendix(lambda cost: Lagged(cost, memory=1), past)
        share, sigma = law_of_first_token(budgets[past])
        assert abs(share - 0.7) < 3 * sigma, past
    assert budgets == {(0, 0): [2, 2], (0, 1): [2, 2], (1, 0): [0, 0], (1, 1): [0, 0]}
    share, sigma = law_of_first_token(appendix(LookAhead))
    assert appendix(LookAhead) == [2, 0] and abs(share - 0.85) < 3 * sigma


def test_a_jagged_cost_traps_the_early_stop_only():
    """One slow size on the way: early stop ends before it, the global search of the production variant goes past it."""
    cost = StepsPerSecond(
        sample_batch_tokens=(1, 2, 3, 4, 5, 6), sample_steps_per_sec=(10, 10, 5, 10, 10, 1), max_batch_tokens=6
    )
    sure, active, room = torch.full((1, 5), 0.99), torch.ones(1, dtype=torch.bool), torch.tensor([5])
    one, other = throughput(cost), lagged(cost)
    for _ in range(3):
        early, late = int(one(sure, active, room)), int(other(sure, active, room))
    assert (early, late) == (1, 4)


def test_the_budget_is_that_of_two_rounds_back():
    """The proposals of the last round do not count yet, those of two rounds back do; the current ranking says which
    slots it buys."""
    cost = StepsPerSecond(sample_batch_tokens=(1, 6), sample_steps_per_sec=(10.0, 1.0), max_batch_tokens=12)
    active, room = torch.ones(2, dtype=torch.bool), torch.full((2,), 3)
    strong, weak = torch.full((2, 3), 0.95), torch.full((2, 3), 0.01)
    schedule = Lagged(cost, memory=1)
    schedule(strong, active, room)
    schedule(weak, active, room)
    mixed = torch.stack([weak[0], strong[0]])
    lengths = schedule(mixed, active, room)  # from `strong`: up to five tokens are as quick as two
    assert lengths.tolist() == [0, 3]
    expensive = StepsPerSecond(sample_batch_tokens=(1, 3), sample_steps_per_sec=(10.0, 5.0), max_batch_tokens=12)
    schedule = Lagged(expensive, memory=1)
    schedule(weak, active, room)
    schedule(strong, active, room)
    assert schedule(strong, active, room).tolist() == [0, 0]  # from `weak`
    assert int(schedule(strong, active, room).sum()) > 0  # from the first `strong`


def test_lengths_fit_and_inactive_rows_get_none():
    """No more than room, 0 for inactive rows; the lengths of a batch are those of its active rows alone."""
    for seed in range(60):
        confidence, active, room = batch(seed)
        if not active.any():
            continue
        for make in SCHEDULES.values():
            lengths = make(curve(seed))(confidence, active, room)
            assert lengths.dtype == torch.long and (lengths <= torch.where(active, room.clamp(max=G), 0)).all()
            alone = make(curve(seed))(confidence[active], active[active], room[active])
            assert alone.tolist() == lengths[active].tolist()


def test_more_load_means_less_verification():
    """With a cost that is flat up to a size and then linear, the mean length falls as requests are added."""
    tokens = np.arange(1, 400)
    cost = StepsPerSecond(
        sample_batch_tokens=tuple(tokens.tolist()),
        sample_steps_per_sec=tuple(1 / np.maximum(40, tokens)),
        max_batch_tokens=400,
    )
    means = []
    for requests in (1, 4, 16, 64):
        g = torch.Generator().manual_seed(requests)
        confidence = torch.rand(requests, G, generator=g) ** 0.3
        lengths = throughput(cost)(confidence, torch.ones(requests, dtype=torch.bool), torch.full((requests,), G))
        means.append(float(lengths.double().mean()))
    assert means[0] == G and means == sorted(means, reverse=True) and means[-1] == 0


def test_drafting_stops_where_it_does_not_pay_and_is_tried_again():
    """With a drafter that is never right and costs a tenth, nobody is drafted for but a row in sixteen now and then,
    for a hundredth of the time; once its confidence has risen, everybody is again."""
    cost = Additive(
        bias_seconds=1.0,
        bs_probes=(1,),
        alpha_seconds=(0.1,),
        m_probes=(1,),
        theta_seconds=(0.0,),
        draft_seconds=(0.1,),
    )
    active, room = torch.ones(16, dtype=torch.bool), torch.full((16,), G)

    def rounds(schedule, confidence, n):
        drafted = []
        for _ in range(n):
            wanted = schedule.wants(active)
            drafted.append(int(wanted.sum()))
            if wanted.any():
                schedule(torch.where(wanted[:, None], confidence, 0.0), active, torch.where(wanted, room, 0))
        return drafted

    for make in (throughput, lagged):
        schedule = make(cost)
        assert rounds(schedule, torch.full((16, G), 0.01), 6) == [16] * 6  # until there is a history
        probes = rounds(schedule, torch.full((16, G), 0.01), 640)
        assert set(probes) == {0, 1} and 0.005 < 0.1 * sum(probes) / 640 < 0.0125
        assert sum(rounds(schedule, torch.full((16, G), 0.9), 1000)) > 8000
        assert rounds(schedule, torch.full((16, G), 0.9), 10) == [16] * 10


def test_who_is_near_the_border_does_not_turn_to_and_fro():
    """Drafting that gains 2 % is gone on with, and not begun; one that gains 8 % is begun. Flat cost, so the gain
    follows from the confidence of the one slot: (1 + c) / 1.5."""
    flat = dict(m_probes=(1,), theta_seconds=(0.0,), bs_probes=(1,))
    cost = Additive(bias_seconds=1.0, alpha_seconds=(0.5,), draft_seconds=(0.5,), **flat)
    active, room = torch.ones(8, dtype=torch.bool), torch.ones(8, dtype=torch.long)

    def drafts(schedule, gain, n):
        confidence, last = torch.full((8, 1), 1.5 * gain - 1), 0
        for _ in range(n):
            wanted = schedule.wants(active)
            last = int(wanted.sum())
            if wanted.any():
                schedule(torch.where(wanted[:, None], confidence, 0.0), active, room * wanted)
        return last == 8

    for make in (throughput, lagged):
        schedule = make(cost)
        assert drafts(schedule, 1.02, 40) and not drafts(schedule, 0.9, 40)
        assert not drafts(schedule, 1.02, 4000) and drafts(schedule, 1.08, 4000) and drafts(schedule, 1.02, 40)


def test_confidences_are_believed_as_far_as_they_came_true():
    """Where half of what verified drafts promised comes true, fewer are verified in the end; where more comes true
    than promised, more are. Nobody is believed beyond certainty."""
    tokens = np.arange(1, 100)
    cost = StepsPerSecond(
        sample_batch_tokens=tuple(tokens.tolist()), sample_steps_per_sec=tuple(1 / (20 + tokens)), max_batch_tokens=99
    )
    active, room = torch.ones(8, dtype=torch.bool), torch.full((8,), 2)
    for make in (throughput, lagged):
        for factor in (0.5, 1.0, 1.6):
            schedule, g, said = make(cost), torch.Generator().manual_seed(1), []
            for _ in range(300):
                confidence = 0.4 + 0.4 * torch.rand(8, 2, generator=g)
                lengths = schedule(confidence, active, room)
                said.append(int(lengths.sum()))
                promised = (confidence.cumprod(1) * (torch.arange(2) < lengths[:, None])).sum()
                schedule.settle([factor * float(promised)])
            survival = np.array([0.2, 0.5, 0.9])
            assert schedule.history.believed(survival) == pytest.approx(np.minimum(factor * survival, 1), rel=0.2)
            first, late = said[0], np.mean(said[-50:])
            assert late < 0.7 * first if factor < 1 else late > first if factor > 1 else late > 0.8 * first


def test_empty_proposals_have_length_zero():
    """A drafter without slots, as in plain decoding, gets 0 everywhere."""
    for make in SCHEDULES.values():
        assert (
            make(APPENDIX)(torch.zeros(3, 0), torch.ones(3, dtype=torch.bool), torch.full((3,), 9)).tolist() == [0] * 3
        )
