"""`python -m deepspec.eval.load`: throughput under closed-loop load, measured and simulated."""

import json
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cli import Parser, main, whole
from .arguments import add_models, check_prompts, load_models, load_prompts, whole_numbers

if TYPE_CHECKING:
    from .closed_loop import Load
    from .cost import Profile
    from .traces import Trace

Row = dict[str, Any]
Recorded = tuple["list[Trace]", list[float]]
"""Traces, and a temperature a slot."""
NONE = "no speculation"


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
        help="of deepspec.eval.profile; by default measured here, first for the schedules, then "
        "beside them for the simulation, and written beside the rest",
    )
    p.add("--traces", type=Path, help="traces.jsonl of deepspec.eval.calibrate, for the simulation; none without it")
    p.add("--sts", type=Path, help="sts.json of deepspec.eval.calibrate; by default the drafter's own temperatures")
    p.add(
        "--rounds", type=whole(1), default=100, help="of each schedule, after a warm-up, taking turns; with fewer than "
        "16 users, where a round says less, up to 4 times as many"
    )  # fmt: skip
    p.add("--repeats", type=whole(1), default=3, help="how often, with other draws; the median counts")
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
            write(args, told, given, {})
        else:
            for profile, real in served(args, given):  # after every repeat, so that an interruption loses one at most
                write(args, told, profile, real)
    print((args.out / "load.txt").read_text(), end="")
    print(f"written: {args.out}")


