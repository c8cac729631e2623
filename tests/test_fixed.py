"""Laws of passes of one shape: what a compiler is given computes what the ragged passes compute, in few programs.

Letters: G slots, V vocabulary.
"""

import pytest
import torch
from helpers import LAYERS, G, V, drafter_config, hf_model, make_drafter, randomize, target

import deepspec
from deepspec import Sampling, Target, generate
from deepspec.modeling.fixed import PLACES, ROUND, capacity

HOT = Sampling(temperature=1.0)
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5], [8], [9, 7, 9, 3, 2], [3, 8, 4, 6, 2, 6, 4], [3, 3]]


class Counting:
    """A backend that compiles nothing and counts what it was given."""

    def __init__(self):
        self.programs = 0

    def __call__(self, module, inputs):
        self.programs += 1
        return module.forward


@pytest.mark.parametrize(
    "family, kind", [("mistral", "vanilla"), pytest.param("qwen3", "dflash-masks", marks=pytest.mark.slow)]
)
def test_compiled_decoding_is_decoding(family, kind):
    """Tokens, rounds and finish are those of ragged passes: greedy and sampled, verify_all and threshold, plain
    decoding too, with refill, past a window. The target needs a program for one place and one for a block, the drafter
    one, whatever runs follow."""
    plain, fixed = target(family), Target(hf_model(family))
    drafters = [make_drafter(kind, t, sliding_window=7) for t in (plain, fixed)]
    backends = Counting(), Counting()
    fixed.compile(backend=backends[0])
    drafters[1].compile(backend=backends[1])
    for settings in (
        dict(max_new_tokens=11, sampling=Sampling()),
        dict(max_new_tokens=[9, 4, 12, 1, 7, 8], sampling=HOT, stop_ids=range(0, V, 9)),
        dict(max_new_tokens=8, sampling=HOT, schedule=deepspec.threshold(0.5), verify="block"),
    ):
        for pair in (drafters, (None, None)):
            want, got = (
                generate(t, d, PROMPTS, seed=3, concurrency=3, **settings) for t, d in zip((plain, fixed), pair)
            )
            assert [(g.tokens, g.rounds, g.finish) for g in want] == [(g.tokens, g.rounds, g.finish) for g in got]
    assert (backends[0].programs, backends[1].programs) == (2, 1)


def test_a_fixed_pass_writes_behind_the_end_only():
    """Counts below the width, and rows of count 0: lengths grow by the counts, the next pass continues as ragged passes
    would, and a row filled to its last token has room for all places."""
    plain, fixed = target(), Target(hf_model())
    fixed.compile(backend="eager")
    g = torch.Generator().manual_seed(2)
    sessions = [t.open(3, 20, LAYERS) for t in (plain, fixed)]
    prompts = torch.randint(0, V, (3, 9), generator=g)
    for s in sessions:
        s.score(prompts, [9, 4, 1], last=1)
    for counts in ([4, 0, 2], [1, 3, 4], [4, 4, 0], [2, 0, 1], [0, 4, 4], [0, 4, 4]):
        tokens = torch.randint(0, V, (3, 4), generator=g)
        want, got = (s.score(tokens, counts) for s in sessions)
        assert sessions[0].lengths == sessions[1].lengths
        for b, n in enumerate(counts):
            for name in ("logits", "features", "hidden"):
                torch.testing.assert_close(getattr(got, name)[b, :n], getattr(want, name)[b, :n], atol=2e-5, rtol=1e-4)
    assert sessions[1].lengths[0] == 20
    with pytest.raises(ValueError, match="opened for 20"):
        sessions[1].score(tokens, [1, 0, 0])


def test_capacities_are_few():
    """Room for a whole pass behind the last token, in steps that let runs share a program."""
    assert {capacity(n) for n in range(1, ROUND - PLACES + 1)} == {ROUND}
    assert capacity(ROUND - PLACES + 1) == 2 * ROUND
    assert all(capacity(n) >= n + PLACES for n in range(1, 2000, 7))


@pytest.mark.slow
def test_inductor_agrees():
    """torch.compile's own backend on this machine: the same greedy tokens in float32, with a rotary drafter of each
    head."""
    fixed = Target(hf_model())
    fixed.compile()
    for kind in ("vanilla", "rnn"):
        torch.manual_seed(1)
        drafter = drafter_config(kind).build(fixed.spec, fixed.vocab)
        randomize(drafter)
        drafter.eval().compile()
        out = generate(fixed, drafter, PROMPTS, max_new_tokens=12, concurrency=3)
        assert [g.tokens for g in out] == [g.tokens for g in generate(target(), None, PROMPTS, max_new_tokens=12)]
        assert all(v == G for g in out for v, _ in g.rounds[:-1])
