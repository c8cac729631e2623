"""Laws of what training says about itself: each fault is found, once, and a healthy run is left in peace.

Rows are made up, so each law knows what it should find.
"""

import pytest
import torch
from helpers import make_drafter, target

from deepspec import LossConfig
from deepspec.train.health import PATIENCE, STILL, WINDOW, Health

LOSS = LossConfig(ce=0.1, kl=1.0, confidence=1.0)


def run(rows, health=None, loss=LOSS):
    """Every finding of rows, with its step."""
    health = health or Health(loss)
    return [(row["step"], text) for row in rows for text in health.check(row)]


def row(step, loss=2.0, **more):
    return {"step": step, "loss": loss, "ce": 3.0, "kl": 1.5, "confidence": 0.5, "tau": 2.0, **more}


def test_a_healthy_run_is_left_in_peace():
    """A falling, noisy loss, a rising tau, validation that wobbles by less than 5 %: nothing is said."""
    rows = [
        row(s, 5 / (1 + s) + 1 + 0.3 * (s % 3), tau=1 + s / 50, val_tau=2 + s / 100 - 0.05 * (s % 2))
        for s in range(1, 80)
    ]
    assert run(rows) == []


def test_divergence_is_said_once_and_again_after_it_ended():
    """The median of the last rows is held against its lowest: one spike is noise, a rise is not."""
    spike = [row(s, 40.0 if s == 20 else 1.0) for s in range(1, 40)]
    assert run(spike) == []
    risen = [row(s, 1.0 if s < 20 or 60 < s < 80 else 2.0) for s in range(1, 100)]
    said = run(risen)
    assert [s for s, _ in said] == [22, 82] and all("loss rises" in t and "train.lr" in t for _, t in said)


def test_a_term_that_dominates_is_named():
    """From the weighted terms, over a window; with one active term there is nothing to dominate."""
    rows = [row(s, ce=0.1, kl=3.0, confidence=0.01) for s in range(1, 20)]
    said = run(rows)
    assert [s for s, _ in said] == [WINDOW] and "kl" in said[0][1] and "99%" in said[0][1]
    assert run([row(s, ce=0.1, kl=3.0, confidence=0.5) for s in range(1, 20)]) == []
    assert run(rows, loss=LossConfig(kl=1.0)) == []
    one_in_window = [row(s, kl=3.0, confidence=0.01 if s % WINDOW else 3.0) for s in range(1, 40)]
    assert run(one_in_window) == []


@pytest.mark.parametrize("rising", [True, False])
def test_overfitting_needs_both_sides(rising):
    """Validation tau below its best, several times in a row, while tau on training rows rises; where both fall it is
    something else."""
    rows = []
    for s in range(1, 60):
        more = {"val_tau": 3.0 if s <= 20 else 2.7} if s % 10 == 0 else {}
        rows.append(row(s, tau=2 + s / 60 if rising or s < 20 else 2.0, **more))
    said = run(rows)
    assert [s for s, _ in said] == ([20 + 10 * PATIENCE] if rising else [])
    assert not rising or ("overfitting" in said[0][1] and "3.00" in said[0][1] and "2.70" in said[0][1])


def test_norms_that_never_move_are_named():
    """A norm without gradient is said after STILL steps of this process; norms that moved by a float32 step are not."""
    drafter = make_drafter("vanilla", target())
    health = Health(LOSS, drafter, 1000)
    names = [n for n, _ in drafter.named_parameters() if "norm" in n]
    with torch.no_grad():
        for name, p in drafter.named_parameters():
            if "norm" in name and name != names[0]:
                p[0] += 1e-7 * (1 + p[0].abs())
    first = 1000  # a resumed run
    said = run([row(first + s) for s in range(1, STILL + 20)], health)
    assert [s for s, _ in said] == [first + STILL] and names[0] in said[0][1] and names[1] not in said[0][1]
