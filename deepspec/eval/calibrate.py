"""`python -m deepspec.eval.calibrate`: temperatures that make a drafter's confidence true, and how true it is.

Prompts are divided into two halves: temperatures are fitted on one and judged on the other.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cli import Parser, main, whole
from .arguments import add_models, check_prompts, load_models, load_prompts

if TYPE_CHECKING:
    from ..data.prompts import Prompt
    from ..modeling.drafter import Drafter
    from ..modeling.target import Target
    from .calibration import Quality, Records
    from .traces import Trace


def parser() -> Parser:
    p = Parser(
        prog="python -m deepspec.eval.calibrate",
        description="Fit one temperature a slot to a drafter's confidence head and save them, in its config.json and "
        "as JSON for SGLang (--speculative-dspark-confidence-sts-path). Run it again to go on after an interruption.",
    )
    add_models(p)
    p.add("--prompts", type=Path, required=True, help="JSONL of prompts the drafter was not trained on")
    p.add("--rounds", type=whole(1), default=10_000, help="rounds to record at least, in all")
    p.add("--max-new-tokens", type=whole(1), default=128, help="tokens a prompt")
    p.add("--concurrency", type=whole(1), default=16, help="requests in flight")
    p.add_argument("--keep-config", action="store_true", help="leave the drafter's config.json as it is")
    return p


def run(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)

    from ..cache import tentative, writable_dir, write_text
    from ..checked import InputError
    from . import plots
    from .calibration import GRID, fit, quality

    check_prompts(args.prompts)
    with tentative(args.out):
        writable_dir(args.out, "--out")
        target, drafter = load_models(args)
        if not drafter.has_confidence:
            raise InputError(f"drafter {args.drafter!r} has no confidence head; there is nothing to calibrate")
        prompts = load_prompts(args.prompts, target, args.max_new_tokens)
        if len(prompts) < 2:
            raise InputError(f"{args.prompts} holds one prompt; one to fit on and one to judge on are needed")
        traces = record(target, drafter, prompts, args)
    ids = {p.id: i for i, p in enumerate(prompts)}
    ours, theirs = (records([t for t in traces if ids[t.id] % 2 == half]) for half in (0, 1))
    temperatures = fit(ours)
    before, after = quality(theirs, [1.0] * drafter.num_slots), quality(theirs, temperatures)
    print(text(temperatures, before, after))
    print(f"fitted on {len(ours.survived)} rounds, judged on {len(theirs.survived)} rounds of other prompts")
    for slot, t in enumerate(temperatures):
        if t in (GRID[0], GRID[-1]):
            print(f"slot {slot}: the temperature {t:g} is the last that was tried; its confidence says nothing")
    served = {
        "temperatures": temperatures,
        "dataset": str(args.prompts),
        "num_samples": len(ours.survived),
        "ece_before": before.ece,
        "ece_after": after.ece,
    }
    write_text(args.out / "sts.json", json.dumps(served, indent=1, allow_nan=False) + "\n")
    report = {"temperatures": temperatures, "judged_on": len(theirs.survived), "fitted_on": len(ours.survived)}
    report |= {name: dataclasses.asdict(q) for name, q in (("before", before), ("after", after))}
    write_text(args.out / "calibration.json", json.dumps({**report, "settings": settings(args)}, indent=1) + "\n")
    if plots.available():
        plots.save(diagrams(before, after), args.out / "reliability.png")
    if not args.keep_config:
        save_temperatures(args.drafter, drafter, temperatures)
    print(f"written: {args.out}" + ("" if args.keep_config else f", and the temperatures in {args.drafter}"))


def record(target: "Target", drafter: "Drafter", prompts: "Sequence[Prompt]", args: Any) -> "list[Trace]":
    """Traces of all prompts, and then of as many again, in turn and with fresh seeds, as the rounds asked for should
    need (a tenth more); goes on where an earlier run stopped. At temperature 0 there is nothing to ask again."""
    from tqdm import tqdm

    from ..sampling import Sampling
    from .traces import TraceFile, collect

    file = TraceFile(args.out / "traces.jsonl", settings(args))

    def go_on(total: int) -> None:
        todo = [k for k in range(total) if k not in set(file.keys)]
        for index, trace in collect(
            target,
            drafter,
            [prompts[k % len(prompts)] for k in todo],
            sampling=Sampling(temperature=args.temperature),
            max_new_tokens=args.max_new_tokens,
            concurrency=args.concurrency,
            seeds=[args.seed + k for k in todo],
        ):
            file.add(todo[index], trace)
            bar.update(len(trace.survived))

    with tqdm(total=args.rounds, unit="round", desc="recording", disable=None) as bar:
        bar.update(sum(len(t.survived) for t in file.traces))
        go_on(len(prompts))
        once = sum(len(t.survived) for k, t in zip(file.keys, file.traces) if k < len(prompts))
        if args.temperature > 0 and 0 < once < args.rounds:
            go_on(math.ceil(len(prompts) * (1 + 1.1 * (args.rounds - once) / once)))
    return file.traces


def settings(args: Any) -> dict[str, Any]:
    """What the traces depend on."""
    names = ("target", "dtype", "prompts", "max_new_tokens", "temperature", "seed", "concurrency")
    return {"drafter": str(Path(args.drafter).resolve()), **{n: _plain(getattr(args, n)) for n in names}}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def records(traces: "Sequence[Trace]") -> "Records":
    """All rounds of these traces."""
    import numpy as np

    from ..checked import InputError
    from .calibration import Records

    traces = [t for t in traces if len(t.survived)]
    if not traces:
        raise InputError("no round was recorded on half of the prompts: give more prompts or more tokens a prompt")
    return Records(np.concatenate([t.logits for t in traces]), np.concatenate([t.survived for t in traces]))


def text(temperatures: Sequence[float], before: "Quality", after: "Quality") -> str:
    """A table: a line a slot, and the means."""
    lines = ["slot  temperature   ECE before  after   Brier before  after    AUC"]
    rows = zip(temperatures, before.ece, after.ece, before.brier, after.brier, after.auc)
    for slot, (t, e0, e1, b0, b1, auc) in enumerate(rows):
        area = "    -" if auc is None else f"{auc:5.3f}"
        lines.append(f"{slot:4d}  {t:11.3f}   {e0:9.2%} {e1:7.2%}   {b0:11.4f} {b1:7.4f}  {area}")
    e0, e1, b0, b1 = (sum(v) / len(v) for v in (before.ece, after.ece, before.brier, after.brier))
    lines.append(f"mean                {e0:9.2%} {e1:7.2%}   {b0:11.4f} {b1:7.4f}")
    lines.append(
        "ECE and Brier of the survival up to a slot, AUC of a slot's own confidence among rounds that reached it"
    )
    return "\n".join(lines)


def diagrams(before: "Quality", after: "Quality") -> Any:
    """Reliability of the survival, a panel a slot: share that survived against what was promised."""
    from . import plots

    slots = len(before.ece)
    columns = min(slots, 4)
    figure, panels = plots.grid(-(-slots // columns), columns, width=2.6, height=2.4, sharex=True, sharey=True)
    for slot, panel in enumerate(panels.flat):
        if slot >= slots:
            panel.set_axis_off()
            continue
        panel.plot([0, 1], [0, 1], ls=":", color=plots.GREY)
        for name, q in (("before", before), ("after", after)):
            chance, share, _ = zip(*q.diagrams[slot])
            panel.plot(chance, share, "o-", ms=3, label=f"{name}: ECE {q.ece[slot]:.1%}")
        panel.set(title=f"slot {slot}", xlim=(0, 1), ylim=(0, 1))
        panel.legend(fontsize=6)
    figure.supxlabel("survival promised")
    figure.supylabel("share that survived")
    return figure


def save_temperatures(path: str, drafter: "Drafter", temperatures: Sequence[float]) -> None:
    """Put the temperatures into the config.json of a local drafter, whole or not at all."""
    from ..cache import write_text
    from ..hub.files import find_drafter, read_config
    from ..hub.native import config_to_json

    folder = find_drafter(path)
    raw = read_config(folder)
    config = dataclasses.replace(drafter.config, confidence_temperatures=tuple(temperatures))  # type: ignore[call-arg]
    raw["deepspec"] = {"format": 1, **(raw.get("deepspec") or {}), "drafter": config_to_json(config)}
    write_text(folder / "config.json", json.dumps(raw, indent=2) + "\n")


if __name__ == "__main__":
    main(run)