def write(args: Any, told: "Recorded | None", profile: "Profile", real: "dict[tuple[str, int], list[Load]]") -> None:
    """All files, of what was served so far."""
    from ..cache import write_text
    from . import plots

    simulated = {} if told is None else dict(simulations(args, told, profile))
    rows = [
        row(name, users, real.get((name, users), []), simulated.get((name, users)))
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


def served(args: Any, given: "Profile | None") -> "Iterator[tuple[Profile, dict[tuple[str, int], list[Load]]]]":
    """After every repeat the profile, and what was served so far: (schedule, users) -> one a repeat.

    Schedules go by the given profile, or by one measured before the first repeat. That one the simulation cannot go by:
    the machine was otherwise busy, and no servers took turns. So where none is given a probe takes turns with the
    schedules, and the profile is what it and plain decoding took there.
    """
    from tqdm import tqdm

    from ..sampling import Sampling
    from .closed_loop import Contender, Load, serve, warmup_of
    from .probing import Probe, found, merged, planned
    from .profile import describe, make
    from .rounds import BUDGET
    from .settings import make_schedule

    target, drafter = load_models(args)
    prompts = [p.prompt_ids for p in load_prompts(args.prompts, target, BUDGET)]
    sampling = Sampling(temperature=args.temperature)
    names = (NONE, *args.schedule)
    loads: dict[tuple[str, int], list[Load]] = {(name, users): [] for users in args.concurrency for name in names}
    profile = given or make(target, drafter, prompts, args.concurrency, sampling, 5, args.seed, args.clock)[0]
    believed, measured = profile.cost, []
    with tqdm(total=len(args.concurrency) * args.repeats, unit="run", desc="load", disable=None) as bar:
        for repeat in range(args.repeats):
            seed = args.seed + 100_000 * repeat
            random.Random(seed).shuffle(prompts)  # few rounds take few prompts; files often begin with those of a kind
            for users in args.concurrency:
                contenders: dict[str, Contender] = {NONE: (None, None)}
                contenders |= {name: (drafter, make_schedule(name, believed)) for name in args.schedule}
                rounds, warmup = rounds_of(args.rounds, users), warmup_of(users)
                if given is None:
                    # as many rounds as the others', and each size twice at least
                    plan = planned(drafter.num_slots, users, max(2, rounds // 11), seed=seed, warmup=warmup)
                    contenders["probe"] = drafter, Probe(plan, users)
                    rounds = max(rounds, len(plan) - warmup)
                how: dict[str, Any] = dict(sampling=sampling, seed=seed, clock=args.clock, rounds=rounds, warmup=warmup)
                watched = serve(target, contenders, prompts, users, **how)
                for name in names:
                    loads[name, users].append(Load.of(users, watched[name]))
                if given is None:
                    drafted, plain = ([r.seconds for r in watched[name]] for name in ("probe", NONE))
                    measured.append(found(users, plan[warmup:], drafted, plain))
                bar.update()
            if given is None:
                profile = describe(merged(measured), target, prompts, sampling, args.clock)
            yield profile, loads


def rounds_of(rounds: int, users: int) -> int:
    """A round of few users says less, and costs less."""
    return rounds * max(1, min(4, 16 // users))


def recorded(args: Any) -> "Recorded | None":
    """What --traces holds, and the temperatures of its slots; None without it."""
    from .rounds import BUDGET
    from .traces import load_traces

    if args.traces is None:
        return None
    # answers as long as those that are served
    traces = [trace.within(BUDGET) for trace in load_traces(args.traces)[1]]
    return traces, temperatures_of(args, traces[0].logits.shape[1])


def simulations(args: Any, told: "Recorded", profile: "Profile") -> "Iterator[tuple[tuple[str, int], Load]]":
    """(schedule, users), and what the simulation says."""
    from .closed_loop import simulate
    from .settings import make_schedule

    traces, temperatures = told
    for users in args.concurrency:
        for name in (NONE, *args.schedule):
            schedule = None if name == NONE else make_schedule(name, profile.cost)
            yield (name, users), simulate(traces, temperatures, profile, schedule, users, seed=args.seed)


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


def row(name: str, users: int, real: "Sequence[Load]", simulated: "Load | None") -> Row:
    """The figures of a schedule under so many users; None where nothing was measured or simulated."""
    found: Row = {"schedule": name, "users": users}
    for kind, loads in (("measured", real), ("simulated", [simulated] if simulated else [])):
        for figure in ("throughput", "speed", "verification_length"):
            values = [getattr(one, figure) for one in loads]
            found[f"{kind}_{figure}"] = statistics.median(values) if values else None
    found["measured_throughputs"] = [one.throughput for one in real]
    found["rounds"] = sum(one.rounds for one in real)
    return found


def compare(rows: Sequence[Row]) -> None:
    """Add `to_best`: tokens a second by those of the better of no speculation and verify_all under as many users, the
    median over repeats, in each of which they took turns; None where one of them was not served."""
    for r in rows:
        plain, everything = (
            next((x for x in rows if (x["schedule"], x["users"]) == (name, r["users"])), None)
            for name in (NONE, "verify_all")
        )
        r["to_best"] = None
        if r["measured_throughputs"] and plain and everything:
            best = max(plain, everything, key=lambda x: x["measured_throughput"])
            pairs = zip(r["measured_throughputs"], best["measured_throughputs"])
            r["to_best"] = statistics.median(ours / theirs for ours, theirs in pairs)


def table(rows: Sequence[Row]) -> str:
    """A line a schedule and number of users."""
    lines = ["users  schedule          tokens/s  a user  drafts verified   simulated  off by  drafts verified  to best"]
    for r in rows:
        cells = [f"{r['users']:5d}  {r['schedule']:16s}"]
        for kind in ("measured", "simulated"):
            speed, verified = r[f"{kind}_throughput"], r[f"{kind}_verification_length"]
            cells.append(f"{_number(speed, '8.1f')}")
            cells.append(f"{_number(r['measured_speed'], '6.1f')}" if kind == "measured" else f"{_off(r):>6s}")
            cells.append(f"{_number(verified, '15.2f')}" + ("   " if kind == "measured" else ""))
        lines.append("  ".join([*cells, f"{_number(r['to_best'], '7.2f')}"]))
    return "\n".join([*lines, "to best: by tokens/s of the better of no speculation and verify_all"])


def markdown(rows: Sequence[Row]) -> str:
    """The same as Markdown: schedules as columns, tokens a second (drafts verified a request and round)."""
    names = list(dict.fromkeys(r["schedule"] for r in rows))
    lines = ["| users | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    for kind in ("measured", "simulated"):
        these = [r for r in rows if r[f"{kind}_throughput"] is not None]
        for users in dict.fromkeys(r["users"] for r in these):
            cells = [
                f"{r[f'{kind}_throughput']:.1f} ({r[f'{kind}_verification_length']:.2f})"
                for r in these
                if r["users"] == users
            ]
            lines.append(f"| {users}{'' if kind == 'measured' else ', simulated'} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _number(value: float | None, form: str) -> str:
    return "-".rjust(int(form.partition(".")[0])) if value is None else format(value, form)


def _off(r: Row) -> str:
    real, simulated = r["measured_throughput"], r["simulated_throughput"]
    return "-" if real is None or simulated is None else f"{simulated / real - 1:+.1%}"


def picture(rows: Sequence[Row]) -> Any:
    """Throughput against a user's speed (Figure 7 of the paper), and throughput and mean verification length against
    the number of users (Figure 8). Measured solid, simulated dashed."""
    from . import plots

    figure, panels = plots.grid(1, 3)
    colour = plots.colours(r["schedule"] for r in rows)
    pairs = (("speed", "throughput"), ("users", "throughput"), ("users", "verification_length"))
    for name in colour:
        these = [r for r in rows if r["schedule"] == name]
        for kind, style in (("measured", "o-"), ("simulated", "x--")):
            if all(r[f"{kind}_throughput"] is None for r in these):
                continue
            for panel, (x, y) in zip(panels[0], pairs):
                if name == NONE and y == "verification_length":
                    continue
                across = [r["users"] if x == "users" else r[f"{kind}_{x}"] for r in these]
                panel.plot(
                    across, [r[f"{kind}_{y}"] for r in these], style, ms=4, color=colour[name], label=f"{name}, {kind}"
                )
    labels = {
        "speed": "tokens/s of one user",
        "users": "users",
        "throughput": "tokens/s of all",
        "verification_length": "drafts verified a request",
    }
    for panel, (x, y) in zip(panels[0], pairs):
        panel.set(xlabel=labels[x], ylabel=labels[y], ylim=(0, None), **({"xscale": "log"} if x == "users" else {}))
    panels[0][0].legend(fontsize=6)
    return figure


if __name__ == "__main__":
    main(run)
