"""Laws of schedules: a slot is admitted on what precedes it, and never more than a row can hold.

Letters: B rows, G slots.
"""

import pytest
import torch

import deepspec
from deepspec import InputError

B, G = 6, 5
MAKERS = {
    "verify_all": deepspec.verify_all,
    **{f"threshold {x}": (lambda x=x: deepspec.threshold(x)) for x in (0.0, 0.3, 0.7, 1.0)},
}


def cases(n: int = 200):
    for seed in range(n):
        g = torch.Generator().manual_seed(seed)
        confidence = torch.rand(B, G, generator=g).clamp(min=1e-6)
        confidence[torch.rand(B, G, generator=g) < 0.2] = 1.0
        active = torch.rand(B, generator=g) < 0.8
        room = torch.randint(0, G + 3, (B,), generator=g)
        yield confidence, active, room, g


@pytest.mark.parametrize("name", MAKERS)
def test_what_would_be_cut_changes_nothing(name):
    """Lossless only so: whatever the confidences at and after the first refused slot become, below the bar or above it
    behind that slot, every row's length stays. 200 random batches."""
    for confidence, active, room, g in cases():
        lengths = MAKERS[name]()(confidence, active, room)
        other = confidence.clone()
        for b in range(B):
            n = int(lengths[b])
            if n + 1 < G:
                other[b, n + 1 :] = torch.rand(G - n - 1, generator=g).round() * 0.999 + 1e-6
        assert MAKERS[name]()(other, active, room).tolist() == lengths.tolist()


@pytest.mark.parametrize("name", MAKERS)
def test_admission_depends_on_the_slots_up_to_it(name):
    """Slot g, once admitted, stays admitted whatever the confidences of later slots and of other rows are."""
    for confidence, active, room, g in cases(60):
        lengths = MAKERS[name]()(confidence, active, room)
        for b in range(B):
            for slot in range(int(lengths[b])):
                other = torch.rand(B, G, generator=g)
                other[b, : slot + 1] = confidence[b, : slot + 1]
                assert MAKERS[name]()(other, active, room)[b] > slot


def test_lengths_by_their_definition():
    """threshold(t): up to the first slot below t, no more than room, 0 for inactive rows; on the values themselves."""
    for confidence, active, room, _ in cases(60):
        for t in (0.0, 0.3, 0.7, 1.0):
            want = []
            for b in range(B):
                n = 0
                while n < G and confidence[b, n] >= t:
                    n += 1
                want.append(min(n, int(room[b])) if active[b] else 0)
            got = deepspec.threshold(t)(confidence, active, room)
            assert got.tolist() == want and got.dtype == torch.long


def test_threshold_zero_is_verify_all_and_one_needs_certainty():
    """Threshold 0 admits everything, 1 only slots whose confidence is exactly 1."""
    active, room = torch.ones(2, dtype=torch.bool), torch.full((2,), 99)
    confidence = torch.tensor([[1.0, 1.0, 1 - 1e-7, 1.0], [1e-30, 1.0, 1.0, 1.0]])
    assert deepspec.threshold(0.0)(confidence, active, room).tolist() == [4, 4]
    assert deepspec.verify_all()(confidence, active, room).tolist() == [4, 4]
    assert deepspec.threshold(1.0)(confidence, active, room).tolist() == [2, 0]


def test_raising_the_threshold_never_admits_more():
    """Lengths fall as the threshold rises."""
    for confidence, active, room, _ in cases(30):
        lengths = [deepspec.threshold(t)(confidence, active, room) for t in (0.0, 0.2, 0.5, 0.9, 1.0)]
        assert all((a >= b).all() for a, b in zip(lengths, lengths[1:]))


@pytest.mark.parametrize("name", MAKERS)
def test_empty_proposals_have_length_zero(name):
    """A drafter without slots, as in plain decoding, gets 0 everywhere."""
    lengths = MAKERS[name]()(torch.zeros(3, 0), torch.ones(3, dtype=torch.bool), torch.full((3,), 9))
    assert lengths.tolist() == [0, 0, 0]


@pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan")])
def test_nonsense_is_refused(bad):
    """A threshold outside [0, 1] is refused when it is made."""
    with pytest.raises(InputError, match="threshold"):
        deepspec.threshold(bad)
