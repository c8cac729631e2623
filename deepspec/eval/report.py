"""Result rows as tables for the terminal and as Markdown. Everything shown is in the rows."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Cells = tuple[str, ...]
HEADER = (
    "drafter", "T", "tau [95 %]", "slot acceptance", "sent", "wasted", "tokens/s", "speed-up", "parts", "T_draft",
    "T_verify", "T_target",
)  # fmt: skip
UNPROVEN = "?"
LEGEND = (
    "tau: tokens committed a round, bonus included. Slot acceptance: accepted at slot 0, 1, ... when every earlier one "
    "was. sent, wasted: drafts verified a round, and those of them not accepted. T_draft, T_verify, T_target: ms a "
    "round; T_target is one token of the baseline. parts: the speed-up that these give, tau * T_target / (T_draft + "
    "T_verify); what is missing from it to the measured one is prefill and overhead. Intervals: 95 % bootstrap."
)


@dataclass(frozen=True)
class Section:
    """One task."""

    title: str
    settings: str
    cells: list[Cells]
    notes: list[str]
    first_prompt: str | None


def text(rows: Sequence[Row]) -> str:
    """For the terminal: aligned columns, no colours."""
    parts = []
    for section in sections(rows):
        lines = aligned([HEADER, *section.cells])
        parts.append("\n".join([section.title, section.settings, "", *lines, "", *section.notes]))
    return "\n\n".join(parts) + "\n"


def aligned(table: Sequence[Cells]) -> list[str]:
    """A header and rows of cells as lines of equal columns, a rule under the header."""
    widths = [max(len(line[c]) for line in table) for c in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in table]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return lines


def markdown(rows: Sequence[Row], pictures: Mapping[str, str] | None = None) -> str:
    """The same as a Markdown page; `pictures` are {file name beside it: what it shows}."""
    parts = ["# Evaluation"]
    if overview := summary(rows):
        parts.append(markdown_table(overview))
    for section in sections(rows):
        parts += [f"## {_escape(section.title)}", _escape(section.settings)]
        parts.append(markdown_table([HEADER, *section.cells]))
        parts.append("\n".join(f"- {_escape(n)}" for n in section.notes))
        if section.first_prompt is not None:
            parts += ["The first prompt, as the target sees it:", f"````\n{section.first_prompt}\n````"]
    parts.append(LEGEND)
    parts += [f"![{title}]({name})" for name, title in (pictures or {}).items()]
    parts.append(f"```\n{rows[0]['settings']['command']}\n```")
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Sequence[Cells]) -> str:
    """A header and rows of cells."""
    lines = [table[0], ("---",) * len(table[0]), *table[1:]]
    return "\n".join("| " + " | ".join(_escape(c) for c in line) + " |" for line in lines)


def sections(rows: Sequence[Row]) -> list[Section]:
    """One a task, in the order of the rows."""
    return [_section([r for r in rows if r["task"] == task]) for task in _seen(rows, "task")]


def summary(rows: Sequence[Row]) -> list[Cells]:
    """tau of every drafter on every task side by side, and the paper's where the target is one of its; header first.
    Empty where there is one task only, whose own table says it all."""
    tasks = _seen(rows, "task")
    if len(tasks) < 2:
        return []
    cells = {(r["drafter"], r["temperature"], r["task"]): _number(r["tau"], 2) for r in rows}
    table: list[Cells] = [("tau", "T", *tasks)]
    for temperature in _seen(rows, "temperature"):
        for drafter in _seen(rows, "drafter"):
            found = [cells.get((drafter, temperature, task), "-") for task in tasks]
            table.append((drafter, f"{temperature:g}", *found))
    paper = {r["task"]: r["paper_tau"] for r in rows if r["paper_tau"]}
    for drafter in next(iter(paper.values()), {}):
        found = [_number(paper.get(task, {}).get(drafter), 2) for task in tasks]
        table.append((f"{drafter} (paper)", "1", *found))
    return table


def _section(rows: list[Row]) -> Section:
    first, cells = rows[0], []
    for temperature in _seen(rows, "temperature"):
        same = [r for r in rows if r["temperature"] == temperature]
        cells.append(_baseline(same[0]))
        cells += [_drafter(r) for r in same]
    for drafter, tau in (first["paper_tau"] or {}).items():
        cells.append((f"{drafter} (paper)", "1", _number(tau, 2), *["-"] * (len(HEADER) - 3)))
    s = first["settings"]
    revision = f"@{s['target']['revision'][:12]}" if s["target"]["revision"] else ""
    processes = f" x {s['processes']} processes" if s["processes"] > 1 else ""
    ways = ", ".join(" and ".join(s[k]) for k in ("schedule", "verify", "draft"))
    settings = (
        f"target {s['target']['name']}{revision}, {s['dtype']} on {s['device']}, {s['threads']} threads{processes}, "
        f"concurrency {s['concurrency']}, {ways}, thinking {s['thinking']}, seed {s['seed']}"
    )
    title = f"{first['task']}: {first['samples']} prompts, up to {s['max_new_tokens']} new tokens"
    return Section(title, settings, cells, list(_notes(rows)), first["first_prompt"])


def _baseline(row: Row) -> Cells:
    speed, target = _number(row["baseline_tokens_per_second"], 1), _milliseconds(row["target_seconds_per_round"])
    return "baseline", f"{row['temperature']:g}", "1", "-", "0", "0", speed, "1", "1", "-", "-", target


def _drafter(row: Row) -> Cells:
    speedup = _number(row["speedup"], 2) + _interval(row["speedup_interval"])
    if not proven(row) and row["speedup"] is not None:
        speedup += f" {UNPROVEN}"
    return (
        row["drafter"],
        f"{row['temperature']:g}",
        _number(row["tau"], 2) + _interval(row["tau_interval"]),
        " ".join(_number(r, 2).removeprefix("0") for r in row["accept_rates_conditional"]),
        _number(row["verified_per_round"], 2),
        _number(row["wasted_per_round"], 2),
        _number(row["tokens_per_second"], 1),
        speedup,
        _number(row["decomposition"], 2),
        _milliseconds(row["draft_seconds_per_round"]),
        _milliseconds(row["verify_seconds_per_round"]),
        _milliseconds(row["target_seconds_per_round"]),
    )


def verdict(row: Row) -> str:
    """Of the losslessness check: passed, failed, or not run."""
    equal = row["greedy_equal"]
    if equal is None or not equal["total"]:
        return "not run"
    return "passed" if equal["equal"] == equal["total"] else "failed"


def proven(row: Row) -> bool:
    """Whether the drafter's greedy float32 output was compared with the baseline's, and equalled it every time."""
    return verdict(row) == "passed"


def _notes(rows: list[Row]) -> Iterable[str]:
    drafters = {r["drafter"]: r for r in rows}
    if rows[0]["dropped"]:
        yield "left out: " + ", ".join(f"{count} {reason}" for reason, count in rows[0]["dropped"].items())
    yield from _comparable(rows)
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
            margin = f" (the target's two best logits there: {d['margin']:.3g} apart)"
            turn = f" of turn {d['turn'] + 1}" if d["turn"] else ""
            yield f"{name} differs on prompt {d['id']} from new token {d['index']}{turn} on{margin}"
    if unproven := [name for name, r in drafters.items() if not proven(r)]:
        why = "the check above did not pass" if checked else "the check against the baseline was not run"
        yield f"{UNPROVEN} speed-up not proven lossless for {', '.join(unproven)}: {why}"
    for row in rows:
        for other, d in row["tau_differences"].items():
            if d is None or list(drafters).index(other) > list(drafters).index(row["drafter"]):
                continue  # each pair once
            name = row["drafter"]
            yield f"T={row['temperature']:g}: tau of {name} - tau of {other} = {_difference(name, other, d)}"
    for temperature in _seen(rows, "temperature"):
        row = next(r for r in rows if r["temperature"] == temperature)
        if row["distinct_4gram"] is not None:
            yield (
                f"T={temperature:g}: the baseline's text has {row['distinct_4gram']:.2f} distinct 4-grams; "
                f"{row['repetition_rate']:.0%} of its continuations end in a loop"
            )


def _comparable(rows: list[Row]) -> Iterable[str]:
    """What tells this run from another one that looks like it."""
    first, s = rows[0], rows[0]["settings"]
    if first["later_turns"]:
        how = "not asked (--turns all asks them)" if s["turns"] == "first" else "asked after the model's own answers"
        yield f"{first['later_turns']} later turns of the prompts: {how}"
    yield from s["warnings"]
    if first["paper_tau"]:
        yield (
            f"the paper's tau: temperature 1, up to 2048 new tokens, first turn, thinking off, "
            f"{first['paper_samples']} prompts"
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


def _seen(rows: Sequence[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(r[key] for r in rows))


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("<", "&lt;")
