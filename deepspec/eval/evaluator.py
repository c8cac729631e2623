"""Run the baseline and every drafter on the same prompts, in turns, and write down what each of them did.

Letters: N prompts, C chunks. A *run* is one contender (the baseline or a drafter) on one task at one temperature.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ..checked import Checked, InputError, require
from ..config import as_dict
from ..data.prompts import Prompt
from ..hub import load_drafter
from ..hub.native import provenance
from ..modeling.drafter import Drafter
from ..modeling.target import Target
from ..sampling import Sampling
from . import stats
from .clock import Clock
from .generate import Generation, stream
from .schedule import Schedule, threshold, verify_all
from .tasks import Task

BASELINE = "baseline"
Tick = Callable[[], object]
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Checked):
    """How a run is made. The same for the baseline and all drafters."""

    max_new_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0,)
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    schedule: str = "verify_all"
    """'verify_all' or 'threshold:X'."""
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

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_new_tokens", "concurrency", "repeats"):
            require(getattr(self, name) >= 1, f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("equality", "warmup"):
            require((getattr(self, name) or 0) >= 0, f"{name} must be >= 0, got {getattr(self, name)}")
        require(self.limit is None or self.limit >= 1, f"limit must be >= 1, got {self.limit}")
        require(len(self.temperatures) > 0, "at least one temperature is needed")
        once = len(set(self.temperatures)) == len(self.temperatures)
        require(once, f"a temperature is given twice: {self.temperatures}")
        for temperature in self.temperatures:
            self.sampling(temperature)
        self.fresh_schedule()

    def sampling(self, temperature: float) -> Sampling:
        return Sampling(temperature=temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)

    def fresh_schedule(self) -> Schedule:
        """A schedule may remember, so every call of `stream` gets its own."""
        kind, _, level = self.schedule.partition(":")
        if self.schedule == "verify_all":
            return verify_all()
        with contextlib.suppress(ValueError):  # an InputError is one too
            if kind == "threshold":
                return threshold(float(level))
        raise InputError(f"schedule {self.schedule!r} must be verify_all or threshold:X with X in [0, 1]")


@dataclass(frozen=True)
class Models:
    """A target and the drafters loaded against it, in one dtype."""

    target: Target
    drafters: dict[str, Drafter]

    @property
    def contenders(self) -> dict[str, Drafter | None]:
        """Name -> drafter, the baseline (None) first."""
        return {BASELINE: None, **self.drafters}


def load_models(target: str, revision: str | None, drafters: dict[str, str], device: str, dtype: str) -> Models:
    """drafters: name -> directory."""
    loaded = Target.load(target, device=device, dtype=dtype, revision=revision)
    return Models(loaded, {name: load_drafter(path, loaded) for name, path in drafters.items()})


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


def evaluate(
    load: Callable[[str], Models],
    dtype: str,
    tasks: Sequence[Task],
    config: EvalConfig,
    progress: Callable[[int], Tick],
    extra: Row,
) -> Iterator[tuple[list[Row], list[Row]]]:
    """Yield (result rows, generations) after each task.

    `load(dtype)` loads the models. The losslessness check of all tasks comes first, on a float32 copy that is gone
    before the timed one is loaded: memory peaks at one copy. `progress(total)` returns what to call once a prompt.
    `extra` joins the settings of every row.
    """
    exact = config.equality != 0
    models = load("float32" if exact else dtype)
    for task in tasks:
        task.check(config.max_new_tokens, models.target.vocab.size, models.target.spec.max_positions)
    checked = {task.name: task.prompts[: config.equality] for task in tasks} if exact else {}
    timed = len(config.temperatures) * config.repeats * sum(len(task.prompts) for task in tasks)
    tick = progress((timed + sum(map(len, checked.values()))) * len(models.contenders))
    equal = {name: compare_greedy(models, p, config, tick) for name, p in checked.items()}
    if exact and dtype != "float32":
        del models
        gc.collect()
        models = load(dtype)
    settings = {**environment(models, config), **extra}
    for task in tasks:
        rows: list[Row] = []
        texts: list[Row] = []
        for temperature in config.temperatures:
            runs = measure(models, task.prompts, config, config.sampling(temperature), tick)
            head = {"task": task.name, "samples": len(task.prompts), "dropped": task.dropped}
            rows += [
                {**head, **figures(runs, name, models, temperature, equal.get(task.name, {})), "settings": settings}
                for name in models.drafters
            ]
            texts += [
                {"task": task.name, "id": p.id, "drafter": name, "temperature": temperature}
                | {"tokens": list(g.tokens), "rounds": [list(r) for r in g.rounds]}
                for name, run in runs.items()
                for p, g in zip(task.prompts, run.generations)
            ]
        yield rows, texts


def measure(
    models: Models, prompts: Sequence[Prompt], config: EvalConfig, sampling: Sampling, tick: Tick
) -> dict[str, Run]:
    """Every contender on `prompts`, timed. Warm-up comes first and is counted nowhere.

    The prompts are taken in chunks; every contender does a chunk before the next one starts, in an order that rotates,
    so that a machine that slows down slows all of them alike.
    """
    if config.warmup:
        few = prompts[: max(config.warmup, config.concurrency)]
        for drafter in models.contenders.values():
            decode(models, drafter, few, config, sampling, None, _nothing, budget=min(config.max_new_tokens, 64))
    runs = {name: Run(Clock(models.target.device)) for name in models.contenders}
    size = chunk_size(config.concurrency)
    chunks = [range(a, min(a + size, len(prompts))) for a in range(0, len(prompts), size)]
    for repeat in range(config.repeats):
        for number, chunk in enumerate(chunks):
            for name in rotated(list(runs), number + repeat):
                run = runs[name]
                part = [prompts[i] for i in chunk]
                began = _now(models.target.device)
                generations = decode(
                    models, models.contenders[name], part, config, sampling, run.clock, tick, first=chunk.start
                )
                seconds = _now(models.target.device) - began
                tokens = sum(len(g.tokens) for g in generations)
                if repeat == 0:
                    run.generations += generations
                    run.tokens.append(tokens)
                    run.seconds.append(seconds)
                else:
                    run.tokens[number] += tokens
                    run.seconds[number] += seconds
    return runs


def chunk_size(concurrency: int) -> int:
    """Prompts a contender decodes before the next one's turn: enough to keep `concurrency` rows refilled."""
    return max(8, 4 * concurrency)


