"""Run the baseline and every drafter on the same prompts, in turns, and record what each of them did.

A *unit* is the prompts that are decoded together, and the smallest thing that is recorded, shared out and resumed: what
a row gets may depend on its batch mates (in bfloat16 by rounding, with some schedules by design), so a unit is always
decoded as a whole and the results depend on neither interruptions nor the number of processes.
"""

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..data.prompts import Prompt
from ..hub import load_drafter
from ..modeling.target import Target
from ..sampling import Sampling
from .clock import Clock
from .figures import Models, Row, Turn, environment
from .generate import stream
from .records import Key, Records
from .settings import BASELINE, Contender, EvalConfig
from .share import Share
from .tasks import Conversation, Task

Tick = Callable[[], object]
WARM = 16
"""Tokens of an answer in the warm-up, which decodes as many prompts at once as the run does."""


@dataclass(frozen=True)
class Unit:
    """Prompts number first, first + 1, ... of their task."""

    number: int
    first: int
    prompts: Sequence[Prompt]


@dataclass(frozen=True)
class Work:
    """What there is to do, who does it, and what is done."""

    tasks: Sequence[Task]
    config: EvalConfig
    contenders: Sequence[Contender]
    """The baseline first."""
    records: Records
    share: Share

    def checks(self, task: Task) -> list[tuple[Unit, Key]]:
        """The losslessness check's units and their records' keys."""
        prompts = task.prompts[: self.config.equality]
        # eight at a time: in float32 what a row gets does not depend on its batch, and nothing is timed here
        found = units(prompts, max(8, self.config.concurrency)) if self.config.equality != 0 else []
        return [(unit, ("check", task.name, unit.number)) for unit in found]

    def runs(self, task: Task, temperature: float) -> list[tuple[Unit, Contender, int, Key]]:
        """Units, contenders and repeats in the order of the work; contenders take turns, in an order that rotates, so
        that a machine that slows down slows all of them alike."""
        return [
            (unit, contender, repeat, ("run", task.name, temperature, contender.name, repeat, unit.number))
            for repeat in range(self.config.repeats)
            for unit in units(task.prompts, self.config.concurrency)
            for contender in rotated(self.contenders, unit.number + repeat)
        ]

    def keys(self, task: Task) -> list[Key]:
        """All that has to be done before the task has results."""
        runs = [key for t in self.config.temperatures for *_, key in self.runs(task, t)]
        return [key for _, key in self.checks(task)] + runs


def units(prompts: Sequence[Prompt], concurrency: int) -> list[Unit]:
    """One prompt each where only one is in flight, else enough to keep `concurrency` rows refilled."""
    size = 1 if concurrency == 1 else 4 * concurrency
    return [Unit(n, a, prompts[a : a + size]) for n, a in enumerate(range(0, len(prompts), size))]


def load_models(target: str, revision: str | None, drafters: dict[str, str], device: str, dtype: str) -> Models:
    """drafters: name -> directory."""
    loaded = Target.load(target, device=device, dtype=dtype, revision=revision)
    return Models(loaded, {name: load_drafter(path, loaded) for name, path in drafters.items()})


def evaluate(
    load: Callable[[str], Models], dtype: str, work: Work, progress: Callable[[int, int], Tick]
) -> Iterator[Row]:
    """Do this process's share of what is not recorded yet. Yields the settings of the run each time a task is through.

    `load(dtype)` loads the models. The losslessness check of all tasks comes first, on a float32 copy that is gone
    before the timed one is loaded: memory peaks at one copy. `progress(done, total)` counts prompts, and returns what
    to call for each further one.
    """
    config, records = work.config, work.records
    records.refresh()
    checks = [(u, k) for task in work.tasks for u, k in work.share.mine(work.checks(task))]
    missing = set(records.missing(k for _, k in checks))
    models = load("float32" if missing else dtype)
    for task in work.tasks:
        task.check(config.max_new_tokens, models.target.vocab.size, models.target.spec.max_positions)
    tick = _count(work, checks, progress)
    for unit, key in checks:
        if key in missing:
            records.add(key, {"samples": compare_greedy(models, work.contenders, unit, config, tick)})
    if missing and dtype != "float32":
        del models
        gc.collect()
        models = load(dtype)
    if config.compile:
        models.compile()
    settings = environment(models, config)
    for task in work.tasks:
        for temperature in config.temperatures:
            measure(models, work, task, temperature, tick)
        yield settings


def _count(work: Work, checks: Sequence[tuple[Unit, Key]], progress: Callable[[int, int], Tick]) -> Tick:
    runs = [(r[0], r[-1]) for task in work.tasks for t in work.config.temperatures for r in _own_runs(work, task, t)]
    sizes = {k: len(u.prompts) * len(work.contenders) for u, k in checks} | {k: len(u.prompts) for u, k in runs}
    todo = sum(sizes[k] for k in work.records.missing(sizes))
    return progress(sum(sizes.values()) - todo, sum(sizes.values()))


def _own_runs(work: Work, task: Task, temperature: float) -> list[tuple[Unit, Contender, int, Key]]:
    own = {unit.number for unit in work.share.mine(units(task.prompts, work.config.concurrency))}
    return [run for run in work.runs(task, temperature) if run[0].number in own]


