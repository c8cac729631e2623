"""What a round costs, as profiled: the two JSON forms that SGLang reads (facts of its 0.5.23), and their look-ups.

Letters: R requests in flight, B tokens in a verification batch (an anchor and its verified drafts for each request).
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..checked import Checked, ConfigError, InputError, require

Array = np.ndarray[Any, Any]


class Cost(Protocol):
    """Seconds of a round. Pure functions of sizes, so a schedule may read them whatever was drafted."""

    def step(self, requests: int, tokens: Array) -> Array:
        """Seconds of a round that drafts for all `requests` and verifies `tokens` [n] int in one pass -> [n]."""

    def plain(self, requests: int) -> float:
        """Seconds of a round without drafting: one token a request."""


@dataclass(frozen=True, kw_only=True)
class StepsPerSecond(Checked):
    """Steps per second against batch tokens, looked up at the floor probe. Drafting is taken to cost nothing apart."""

    sample_batch_tokens: tuple[int, ...]
    sample_steps_per_sec: tuple[float, ...]
    max_batch_tokens: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_probes("sample_batch_tokens", self.sample_batch_tokens, self.sample_steps_per_sec)
        require(min(self.sample_steps_per_sec) > 0, "sample_steps_per_sec must be > 0")
        require(
            self.max_batch_tokens >= self.sample_batch_tokens[-1],
            f"max_batch_tokens {self.max_batch_tokens} is below the last probe, {self.sample_batch_tokens[-1]}",
        )

    def step(self, requests: int, tokens: Array) -> Array:
        place = np.searchsorted(self.sample_batch_tokens, tokens, side="right") - 1
        return 1 / np.asarray(self.sample_steps_per_sec)[place.clip(0)]

    def plain(self, requests: int) -> float:
        return float(self.step(requests, np.array([requests]))[0])


@dataclass(frozen=True, kw_only=True)
class Additive(Checked):
    """Seconds of a step = bias + alpha(requests) + theta(batch tokens), linear between probes and clamped outside."""

    bias_seconds: float
    bs_probes: tuple[int, ...]
    alpha_seconds: tuple[float, ...]
    m_probes: tuple[int, ...]
    theta_seconds: tuple[float, ...]
    draft_seconds: tuple[float, ...] = ()
    """The part of alpha that is drafting, at bs_probes; empty: not known, taken to be 0. No key of SGLang's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.bias_seconds > 0, f"bias_seconds must be > 0, got {self.bias_seconds}")
        _check_probes("bs_probes", self.bs_probes, self.alpha_seconds)
        _check_probes("m_probes", self.m_probes, self.theta_seconds)
        require(
            len(self.draft_seconds) in (0, len(self.bs_probes)),
            f"draft_seconds must hold one value a bs_probe: {len(self.bs_probes)}, got {len(self.draft_seconds)}",
        )

    def step(self, requests: int, tokens: Array) -> Array:
        alpha = np.interp(requests, self.bs_probes, self.alpha_seconds)
        seconds: Array = self.bias_seconds + alpha + np.interp(tokens, self.m_probes, self.theta_seconds)
        return seconds

    def plain(self, requests: int) -> float:
        drafting = np.interp(requests, self.bs_probes, self.draft_seconds) if self.draft_seconds else 0.0
        return float(self.step(requests, np.array([requests]))[0] - drafting)


def _check_probes(name: str, probes: tuple[int, ...], values: tuple[float, ...]) -> None:
    require(len(probes) > 0, f"{name} must hold at least one probe")
    require(list(probes) == sorted(set(probes)), f"{name} must be strictly increasing, got {list(probes)}")
    require(len(probes) == len(values), f"{name} holds {len(probes)} probes for {len(values)} values")


ANY = StepsPerSecond(sample_batch_tokens=(1,), sample_steps_per_sec=(1.0,), max_batch_tokens=1)
"""A cost that says nothing, to check settings with before one is known."""

EXTRA = "deepspec"
"""The section of our own: SGLang skips keys it does not know."""


@dataclass(frozen=True)
class Profile:
    """What a profile file holds: the cost, and how it was measured."""

    cost: StepsPerSecond | Additive
    extra: dict[str, Any] = field(default_factory=dict)
    """Provenance; `plain_seconds`, of a round without any drafter, at bs_probes; and `measured`, what was."""

    def step(self, requests: int, tokens: int) -> float:
        """Seconds of a round that drafts for all `requests` and verifies `tokens`: between the sizes that were measured
        at as many requests; where none was, by the cost, which schedules need to be smooth and convex."""
        for one in self.extra.get("measured", ()):
            if one["requests"] == requests:
                sizes, seconds = zip(*one["step"], strict=True)
                return float(np.interp(tokens, sizes, seconds))
        return float(self.cost.step(requests, np.array([tokens]))[0])

    def without_drafter(self, requests: int) -> float:
        """Seconds of a round of the target alone; where that was not measured, of a round without drafting."""
        measured = self.extra.get("plain_seconds")
        if measured is None or isinstance(self.cost, StepsPerSecond):
            return self.cost.plain(requests)
        return float(np.interp(requests, self.cost.bs_probes, measured))

    def to_json(self) -> str:
        fields = asdict(self.cost)
        own = {k: fields.pop(k) for k in ("draft_seconds",) if k in fields}
        return json.dumps({**fields, EXTRA: {**own, **self.extra}}, indent=1, allow_nan=False) + "\n"


def load_profile(path: Path) -> Profile:
    """A profile in either form. InputError names the file and what is wrong."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"profile {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    kind = Additive if isinstance(raw, dict) and "bias_seconds" in raw else StepsPerSecond
    names = list(kind.__dataclass_fields__)
    extra = raw.get(EXTRA, {}) if isinstance(raw, dict) else {}
    fields = {k: raw[k] for k in names if k in raw} if isinstance(raw, dict) else {}
    if kind is Additive and "draft_seconds" in extra:
        fields["draft_seconds"] = extra["draft_seconds"]
    if missing := [k for k in names if k not in fields and k != "draft_seconds"]:
        raise InputError(f"profile {path} has no {', '.join(missing)}; python -m deepspec.eval.profile writes one")
    try:
        return Profile(kind(**fields), {k: v for k, v in extra.items() if k != "draft_seconds"})
    except ConfigError as error:
        raise InputError(f"profile {path}: {error}") from None
