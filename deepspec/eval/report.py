"""Result rows as a table for the terminal and as Markdown. Everything shown is in the rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
HEADER = ("drafter", "T", "tau [95 %]", "slot acceptance", "tokens/s", "speed-up", "T_draft", "T_verify", "T_target")
UNPROVEN = "?"
LEGEND = (
    "tau: tokens committed a round, bonus included. Slot acceptance: accepted at slot 0, 1, ... when every earlier one "
    "was. T_draft, T_verify, T_target: ms a round; T_target is one token of the baseline. Intervals: 95 % bootstrap."
)


@dataclass(frozen=True)
class Section:
    """One task."""

    title: str
    settings: str
    cells: list[tuple[str, ...]]
    notes: list[str]


def text(rows: Sequence[Row]) -> str:
    """For the terminal: aligned columns, no colours."""
    parts = []
    for section in sections(rows):
        table = [HEADER, *section.cells]
        widths = [max(len(line[c]) for line in table) for c in range(len(HEADER))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in table]
        lines.insert(1, "  ".join("-" * w for w in widths))
        parts.append("\n".join([section.title, section.settings, "", *lines, "", *section.notes]))
    return "\n\n".join(parts) + "\n"


def markdown(rows: Sequence[Row], pictures: Iterable[str] = ()) -> str:
    """The same as a Markdown page; `pictures` are file names beside it."""
    parts = ["# Evaluation"]
    for section in sections(rows):
        table = [HEADER, ("---",) * len(HEADER), *section.cells]
        parts += [f"## {_escape(section.title)}", _escape(section.settings)]
        parts.append("\n".join("| " + " | ".join(_escape(c) for c in line) + " |" for line in table))
        parts.append("\n".join(f"- {_escape(n)}" for n in section.notes))
    parts.append(LEGEND)
    parts += [f"![acceptance by slot: conditional solid, prefix dashed]({p})" for p in pictures]
    parts.append(f"```\n{rows[0]['settings']['command']}\n```")
    return "\n\n".join(parts) + "\n"


def sections(rows: Sequence[Row]) -> list[Section]:
    """One a task, in the order of the rows."""
    return [_section([r for r in rows if r["task"] == task]) for task in dict.fromkeys(r["task"] for r in rows)]


def _section(rows: list[Row]) -> Section:
    first, cells = rows[0], []
    for temperature in dict.fromkeys(r["temperature"] for r in rows):
        same = [r for r in rows if r["temperature"] == temperature]
        cells.append(_baseline(same[0]))
        cells += [_drafter(r) for r in same]
    s = first["settings"]
    revision = f"@{s['target']['revision'][:12]}" if s["target"]["revision"] else ""
    settings = (
        f"target {s['target']['name']}{revision}, {s['dtype']} on {s['device']}, {s['threads']} threads, "
        f"concurrency {s['concurrency']}, {s['schedule']}, seed {s['seed']}"
    )
    title = f"{first['task']}: {first['samples']} prompts, up to {s['max_new_tokens']} new tokens"
    return Section(title, settings, cells, list(_notes(rows)))


def _baseline(row: Row) -> tuple[str, ...]:
    speed, target = _number(row["baseline_tokens_per_second"], 1), _milliseconds(row["target_seconds_per_round"])
    return "baseline", f"{row['temperature']:g}", "1", "-", speed, "1", "-", "-", target


def _drafter(row: Row) -> tuple[str, ...]:
    speedup = _number(row["speedup"], 2) + _interval(row["speedup_interval"])
    if not proven(row) and row["speedup"] is not None:
        speedup += f" {UNPROVEN}"
    return (
        row["drafter"],
        f"{row['temperature']:g}",
        _number(row["tau"], 2) + _interval(row["tau_interval"]),
        " ".join(_number(r, 2).removeprefix("0") for r in row["accept_rates_conditional"]),
        _number(row["tokens_per_second"], 1),
        speedup,
        _milliseconds(row["draft_seconds_per_round"]),
        _milliseconds(row["verify_seconds_per_round"]),
        _milliseconds(row["target_seconds_per_round"]),
    )


def proven(row: Row) -> bool:
    """Whether the drafter's greedy float32 output was compared with the baseline's, and equalled it every time."""
    equal = row["greedy_equal"]
    return equal is not None and equal["total"] > 0 and equal["equal"] == equal["total"]


def _notes(rows: list[Row]) -> Iterable[str]:
    drafters = {r["drafter"]: r for r in rows}
    if rows[0]["dropped"]:
        yield "left out: " + ", ".join(f"{count} {reason}" for reason, count in rows[0]["dropped"].items())
    checked = {name: r["greedy_equal"] for name, r in drafters.items() if r["greedy_equal"]}
    if checked:
        dtype = next(iter(checked.values()))["dtype"]
        counts = ", ".join(f"{name} {e['equal']}/{e['total']}" for name, e in checked.items())
        yield f"greedy {dtype} output equal to the baseline's: {counts}"
    timed = {r["drafter"]: r["timed_greedy_equal"] for r in rows if r["timed_greedy_equal"]}
    if timed and (dtype := next(iter(timed.values()))["dtype"]) != "float32":
        counts = ", ".join(f"{name} {e['equal']}/{e['total']}" for name, e in timed.items())
        yield f"in the timed {dtype}, where rounding may break a tie either way: {counts}"
    for name, e in checked.items():
        for d in e["differ"][:3]:
            margin = (
                "" if d.get("margin") is None else f" (the target's two best logits there: {d['margin']:.3g} apart)"
            )
            yield f"{name} differs on prompt {d['id']} from new token {d['index']} on{margin}"
    if unproven := [name for name, r in drafters.items() if not proven(r)]:
        why = "the check above did not pass" if checked else "the check against the baseline was not run"
        yield f"{UNPROVEN} speed-up not proven lossless for {', '.join(unproven)}: {why}"
    for row in rows:
        for other, d in row["tau_differences"].items():
            if d is None or list(drafters).index(other) > list(drafters).index(row["drafter"]):
                continue  # each pair once
            name = row["drafter"]
            yield f"T={row['temperature']:g}: tau of {name} - tau of {other} = {_difference(name, other, d)}"
    for temperature in dict.fromkeys(r["temperature"] for r in rows):
        row = next(r for r in rows if r["temperature"] == temperature)
        if row["distinct_4gram"] is not None:
            yield (
                f"T={temperature:g}: the baseline's text has {row['distinct_4gram']:.2f} distinct 4-grams; "
                f"{row['repetition_rate']:.0%} of its continuations end in a loop"
            )


def _difference(ours: str, theirs: str, d: Row) -> str:
    if d["interval"] is None:
        return f"{d['difference']:+.2f} (too few prompts for an interval)"
    low, high = d["interval"]
    verdict = "no difference"
    if low > 0 or high < 0:
        verdict = f"{ours} is {'above' if low > 0 else 'below'} {theirs}"
    return f"{d['difference']:+.2f} [{low:+.2f}, {high:+.2f}]: {verdict} beyond the 95 % interval (paired over prompts)"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _interval(value: Sequence[float] | None) -> str:
    return "" if value is None else f" [{value[0]:.2f}, {value[1]:.2f}]"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.2f}"


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("<", "&lt;")
