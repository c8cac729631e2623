"""From what is recorded of a run to the figures of its result rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..config import as_dict
from ..modeling.devices import dtype_name
from ..modeling.drafter import Drafter
from ..modeling.target import Target
from ..provenance import provenance
from . import stats
from .benchmarks import BENCHMARKS, domain, published
from .cost import Cost
from .settings import EvalConfig

Row = dict[str, Any]


@dataclass(frozen=True)
class Models:
    """A target and the drafters loaded against it, in one dtype."""

    target: Target
    drafters: dict[str, Drafter]
    costs: dict[str, Cost] = field(default_factory=dict)
    """What a round with each drafter costs, for schedules that need to know it."""

    def compile(self) -> None:
        """From now on decoding rounds run in fixed shapes, compiled."""
        self.target.compile()
        for drafter in self.drafters.values():
            drafter.compile()


@dataclass(frozen=True)
class Turn:
    """One answer."""

    prompt_ids: list[int]
    tokens: list[int]
    """New tokens, trimmed at the stop id (kept) and the budget."""
    rounds: list[tuple[int, int]]
    """(verified, accepted) of each."""

    def to_json(self) -> Row:
        return {"prompt": len(self.prompt_ids), "tokens": list(self.tokens), "rounds": [list(r) for r in self.rounds]}

    @classmethod
    def from_json(cls, row: Row) -> "Turn":
        return cls([], row["tokens"], [(v, a) for v, a in row["rounds"]])


@dataclass
class Run:
    """What one contender did on one task at one temperature."""

    samples: list[list[Turn]] = field(default_factory=list)
    """The answers to each prompt, of the first repeat."""
    tokens: list[int] = field(default_factory=list)
    """[U] tokens written in each unit, all repeats."""
    seconds: list[float] = field(default_factory=list)
    """[U] wall seconds, all repeats."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of prefill, draft and verify, all repeats."""
    counts: dict[str, int] = field(default_factory=dict)
    """Batched passes of each part."""

    def add(self, unit: int, record: Row) -> None:
        """A unit's record; units come in order, a repeat after the other."""
        if "samples" in record:
            self.samples += [[Turn.from_json(t) for t in turns] for turns in record["samples"]]
            self.tokens.append(0)
            self.seconds.append(0.0)
        self.tokens[unit] += record["tokens"]
        self.seconds[unit] += record["seconds"]
        for total, new in ((self.parts, record["parts"]), (self.counts, record["counts"])):
            for name, value in new.items():
                total[name] = total.get(name, 0) + value

    @property
    def turns(self) -> list[Turn]:
        """All answers."""
        return [turn for turns in self.samples for turn in turns]

    @property
    def sample(self) -> list[int]:
        """The number of the prompt that each of `turns` belongs to."""
        return [number for number, turns in enumerate(self.samples) for _ in turns]

    def per_round(self, part: str) -> float | None:
        """Seconds of `part` in one batched round."""
        return stats.ratio(self.parts.get(part, 0.0), self.counts.get("verify", 0))

    @property
    def speed(self) -> float | None:
        """Tokens a second."""
        return stats.ratio(sum(self.tokens), sum(self.seconds))


def equality(checked: Sequence[Row]) -> Row | None:
    """How many greedy float32 outputs are the baseline's, and where others leave it; None where none was compared."""
    if not checked:
        return None
    differ = [{k: v for k, v in row.items() if k != "equal"} for row in checked if not row["equal"]]
    return {"equal": len(checked) - len(differ), "total": len(checked), "dtype": "float32", "differ": differ}


def figures(run: Run, base: Run, slots: int) -> Row:
    """What one contender's run says. *_seconds are totals of the run; *_per_round are of one batched pass."""
    turns = run.turns
    tau, rates = stats.tau(turns), stats.accept_rates(turns, slots)
    speed, base_speed = run.speed, base.speed
    speedup = speed / base_speed if speed is not None and base_speed else None
    draft, verify, target = run.per_round("draft"), run.per_round("verify"), base.per_round("verify")
    cost = (draft or 0.0) + (verify or 0.0)
    return {
        "tau": tau,
        "tau_interval": stats.tau_interval(turns, run.sample),
        "accept_rates_conditional": rates.conditional,
        "accept_rates_prefix": rates.prefix,
        "accept_counts": {"reached": rates.reached, "accepted": rates.accepted},
        "verified_per_round": stats.verified_per_round(turns),
        "accepted_per_round": stats.accepted_per_round(turns),
        "wasted_per_round": stats.wasted_per_round(turns),
        "rounds": int(stats.round_counts(turns).sum()),
        "tokens": sum(len(t.tokens) for t in turns),
        "tokens_per_second": speed,
        "baseline_tokens_per_second": base_speed,
        "speedup": speedup,
        "speedup_interval": stats.speedup_interval(run.tokens, run.seconds, base.tokens, base.seconds),
        "draft_seconds": run.parts.get("draft", 0.0),
        "verify_seconds": run.parts.get("verify", 0.0),
        "prefill_seconds": run.parts.get("prefill", 0.0),
        "wall_seconds": sum(run.seconds),
        "baseline_prefill_seconds": base.parts.get("prefill", 0.0),
        "baseline_wall_seconds": sum(base.seconds),
        "draft_seconds_per_round": draft,
        "verify_seconds_per_round": verify,
        "target_seconds_per_round": target,
        "decomposition": tau * target / cost if tau is not None and target is not None and cost else None,
        "efficiency": speedup / tau if speedup is not None and tau else None,
        "distinct_4gram": stats.distinct_ngrams(base.turns),
        "repetition_rate": stats.repetition_rate(base.turns),
    }


def timed_equality(run: Run, base: Run, dtype: str) -> Row:
    """How many prompts of the timed run itself have the baseline's output."""
    equal = sum([t.tokens for t in ours] == [t.tokens for t in own] for ours, own in zip(run.samples, base.samples))
    return {"equal": equal, "total": len(base.samples), "dtype": dtype}


def head(task: str, samples: int, target: str) -> Row:
    """What a row says of its task."""
    paper = published(target, task)
    row = {"task": task, "domain": domain(task), "samples": samples, "paper_tau": paper}
    return row if paper is None else {**row, "paper_samples": BENCHMARKS[task].samples}


def differences(name: str, runs: dict[str, Run]) -> Row:
    """tau of contender `name` minus that of each other one, paired over prompts."""
    found: Row = {}
    for other, run in runs.items():
        if other == name:
            continue
        d = stats.tau_difference(runs[name].turns, run.turns, runs[name].sample, run.sample)
        found[other] = None if d is None else {"difference": d.difference, "interval": d.interval}
    return found


def environment(models: Models, config: EvalConfig) -> Row:
    """What a reader needs to run this again."""
    target = models.target
    return {
        "target": {"name": target.name, "revision": target.revision},
        "dtype": dtype_name(target.dtype),
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


def device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