def rotated(names: list[str], by: int) -> list[str]:
    """names, starting `by` places later."""
    by %= len(names)
    return names[by:] + names[:by]


def decode(
    models: Models,
    drafter: Drafter | None,
    prompts: Sequence[Prompt],
    config: EvalConfig,
    sampling: Sampling,
    clock: Clock | None,
    tick: Tick,
    *,
    first: int = 0,
    budget: int | None = None,
) -> list[Generation]:
    """Generations of `prompts`, which are numbers first, first + 1, ... of their task; drafter None is the baseline."""
    done = {}
    for index, generation in stream(
        models.target,
        drafter,
        [p.prompt_ids for p in prompts],
        max_new_tokens=budget or config.max_new_tokens,
        sampling=sampling,
        schedule=config.fresh_schedule(),
        stop_ids=models.target.stop_ids,
        seeds=[config.seed + first + i for i in range(len(prompts))],
        concurrency=config.concurrency,
        clock=clock,
    ):
        done[index] = generation
        tick()
    return [done[i] for i in range(len(prompts))]


def compare_greedy(models: Models, prompts: Sequence[Prompt], config: EvalConfig, tick: Tick) -> dict[str, Row]:
    """Each drafter's greedy output against the baseline's, token for token, on models in float32."""
    base = decode(models, None, prompts, config, Sampling(), None, tick)
    result = {}
    for name, drafter in models.drafters.items():
        outputs = decode(models, drafter, prompts, config, Sampling(), None, tick)
        result[name] = equality(base, outputs, "float32")
        differ = result[name]["differ"] = []
        for p, b, g in zip(prompts, base, outputs):
            if b.tokens != g.tokens:
                index = first_difference(b.tokens, g.tokens)
                margin = top_margin(models.target, [*p.prompt_ids, *b.tokens[:index]]) if len(differ) < 8 else None
                differ.append({"id": p.id, "index": index, "margin": margin})
    return result


def equality(base: Sequence[Generation], outputs: Sequence[Generation], dtype: str) -> Row:
    """How many outputs are the baseline's, token for token."""
    equal = sum(b.tokens == g.tokens for b, g in zip(base, outputs))
    return {"equal": equal, "total": len(outputs), "dtype": dtype}


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """The first index at which they differ; where one is a prefix of the other, the shorter one's length."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def top_margin(target: Target, tokens: Sequence[int]) -> float:
    """How far apart the target's two best logits after `tokens` are: near 0 a difference is a tie, else it is a bug."""
    scored = target.open(1, len(tokens)).score(torch.tensor([list(tokens)], device=target.device), last_only=True)
    best, second = scored.logits[0, 0].float().topk(2).values.tolist()
    return float(best - second)


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
        "timed_greedy_equal": equality(base.generations, run.generations, _dtype_name(models.target))
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
        "dtype": _dtype_name(target),
        "device": _device_name(target.device),
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


def _dtype_name(target: Target) -> str:
    return str(target.dtype).removeprefix("torch.")


def _device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def _now(device: torch.device) -> float:
    """Wall clock after everything queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _plain(difference: stats.Difference | None) -> Row | None:
    return None if difference is None else {"difference": difference.difference, "interval": difference.interval}


def _nothing() -> None:
    pass