def measure(models: Models, work: Work, task: Task, temperature: float, tick: Tick) -> None:
    """Every contender on this process's units of the task, timed. Warm-up comes first and is recorded nowhere."""
    config, runs = work.config, _own_runs(work, task, temperature)
    missing = set(work.records.missing(run[-1] for run in runs))
    sampling = config.sampling(temperature)
    if missing and config.warmup:
        few = task.prompts[: max(config.warmup, config.concurrency)]
        for contender in work.contenders:
            decode(models, contender, few, config, sampling, None, _nothing, budget=min(config.max_new_tokens, WARM))
    for unit, contender, repeat, key in runs:
        if key not in missing:
            continue
        if config.compile and repeat == 0:  # meets every shape before it is timed
            decode(models, contender, unit.prompts, config, sampling, None, _nothing, first=unit.first)
        clock = Clock(models.target.device)
        began = _now(models.target.device)
        answers = decode(models, contender, unit.prompts, config, sampling, clock, tick, first=unit.first)
        seconds = _now(models.target.device) - began
        row: Row = {"tokens": sum(len(t.tokens) for turns in answers for t in turns), "seconds": seconds}
        row |= {"parts": clock.seconds(), "counts": clock.counts}
        if repeat == 0:
            row["samples"] = [[t.to_json() for t in turns] for turns in answers]
        work.records.add(key, row)


def rotated(items: Sequence[Contender], by: int) -> list[Contender]:
    """items, starting `by` places later."""
    by %= len(items)
    return [*items[by:], *items[:by]]


def decode(
    models: Models,
    contender: Contender,
    prompts: Sequence[Prompt],
    config: EvalConfig,
    sampling: Sampling,
    clock: Clock | None,
    tick: Tick,
    *,
    first: int = 0,
    budget: int | None = None,
) -> list[list[Turn]]:
    """The turns of each prompt; they are numbers first, first + 1, ... of their task."""
    target, budget = models.target, budget or config.max_new_tokens
    talks = [Conversation(p, target.tokenizer, config.thinking, config.turns) for p in prompts]
    found: list[list[Turn]] = [[] for _ in prompts]
    going = list(range(len(prompts)))
    while going:
        asked = [talks[i].prompt_ids or [] for i in going]
        turn = len(found[going[0]])
        generations = stream(
            target,
            None if contender.drafter is None else models.drafters[contender.drafter],
            asked,
            max_new_tokens=budget,
            sampling=sampling,
            schedule=contender.fresh_schedule(models.costs.get(contender.drafter or "")),
            verify=contender.verify,
            draft=contender.draft,
            stop_ids=target.stop_ids,
            # a later turn draws numbers of its own; the first turn of prompt i draws with seed + i
            seeds=[config.seed + first + i + (turn << 32) for i in going],
            concurrency=config.concurrency,
            clock=clock,
        )
        for n, generation in generations:
            i = going[n]
            found[i].append(Turn(asked[n], generation.tokens, generation.rounds))
            talks[i].answer(generation.tokens, target.stop_ids, target.spec.max_positions - budget)
            if talks[i].prompt_ids is None:
                tick()
        going = [i for i in going if talks[i].prompt_ids is not None]
    return found


def compare_greedy(
    models: Models, contenders: Sequence[Contender], unit: Unit, config: EvalConfig, tick: Tick
) -> dict[str, list[Row]]:
    """Each contender's greedy output against the baseline's, token for token, on models in float32: the prompts that
    differ, where, and how far apart the target's two best logits are there."""
    config = dataclasses.replace(config, concurrency=max(8, config.concurrency))
    outputs = {c.name: decode(models, c, unit.prompts, config, Sampling(), None, tick) for c in contenders}
    base = outputs.pop(BASELINE)
    return {
        name: [compare(models.target, p, b, g) for p, b, g in zip(unit.prompts, base, output)]
        for name, output in outputs.items()
    }


def compare(target: Target, prompt: Prompt, base: Sequence[Turn], output: Sequence[Turn]) -> Row:
    """{"id", "equal"}, and where they differ the "turn", the "index" in it and the "margin"."""
    for number, (b, g) in enumerate(zip(base, output)):
        if b.tokens != g.tokens:
            index = first_difference(b.tokens, g.tokens)
            margin = top_margin(target, [*b.prompt_ids, *b.tokens[:index]])
            return {"id": prompt.id, "equal": False, "turn": number, "index": index, "margin": margin}
    return {"id": prompt.id, "equal": True}


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """The first index at which they differ; where one is a prefix of the other, the shorter one's length."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def top_margin(target: Target, tokens: Sequence[int]) -> float:
    """How far apart the target's two best logits after `tokens` are: near 0 a difference is a tie, else it is a bug."""
    scored = target.open(1, len(tokens)).score(torch.tensor([list(tokens)], device=target.device), last=1)
    best, second = scored.logits[0, 0].float().topk(2).values.tolist()
    return float(best - second)


def _now(device: torch.device) -> float:
    """Wall clock after everything queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _nothing() -> None:
    pass
