"""Run the baseline and every drafter on the same prompts, in turns, and write down what each of them did.

Letters: N prompts, C chunks. A *run* is one contender (the baseline or a drafter) on one task at one temperature.
"""

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from ..data.prompts import Prompt
from ..hub import load_drafter
from ..modeling.drafter import Drafter
from ..modeling.target import Target
from ..sampling import Sampling
from .clock import Clock
from .figures import Models, Row, Run, environment, equality, figures
from .generate import Generation, stream
from .settings import EvalConfig
from .tasks import Task

Tick = Callable[[], object]


def load_models(target: str, revision: str | None, drafters: dict[str, str], device: str, dtype: str) -> Models:
    """drafters: name -> directory."""
    loaded = Target.load(target, device=device, dtype=dtype, revision=revision)
    return Models(loaded, {name: load_drafter(path, loaded) for name, path in drafters.items()})


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
    # eight at a time: what one row gets does not depend on its batch, and nothing is timed here
    config = dataclasses.replace(config, concurrency=max(8, config.concurrency))
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


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """The first index at which they differ; where one is a prefix of the other, the shorter one's length."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def top_margin(target: Target, tokens: Sequence[int]) -> float:
    """How far apart the target's two best logits after `tokens` are: near 0 a difference is a tie, else it is a bug."""
    scored = target.open(1, len(tokens)).score(torch.tensor([list(tokens)], device=target.device), last_only=True)
    best, second = scored.logits[0, 0].float().topk(2).values.tolist()
    return float(best - second)


def _now(device: torch.device) -> float:
    """Wall clock after everything queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _nothing() -> None:
    pass
