"""Schedules by the name that a setting or a command line gives."""

import contextlib
from pathlib import Path

from ..checked import InputError
from .cost import Cost, load_profile
from .schedule import Schedule, threshold, verify_all
from .throughput import lagged, throughput

PROFILED = {"throughput": throughput, "lagged": lagged}
"""Schedules that need to know what a round costs."""


def needs_cost(text: str) -> bool:
    """Whether a setting names a schedule that needs a cost and brings none."""
    return text in PROFILED


def make_schedule(text: str, cost: Cost | None = None) -> Schedule:
    """A fresh schedule: verify_all, threshold:X, throughput or lagged. The last two take `cost`, or a profile of their
    own, as in throughput:FILE. InputError where there is no such schedule or no cost."""
    kind, _, rest = text.partition(":")
    if text == "verify_all":
        return verify_all()
    if kind in PROFILED:
        given = load_profile(Path(rest)).cost if rest else cost
        if given is None:
            raise InputError(f"schedule {text!r} needs a profile: {kind}:FILE")
        return PROFILED[kind](given)
    with contextlib.suppress(ValueError):  # an InputError is one too
        if kind == "threshold":
            return threshold(float(rest))
    raise InputError(
        f"schedule {text!r} must be verify_all, threshold:X with X in [0, 1], throughput[:PROFILE] or lagged[:PROFILE]"
    )
