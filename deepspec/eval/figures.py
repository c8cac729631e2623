"""From what a run did to the figures of its result row."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..config import as_dict
from ..modeling.drafter import Drafter
from ..modeling.target import Target
from ..provenance import provenance
from . import stats
from .clock import Clock
from .generate import Generation
from .settings import EvalConfig

BASELINE = "baseline"
Row = dict[str, Any]


@dataclass(frozen=True)
class Models:
    """A target and the drafters loaded against it, in one dtype."""

    target: Target
    drafters: dict[str, Drafter]

    @property
    def contenders(self) -> dict[str, Drafter | None]:
        """Name -> drafter, the baseline (None) first."""
        return {BASELINE: None, **self.drafters}


@dataclass
class Run:
    """What one contender did."""

    clock: Clock
    generations: list[Generation] = field(default_factory=list)
    """[N] of the first repeat, in the order of the prompts."""
    tokens: list[int] = field(default_factory=list)
    """[C] tokens written, all repeats."""
    seconds: list[float] = field(default_factory=list)
    """[C] wall seconds, all repeats."""


def equality(base: Sequence[Generation], outputs: Sequence[Generation], dtype: str) -> Row:
    """How many outputs are the baseline's, token for token."""
    equal = sum(b.tokens == g.tokens for b, g in zip(base, outputs))
    return {"equal": equal, "total": len(outputs), "dtype": dtype}


def figures(runs: dict[str, Run], name: str, models: Models, temperature: float, equal: dict[str, Row]) -> Row:
    """The result row of drafter `name`. *_seconds are totals of the run; *_per_round are of one batched pass."""
    run, base = runs[name], runs[BASELINE]
    parts, base_parts = run.clock.seconds(), base.clock.seconds()
    tau, rates = stats.tau(run.generations), stats.accept_rates(run.generations, models.drafters[name].num_slots)
    speed = stats.ratio(sum(run.tokens), sum(run.seconds))
    base_speed = stats.ratio(sum(base.tokens), sum(base.seconds))
    speedup = speed / base_speed if speed is not None and base_speed else None
    draft = stats.ratio(parts.get("draft", 0.0), run.clock.counts.get("verify", 0))
    verify = stats.ratio(parts.get("verify", 0.0), run.clock.counts.get("verify", 0))
    target = stats.ratio(base_parts.get("verify", 0.0), base.clock.counts.get("verify", 0))
    cost = (draft or 0.0) + (verify or 0.0)
    return {
        "drafter": name,
        "temperature": temperature,
        "tau": tau,
        "tau_interval": stats.tau_interval(run.generations),
        "tau_differences": {
            other: _plain(stats.tau_difference(run.generations, runs[other].generations))
            for other in models.drafters
            if other != name
        },
        "accept_rates_conditional": rates.conditional,
        "accept_rates_prefix": rates.prefix,
        "verified_per_round": stats.verified_per_round(run.generations),
        "rounds": int(stats.round_counts(run.generations).sum()),
        "tokens_per_second": speed,
        "baseline_tokens_per_second": base_speed,
        "speedup": speedup,
        "speedup_interval": stats.speedup_interval(run.tokens, run.seconds, base.tokens, base.seconds),
        "draft_seconds": parts.get("draft", 0.0),
        "verify_seconds": parts.get("verify", 0.0),
        "prefill_seconds": parts.get("prefill", 0.0),
        "wall_seconds": sum(run.seconds),
        "baseline_prefill_seconds": base_parts.get("prefill", 0.0),
        "baseline_wall_seconds": sum(base.seconds),
        "draft_seconds_per_round": draft,
        "verify_seconds_per_round": verify,
        "target_seconds_per_round": target,
        "decomposition": tau * target / cost if tau is not None and target is not None and cost else None,
        "efficiency": speedup / tau if speedup is not None and tau else None,
        "greedy_equal": equal.get(name),
        "timed_greedy_equal": equality(base.generations, run.generations, dtype_name(models.target))
        if temperature == 0
        else None,
        "distinct_4gram": stats.distinct_ngrams(base.generations),
        "repetition_rate": stats.repetition_rate(base.generations),
    }


def environment(models: Models, config: EvalConfig) -> Row:
    """What a reader needs to run this again."""
    target = models.target
    return {
        "target": {"name": target.name, "revision": target.revision},
        "dtype": dtype_name(target),
        "device": device_name(target.device),
        "threads": torch.get_num_threads(),
        "versions": provenance(),
        **as_dict(config),
        "drafters": {
            name: {"parameters": own_parameters(d), "slots": d.num_slots, "config": as_dict(d.config)}
            for name, d in models.drafters.items()
        },
    }


def own_parameters(drafter: Drafter) -> int:
    """Parameters of a drafter, without the target's embedding and head."""
    shared = {id(p) for p in drafter.vocab.parameters()}
    return sum(p.numel() for p in drafter.parameters() if id(p) not in shared)


def dtype_name(target: Target) -> str:
    return str(target.dtype).removeprefix("torch.")


def device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def _plain(difference: stats.Difference | None) -> Row | None:
    return None if difference is None else {"difference": difference.difference, "interval": difference.interval}
