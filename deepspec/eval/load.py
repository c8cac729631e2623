"""`python -m deepspec.eval.load`: throughput under closed-loop load, measured and simulated."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cli import Parser, main, whole
from .arguments import add_models, check_prompts, load_models, load_prompts, whole_numbers
from .load_views import NONE, compare, markdown, picture, row, table

if TYPE_CHECKING:
    from .closed_loop import Load
    from .cost import Cost, Profile
    from .traces import Trace

Recorded = tuple["list[Trace]", list[float]]
"""Traces, and a temperature a slot."""
Repeat = tuple[list[str], "Cost"]
"""The ids of the prompts in the order in which they were asked, and the cost that schedules went by."""


def parser() -> Parser:
    p = Parser(
        prog="python -m deepspec.eval.load",
        description="Serve so many users at once, each asking again as soon as an answer is there, with each schedule; "
        "and simulate the same from a profile and recorded rounds. --simulate does only that, for hardware that is not "
        "here.",
    )
    add_models(p)
    p.add("--prompts", type=Path, help="JSONL of prompts; not needed with --simulate")
    p.add("--concurrency", type=whole_numbers, default="1,4,16,32", help="numbers of users, with commas between")
    p.add("--schedule", nargs="+", default=["verify_all", "threshold:0.5", "throughput", "lagged"], help="schedules")
    p.add(
        "--profile",
        type=Path,
        help="of deepspec.eval.profile; by default measured here, before the first repeat and beside the schedules in "
        "every one, and written beside the rest",
    )
    p.add("--traces", type=Path, help="traces.jsonl of deepspec.eval.calibrate, for the simulation; none without it")
    p.add("--sts", type=Path, help="sts.json of deepspec.eval.calibrate; by default the drafter's own temperatures")
    p.add(
        "--rounds", type=whole(1), default=100, help="of each schedule, after a warm-up, taking turns; with fewer than "
        "16 users, where a round says less, up to 4 times as many"
    )  # fmt: skip
    p.add("--repeats", type=whole(1), default=4, help="how often, with other draws and prompts in another order")
    p.add_argument("--simulate", action="store_true", help="only simulate, from --profile and --traces")
    return p


def run(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)

    from ..cache import tentative, writable_dir
    from ..checked import InputError
    from .cost import ANY, load_profile
    from .settings import make_schedule

    if args.simulate and (args.profile is None or args.traces is None):
        raise InputError("--simulate needs --profile and --traces")
    if args.sts is not None and args.traces is None:
        raise InputError("--sts is for the simulation, which needs --traces; give both or neither")
    if not args.simulate and args.prompts is None:
        raise InputError("--prompts is missing; what should the users ask?")
    given = None if args.profile is None else load_profile(args.profile)
    for name in args.schedule:
        make_schedule(name, ANY)
        if args.schedule.count(name) > 1:
            raise InputError(f"--schedule: {name!r} is given twice")
    told = recorded(args)
    if not args.simulate:
        check_prompts(args.prompts)
    with tentative(args.out):
        writable_dir(args.out, "--out")
        if given is not None and args.simulate:
            write(args, told, given, {}, [])
        else:
            for found in served(args, given):  # after every repeat, so that an interruption loses one at most
                write(args, told, *found)
    print((args.out / "load.txt").read_text(), end="")
    print(f"written: {args.out}")


def write(
    args: Any,
    told: "Recorded | None",
    profile: "Profile",
    real: "dict[tuple[str, int], list[Load]]",
    repeats: Sequence[Repeat],
) -> None:
    """All files, of what was served so far."""
    from ..cache import write_text
    from . import plots

    simulated = {} if told is None else simulations(args, told, profile, repeats)
    rows = [
        row(name, users, real.get((name, users), []), simulated.get((name, users), []))
        for users in args.concurrency
        for name in (NONE, *args.schedule)
    ]
    compare(rows)
    settings = {n: str(v) if isinstance(v, Path) else v for n, v in vars(args).items()}
    write_text(args.out / "profile.json", profile.to_json())
    write_text(args.out / "load.txt", table(rows) + "\n")
    write_text(args.out / "load.md", markdown(rows))
    write_text(args.out / "load.json", json.dumps({"rows": rows, "settings": settings}, indent=1) + "\n")
    if plots.available():
        plots.save(picture(rows), args.out / "load.png")


def served(
    args: Any, given: "Profile | None"
) -> "Iterator[tuple[Profile, dict[tuple[str, int], list[Load]], list[Repeat]]]":
    """After every repeat the profile, what was served so far: (schedule, users) -> one a repeat, and how.

    Schedules go by the given profile, or by one measured before the first repeat, and then by what was measured beside
    them so far: where none is given a probe takes turns with the schedules, and the profile is what it and plain
    decoding took there. The first one is none for the simulation: the machine was otherwise busy.
    """
    from statistics import fmean

    from tqdm import tqdm

    from ..sampling import Sampling
    from .closed_loop import Contender, Load, serve, warmup_of
    from .probing import Probe, found, planned
    from .profile import describe, make
    from .rounds import BUDGET
    from .settings import make_schedule

    target, drafter = load_models(args)
    prompts = load_prompts(args.prompts, target, BUDGET)
    lengths = [p.prompt_ids for p in prompts]
    sampling = Sampling(temperature=args.temperature)
    names = (NONE, *args.schedule)
    loads: dict[tuple[str, int], list[Load]] = {(name, users): [] for users in args.concurrency for name in names}
    repeats: list[Repeat] = []
    profile = given or make(target, drafter, lengths, args.concurrency, sampling, 5, args.seed, args.clock)[0]
    timed: dict[int, tuple[list[int], list[float], list[float]]] = {users: ([], [], []) for users in args.concurrency}
    with tqdm(total=len(args.concurrency) * args.repeats, unit="run", desc="load", disable=None) as bar:
        for repeat in range(args.repeats):
            seed = args.seed + 100_000 * repeat
            random.Random(seed).shuffle(prompts)  # few rounds take few prompts; files often begin with those of a kind
            repeats.append(([p.id for p in prompts], profile.cost))
            for users in args.concurrency:
                contenders: dict[str, Contender] = {NONE: (None, None)}
                contenders |= {name: (drafter, make_schedule(name, profile.cost)) for name in args.schedule}
                rounds, warmup = rounds_of(args.rounds, users), warmup_of(users)
                if given is None:
                    # as many rounds as the others', and each size twice at least
                    plan = planned(drafter.num_slots, users, max(2, rounds // 11), seed=seed, warmup=warmup)
                    contenders["probe"] = drafter, Probe(plan, users)
                    rounds = max(rounds, len(plan) - warmup)
                how: dict[str, Any] = dict(sampling=sampling, seed=seed, clock=args.clock, rounds=rounds, warmup=warmup)
                watched = serve(target, contenders, [p.prompt_ids for p in prompts], users, **how)
                for name in names:
                    loads[name, users].append(Load.of(users, watched[name]))
                if given is None:
                    kinds, drafted, plain = timed[users]
                    kinds += plan[warmup:]
                    drafted += [r.seconds for r in watched["probe"][: len(plan) - warmup]]
                    plain += [r.seconds for r in watched[NONE]]
                bar.update()
            if given is None:  # means: throughput is of sums
                measured = [found(users, *timed[users], fmean) for users in args.concurrency]
                profile = describe(measured, target, lengths, sampling, args.clock)
            yield profile, loads, repeats


def rounds_of(rounds: int, users: int) -> int:
    """A round of few users says less, and costs less."""
    return rounds * max(1, min(4, 16 // users))


def recorded(args: Any) -> "Recorded | None":
    """What --traces holds, and the temperatures of its slots; None without it."""
    from .traces import load_traces

    if args.traces is None:
        return None
    traces = load_traces(args.traces)[1]
    return traces, temperatures_of(args, traces[0].logits.shape[1])


def simulations(
    args: Any, told: "Recorded", profile: "Profile", repeats: Sequence[Repeat]
) -> "dict[tuple[str, int], list[Load]]":
    """(schedule, users) -> what the simulation says of every repeat: as many rounds, the prompts that were asked in
    their order, those that were recorded. Without repeats: of many rounds, in any order."""
    from .closed_loop import warmup_of
    from .settings import make_schedule
    from .simulation import simulate

    traces, temperatures = told
    known = {trace.id: trace for trace in traces}
    anything = random.Random(args.seed).sample(traces, len(traces))
    found: dict[tuple[str, int], list[Load]] = {}
    for users in args.concurrency:
        served: dict[str, int] = dict(rounds=rounds_of(args.rounds, users), warmup=warmup_of(users)) if repeats else {}
        for name in (NONE, *args.schedule):
            found[name, users] = []
            for asked, cost in repeats or [([], profile.cost)]:
                answers = [known[i] for i in asked if i in known] or anything
                schedule = None if name == NONE else make_schedule(name, cost)
                found[name, users].append(simulate(answers, temperatures, profile, schedule, users, **served))
    return found


def temperatures_of(args: Any, slots: int) -> list[float]:
    """[G] of --sts, of the drafter's config.json, or 1; InputError where they are for another block size."""
    from ..checked import InputError
    from ..hub.files import find_drafter, read_config
    from .calibration import load_sts

    if args.sts is not None:
        found = load_sts(args.sts)
    else:
        section = read_config(find_drafter(args.drafter)).get("deepspec") or {}
        found = list((section.get("drafter") or {}).get("confidence_temperatures") or [1.0] * slots)
    if len(found) != slots:
        where = args.sts or f"drafter {args.drafter!r}"
        raise InputError(f"{where} holds {len(found)} temperatures; the traces have {slots} slots")
    return found


if __name__ == "__main__":
    main(run)
