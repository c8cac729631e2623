"""A study's table (header first) and picture, from result rows and nothing else."""

from collections.abc import Mapping, Sequence
from typing import Any

from . import pictures, plots
from .report import Cells
from .stats import ratio

Row = dict[str, Any]
Places = Mapping[str, tuple[str, int]]
"""Drafter -> (recipe, value) of a sweep."""


def view(study: str, rows: Sequence[Row], places: Places) -> tuple[list[Cells], Any]:
    """(table, figure) of a study; the figure is None without matplotlib."""
    draw = plots.available()
    if study == "acceptance":
        return acceptance_table(rows), pictures.acceptance_by_domain(rows, always=True) if draw else None
    if study == "threshold":
        return threshold_table(rows), pictures.threshold_sweep(rows) if draw else None
    label = {"depth": "draft layers", "length": "proposal length"}[study]
    return sweep_table(rows, places, label), sweep_picture(rows, places, label) if draw else None


def acceptance_table(rows: Sequence[Row]) -> list[Cells]:
    """Conditional acceptance of every slot, a line a domain, drafter and temperature."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for r in rows:
        groups.setdefault((r["domain"], r["drafter"], f"{r['temperature']:g}"), []).append(r)
    rates = {key: pictures.pooled(these) for key, these in groups.items()}
    slots = max(map(len, rates.values()))
    lines = [(*key, *(_rate(x) for x in rate), *["-"] * (slots - len(rate))) for key, rate in rates.items()]
    return [("domain", "drafter", "T", *(f"slot {g}" for g in range(slots))), *lines]


def threshold_table(rows: Sequence[Row]) -> list[Cells]:
    """Drafts accepted and rejected a round, a line a drafter with its threshold, domain and temperature."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for r in rows:
        groups.setdefault((r["drafter"], r["domain"], f"{r['temperature']:g}"), []).append(r)
    lines: list[Cells] = [("drafter", "domain", "T", "accepted", "rejected", "acceptance", "tau")]
    for key, these in groups.items():
        accepted, wasted = pictures.drafts_a_round(these)
        rate = _rate(ratio(accepted, accepted + wasted))
        lines.append((*key, f"{accepted:.2f}", f"{wasted:.2f}", rate, _two(pooled_tau(these))))
    return lines


def pooled_tau(rows: Sequence[Row]) -> float | None:
    """tau of all rounds of several rows together."""
    return ratio(sum(r["tokens"] - r["turns"] for r in rows), sum(r["rounds"] for r in rows))


def sweep_table(rows: Sequence[Row], places: Places, label: str) -> list[Cells]:
    """tau and the time of a round, a line a recipe, value, task and temperature."""
    lines: list[Cells] = [("recipe", label, "task", "T", "tau", "[95 %]", "T_draft", "T_verify")]
    for r in rows:
        recipe, value = places[r["drafter"]]
        interval = "-" if r["tau_interval"] is None else "[{:.2f}, {:.2f}]".format(*r["tau_interval"])
        times = [r[f"{k}_seconds_per_round"] for k in ("draft", "verify")]
        ms = ["-" if t is None else f"{1000 * t:.2f}" for t in times]
        lines.append((recipe, str(value), r["task"], f"{r['temperature']:g}", _two(r["tau"]), interval, *ms))
    return lines


def sweep_picture(rows: Sequence[Row], places: Places, label: str) -> Any:
    """tau against the value, a line a recipe with its intervals; a panel a task and temperature."""
    panels_of = list(dict.fromkeys((r["task"], r["temperature"]) for r in rows))
    figure, panels = plots.grid(1, len(panels_of), sharey=True)
    colour = plots.colours(recipe for recipe, _ in places.values())
    for panel, (task, temperature) in zip(panels[0], panels_of):
        for recipe in colour:
            these = [r for r in rows if (r["task"], r["temperature"]) == (task, temperature)]
            points = sorted((places[r["drafter"]][1], r) for r in these if places[r["drafter"]][0] == recipe)
            values = [value for value, _ in points]
            panel.plot(values, plots.gaps([r["tau"] for _, r in points]), "o-", color=colour[recipe], label=recipe)
            for value, r in points:
                if r["tau_interval"] is not None:
                    panel.vlines(value, *r["tau_interval"], color=colour[recipe], lw=1)
        panel.set(title=f"{task}, temperature {temperature:g}", xlabel=label)
        plots.whole_numbers(panel.xaxis)
    panels[0][0].set_ylabel("tau: tokens a round")
    panels[0][0].legend(fontsize=8)
    return figure


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _two(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
