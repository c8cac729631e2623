"""What `deepspec.eval.load` found, as rows, tables and a picture."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .closed_loop import Load

Row = dict[str, Any]
NONE = "no speculation"


def row(name: str, users: int, real: "Sequence[Load]", simulated: "Sequence[Load]") -> Row:
    """The figures of a schedule under so many users, over all repeats; None where nothing was measured or simulated."""
    from .closed_loop import Load

    found: Row = {"schedule": name, "users": users, "rounds": sum(one.rounds for one in real)}
    for kind, loads in (("measured", real), ("simulated", simulated)):
        for figure in ("throughput", "speed", "verification_length"):
            found[f"{kind}_{figure}"] = getattr(Load.total(loads), figure) if loads else None
        found[f"{kind}_tokens"], found[f"{kind}_seconds"] = [x.tokens for x in loads], [x.seconds for x in loads]
    return found


def compare(rows: Sequence[Row]) -> None:
    """Add `to_best`: tokens a second by those of the better of no speculation and verify_all under as many users; None
    where one of them was not served. `to_best_interval`: 95 %, over repeats; None with fewer than four."""
    from .stats import speedup_interval

    for r in rows:
        plain, everything = (
            next((x for x in rows if (x["schedule"], x["users"]) == (name, r["users"])), None)
            for name in (NONE, "verify_all")
        )
        r["to_best"] = r["to_best_interval"] = None
        if r["rounds"] and plain and everything:
            best = max(plain, everything, key=lambda x: x["measured_throughput"])
            r["to_best"] = r["measured_throughput"] / best["measured_throughput"]
            columns = [x[f"measured_{name}"] for x in (r, best) for name in ("tokens", "seconds")]
            r["to_best_interval"] = speedup_interval(*columns)


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
        low, high = r["to_best_interval"] or (None, None)
        interval = "" if low is None else f" [{low:.2f}, {high:.2f}]"
        lines.append("  ".join([*cells, f"{_number(r['to_best'], '7.2f')}{interval}"]))
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
