"""Laws of what a drafter reads later: what was added comes out, in order, once; where nothing is drafted it reads none.

Letters: B rows, G slots.
"""

import pytest
import torch
from helpers import G, make_drafter, target

from deepspec import Sampling, generate
from deepspec.eval import loop
from deepspec.eval.backlog import Backlog

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5], [8], [9, 7, 9, 3, 2], [3, 8, 4, 6, 2, 6, 4], [3, 3]]


@pytest.mark.parametrize("most", [2, 5, 1000])
def test_what_waits_comes_out_in_order_once(most):
    """Against plain lists: 400 random calls on 4 rows. What is taken is what was added since, row by row; what is
    dropped is gone; it is full where more than `most` positions a row wait, and where all is taken then, what it keeps
    stays bounded."""
    g = torch.Generator().manual_seed(most)
    B, backlog, waiting, stamp = 4, Backlog(4, most), [[] for _ in range(4)], 0.0
    for _ in range(400):
        rows = [b for b in range(B) if backlog.full or torch.rand((), generator=g) < 0.3]
        kind = 1.0 if backlog.full else float(torch.rand((), generator=g))
        if kind < 0.7:
            counts = torch.randint(0, 4, (B,), generator=g).tolist()
            features = stamp + torch.arange(B * 5 * 2.0).view(B, 5, 2)
            stamp += 1000
            backlog.add(features, features[..., 0].long(), counts)
            for b, n in enumerate(counts):
                waiting[b] += features[b, :n].tolist()
            assert backlog._kept <= 3 * most * B + 12
        elif kind < 0.85:
            backlog.drop(rows)
        else:
            found = backlog.take(rows)
            assert (found is None) == (not any(waiting[b] for b in rows))
            if found is not None:
                features, tokens, counts = found
                assert counts == [len(waiting[b]) if b in rows else 0 for b in range(B)]
                for b in rows:
                    assert features[b, : counts[b]].tolist() == waiting[b]
                    assert tokens[b, : counts[b]].tolist() == [int(x[0]) for x in waiting[b]]
        if kind >= 0.7:
            for b in rows:
                waiting[b] = []
        assert backlog.full == (sum(map(len, waiting)) > most * B)


class Sometimes:
    """Wants drafts in the rounds whose numbers it is given."""

    name = "sometimes"

    def __init__(self, *when):
        self.n, self.when = 0, when

    def wants(self, active):
        self.n += 1
        return active & (self.n in self.when)

    def __call__(self, confidence, active, room):
        return room.clamp(max=confidence.shape[1]) * active


def listen(drafter, monkeypatch):
    """What the drafter is given to read, as counts."""
    read, observe = [], drafter.observe

    def heard(state, features, next_tokens, counts):
        read.append(list(counts))
        observe(state, features, next_tokens, counts)

    monkeypatch.setattr(drafter, "observe", heard, raising=False)
    return read


@pytest.mark.parametrize("kind", ["vanilla", "dflash-masks"])
def test_while_nothing_is_drafted_nothing_is_read(kind, monkeypatch):
    """After one round that drafts nothing the drafter reads nothing any more, not the prompts that join either, until
    something is drafted again: then all of it at once."""
    tgt = target()
    drafter = make_drafter(kind, tgt)
    read = listen(drafter, monkeypatch)
    plain = generate(tgt, None, PROMPTS, max_new_tokens=9, concurrency=2)
    out = generate(tgt, drafter, PROMPTS, max_new_tokens=9, concurrency=2, schedule=Sometimes())
    assert [(g.tokens, g.rounds) for g in out] == [(g.tokens, g.rounds) for g in plain]
    assert read == [[3, 8]]  # the first prompts, before the schedule was asked
    read.clear()
    generate(tgt, drafter, PROMPTS[:1], max_new_tokens=30, schedule=Sometimes(1, 9))
    assert read[:3] == [[3], read[1], [7]] and 1 <= read[1][0] <= G + 1  # rounds 2 to 8 at once, in round 9
    assert len(read) == 4


@pytest.mark.parametrize("most", [0, 1, 256])
def test_a_draft_after_a_pause_is_what_it_would_have_been(most, monkeypatch):
    """However much may wait: blocks drafted after pauses are those of a run without, sampled with the same numbers."""
    monkeypatch.setattr(loop, "Backlog", lambda rows: Backlog(rows, most))
    tgt = target()
    drafter = make_drafter("rnn", tgt)
    settings = dict(max_new_tokens=24, sampling=Sampling(temperature=1.0), concurrency=3, seed=3)
    seen = {}

    def drafts(schedule):
        found, propose = {}, type(drafter).propose

        def noted(state, sampling, uniforms, rows=None):
            proposal = propose(drafter, state, sampling, uniforms, rows)
            for b in range(len(state.lengths)) if rows is None else rows:
                found[state.lengths[b], int(state.anchors[b]), float(uniforms[b, 0])] = proposal.tokens[b].tolist()
            return proposal

        monkeypatch.setattr(drafter, "propose", noted, raising=False)
        generate(tgt, drafter, PROMPTS, schedule=schedule, **settings)
        return found

    class Nothing(Sometimes):  # so that every round of both runs stands at the same place
        def __call__(self, confidence, active, room):
            return torch.zeros_like(room)

    seen = drafts(Nothing(*range(1000)))
    paused = drafts(Nothing(3, 4, 9, 20, 21))
    assert 5 < len(paused) < len(seen) / 3
    assert all(seen[key] == tokens for key, tokens in paused.items())


def test_a_schedule_learns_how_its_lengths_turned_out():
    """settle is called after each round that drafted, with the drafts accepted of each row: those of the records."""
    tgt = target()

    class Pupil(Sometimes):
        def settle(self, accepted):
            told.append(list(accepted))

    told, drafter = [], make_drafter("vanilla", tgt)
    (out,) = generate(tgt, drafter, [PROMPTS[1]], max_new_tokens=40, schedule=Pupil(1, 2, 3, 7, 8))
    drafted = [accepted for verified, accepted in out.rounds if verified]
    assert told == [[n] for n in drafted] and len(drafted) == 5
