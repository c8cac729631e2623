"""`python -m deepspec.eval.profile`: what a round costs on this machine, for schedules and for servers."""

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cli import Parser, main, whole
from .arguments import add_models, load_models, whole_numbers

if TYPE_CHECKING:
    from ..modeling.drafter import Drafter
    from ..modeling.target import Target
    from ..sampling import Sampling
    from .cost import Profile
    from .evaluator import Work
    from .figures import Models
    from .probing import Measured
    from .rounds import Time


def parser() -> Parser:
    p = Parser(
        prog="python -m deepspec.eval.profile",
        description="Time rounds of the decoding loop by requests in flight and tokens verified, and write the cost in "
        "both forms that SGLang reads (--speculative-dspark-sps-table-path): profile.json (additive) and sps.json.",
    )
    add_models(p)
    p.add("--concurrency", type=whole_numbers, default="1,4,16", help="requests in flight, with commas between")
    p.add("--context", type=whole(1), default=128, help="tokens of each prompt")
    p.add("--repeats", type=whole(1), default=7, help="rounds of each size; their median counts")
    return p


def run(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)

    from ..cache import tentative, writable_dir, write_text
    from ..sampling import Sampling
    from . import plots
    from .cost import Profile
    from .probing import table

    sampling = Sampling(temperature=args.temperature)
    with tentative(args.out):
        writable_dir(args.out, "--out")
        target, drafter = load_models(args)
        prompts = random_prompts(target, args.context, args.seed)
        profile, measured = make(
            target, drafter, prompts, args.concurrency, sampling, args.repeats, args.seed, args.clock
        )
    print(text(measured))
    print(f"the additive cost is off by at most {profile.extra['fit_error']:.1%}")
    write_text(args.out / "sps.json", Profile(table(profile.cost), profile.extra).to_json())  # type: ignore[arg-type]
    write_text(args.out / "profile.json", profile.to_json())
    if plots.available():
        plots.save(picture(measured, profile), args.out / "profile.png")
    print(f"written: {args.out}")


def make(
    target: "Target",
    drafter: "Drafter",
    prompts: Sequence[Sequence[int]],
    concurrency: Sequence[int],
    sampling: "Sampling",
    repeats: int = 7,
    seed: int = 0,
    clock: "Time" = "wall",
) -> "tuple[Profile, list[Measured]]":
    """Measure at each concurrency and fit the additive cost."""
    from tqdm import tqdm

    from .probing import measure, planned

    total = sum(len(planned(drafter.num_slots, r, repeats)) for r in concurrency)
    with tqdm(total=total, unit="round", desc="profile", disable=None) as bar:
        how: dict[str, Any] = dict(repeats=repeats, sampling=sampling, seed=seed, clock=clock, tick=bar.update)
        measured = [measure(target, drafter, prompts, r, **how) for r in concurrency]
    return describe(measured, target, prompts, sampling, clock), measured


def describe(
    measured: "Sequence[Measured]",
    target: "Target",
    prompts: Sequence[Sequence[int]],
    sampling: "Sampling",
    clock: "Time",
) -> "Profile":
    """What was measured, as a profile that says how."""
    from ..modeling.devices import dtype_name
    from ..provenance import provenance
    from .cost import Profile
    from .probing import additive

    cost, error = additive(measured)
    extra = {
        "plain_seconds": [m.plain for m in measured],
        "measured": [{"requests": m.requests, "off": m.off, "step": list(m.step.items())} for m in measured],
        "fit_error": error,
        "target": target.name,
        "dtype": dtype_name(target.dtype),
        "device": str(target.device),
        "temperature": sampling.temperature,
        "clock": clock,
        "context": sum(map(len, prompts)) / len(prompts),
        "versions": provenance(),
    }
    return Profile(cost, extra)


def with_costs(models: "Models", work: "Work", out: Path) -> "Models":
    """The models, knowing what a round with each drafter costs at the run's concurrency where a contender's schedule
    asks for it: read from `out` where an earlier or another process measured it, else measured and written there."""
    from ..cache import write_text
    from ..modeling.devices import dtype_name
    from .cost import load_profile
    from .rounds import BUDGET

    config, target = work.config, models.target
    for name in dict.fromkeys(c.drafter for c in work.contenders if c.needs_cost and c.drafter is not None):
        dtype = dtype_name(target.dtype)
        path = out / f"profile-{re.sub('[^A-Za-z0-9.+-]', '_', name)}-{dtype}.json"
        if not path.exists():
            room = target.spec.max_positions - BUDGET
            prompts = [p.prompt_ids[:room] for task in work.tasks for p in task.prompts][:64]
            sampling = config.sampling(config.temperatures[0])
            profile, _ = make(target, models.drafters[name], prompts, [config.concurrency], sampling, repeats=5)
            write_text(path, profile.to_json())
        models.costs[name] = load_profile(path).cost
    return models


def random_prompts(target: "Target", length: int, seed: int, number: int = 64) -> list[list[int]]:
    """Prompts of random tokens: what they say does not change what a round costs."""
    rng = random.Random(seed)
    return [[rng.randrange(target.vocab.size) for _ in range(length)] for _ in range(number)]


def text(measured: "Sequence[Measured]") -> str:
    """A line a number of requests: milliseconds without a drafter, without drafts, and by tokens verified."""
    lines = ["requests  no drafter  no drafts  drafted, tokens verified: ms"]
    for m in measured:
        steps = "  ".join(f"{b}: {1000 * s:.1f}" for b, s in m.step.items())
        lines.append(f"{m.requests:8d}  {1000 * m.plain:10.1f}  {1000 * m.off:9.1f}  {steps}")
    return "\n".join(lines)


def picture(measured: "Sequence[Measured]", profile: "Profile") -> Any:
    """Steps per second against batch tokens: measured as dots, fitted as lines, a colour a number of requests."""
    import numpy as np

    from . import plots

    figure, panels = plots.grid(1, 1, width=5.0, height=3.6)
    panel = panels[0][0]
    for i, m in enumerate(measured):
        tokens = np.array(list(m.step))
        panel.plot(
            tokens, 1 / np.array(list(m.step.values())), "o", ms=4, color=f"C{i}", label=f"{m.requests} requests"
        )
        fine = np.unique(np.geomspace(tokens[0], tokens[-1], 50).round())
        panel.plot(fine, 1 / profile.cost.step(m.requests, fine), "-", color=f"C{i}")
    panel.set(xscale="log", xlabel="tokens in the verification batch", ylabel="steps per second", ylim=(0, None))
    panel.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    main(run)
