"""How an evaluation is made, and the contenders that it compares."""

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..checked import Checked, InputError, require
from ..sampling import Sampling
from .cost import Cost, load_profile
from .schedule import Schedule, threshold, verify_all
from .throughput import lagged, throughput
from .verify import Rule

BASELINE = "baseline"
PROFILED = {"throughput": throughput, "lagged": lagged}
"""Schedules that need to know what a round costs."""
Draft = Literal["sample", "greedy"]


@dataclass(frozen=True)
class Contender:
    """One way to decode the same prompts: the baseline, or a drafter and how its drafts are verified."""

    name: str
    drafter: str | None = None
    """None: the target alone."""
    schedule: str = "verify_all"
    verify: Rule = "token"
    draft: Draft = "sample"

    @property
    def needs_cost(self) -> bool:
        """Whether its schedule asks for a profile that no file gives."""
        return self.schedule in PROFILED

    def fresh_schedule(self, cost: Cost | None = None) -> Schedule:
        """A schedule may remember, so every call of `stream` gets its own. `cost` is for one that needs it."""
        return make_schedule(self.schedule, cost)


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Checked):
    """How a run is made. The same for the baseline and all drafters."""

    max_new_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0,)
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    schedule: tuple[str, ...] = ("verify_all",)
    """Each verify_all, threshold:X, throughput[:PROFILE] or lagged[:PROFILE]; without a profile the run makes one.
    Every drafter runs with every schedule, rule of verification and way of drafting given."""
    verify: tuple[Rule, ...] = ("token",)
    """Token by token, or the block as a whole."""
    draft: tuple[Draft, ...] = ("sample",)
    """Drafts drawn from the drafter's law, or its likeliest tokens; both exact, and the same at temperature 0."""
    concurrency: int = 1
    """Requests in flight."""
    seed: int = 0
    """Prompt i of a task is decoded with seed + i, whatever the contender."""
    limit: int | None = None
    """Prompts of each task; None takes all."""
    equality: int | None = None
    """Prompts of each task whose greedy float32 output is compared with the baseline's; None takes all, 0 none."""
    repeats: int = 1
    """How often each timing is taken; the tokens come from the first."""
    warmup: int = 2
    """Prompts each contender decodes before its timings."""
    thinking: Literal["on", "off", "auto"] = "auto"
    turns: Literal["first", "all"] = "first"
    """Whether a prompt's later turns are asked too, after the model's own answers to the earlier ones."""

    compile: bool = False
    """Whether the timed rounds run compiled, in fixed shapes; then each is decoded once before it is timed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_new_tokens", "concurrency", "repeats"):
            require(getattr(self, name) >= 1, f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("equality", "warmup"):
            require((getattr(self, name) or 0) >= 0, f"{name} must be >= 0, got {getattr(self, name)}")
        require(abs(self.seed) < 2**62, f"seed must be between -2**62 and 2**62, got {self.seed}")
        require(self.limit is None or self.limit >= 1, f"limit must be >= 1, got {self.limit}")
        for name in ("temperatures", "schedule", "verify", "draft"):
            values = getattr(self, name)
            one = {"temperatures": "temperature"}.get(name, name)
            require(len(values) > 0, f"at least one {one} is needed")
            require(len(set(values)) == len(values), f"a {one} is given twice: {values}")
        for temperature in self.temperatures:
            self.sampling(temperature)
        for schedule in self.schedule:
            if schedule not in PROFILED:
                make_schedule(schedule)

    def sampling(self, temperature: float) -> Sampling:
        return Sampling(temperature=temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)

    def contenders(self, drafters: Sequence[str]) -> list[Contender]:
        """The baseline, then every drafter in every way; a name says what tells it from the others."""
        found = [Contender(BASELINE)]
        for drafter, schedule, verify, draft in itertools.product(drafters, self.schedule, self.verify, self.draft):
            ways = ((schedule, self.schedule), (verify, self.verify), (draft, self.draft))
            name = " ".join([drafter, *(way for way, several in ways if len(several) > 1)])
            found.append(Contender(name, drafter, schedule, verify, draft))
        return found


def make_schedule(text: str, cost: Cost | None = None) -> Schedule:
    """The schedule that a setting names: verify_all, threshold:X, throughput or lagged, the last two with a profile of
    their own (throughput:FILE) or `cost`. InputError where there is none."""
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
