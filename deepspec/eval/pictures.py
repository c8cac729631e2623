"""The pictures of result rows; each draws what the rows hold and nothing else."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import plots
from .report import UNPROVEN, proven
from .stats import ratio

Row = dict[str, Any]


def draw_all(rows: Sequence[Row], out: Path) -> dict[str, str]:
    """Draw into `out` every picture that these rows have something for: {file name: what it shows}. Empty, and no file,
    without matplotlib. Pictures of an earlier run that have nothing now are removed."""
    if not plots.available():
        return {}
    drawn = {}
    for name, (title, draw) in PICTURES.items():
        figure = draw(rows)
        if figure is None:
            (out / name).unlink(missing_ok=True)
        else:
            plots.save(figure, out / name)
            drawn[name] = title
    return drawn


def tau_by_task(rows: Sequence[Row]) -> Any:
    """Bars of tau with their intervals, a panel a temperature; the paper's values as lines where it has any."""
    tasks, temperatures, names = (_seen(rows, key) for key in ("task", "temperature", "drafter"))
    figure, panels = plots.grid(1, len(temperatures), width=max(4.0, 0.5 + 0.35 * len(tasks) * len(names)), sharey=True)
    for panel, temperature in zip(panels[0], temperatures):
        cells = {(r["task"], r["drafter"]): r for r in rows if r["temperature"] == temperature}
        series: dict[str, list[float | None]] = {n: [cells[t, n]["tau"] for t in tasks] for n in names}
        colour = plots.colours(names)
        centres = plots.bars(panel, tasks, series, **{n: {"color": colour[n]} for n in names})
        for (name, values), (g, task) in ((s, gt) for s in series.items() for gt in enumerate(tasks)):
            interval = cells[task, name]["tau_interval"]
            if interval is not None and values[g] is not None:
                panel.vlines(centres[name][g], *interval, color="k", lw=1)
        for g, task in enumerate(tasks):
            for drafter, tau in (cells[task, names[0]]["paper_tau"] or {}).items():
                panel.hlines(tau, g - 0.45, g + 0.45, color=plots.GREY, ls=":")
                panel.annotate(f"{drafter} (paper)", (g - 0.45, tau), fontsize=6, va="bottom")
        panel.set(title=f"temperature {temperature:g}")
        panel.tick_params(axis="x", labelrotation=20 if len(tasks) > 3 else 0)
    panels[0][0].set_ylabel("tau: tokens a round")
    panels[0][0].legend(fontsize=8)
    return figure


def acceptance_by_slot(rows: Sequence[Row]) -> Any:
    """A row of panels a task, a panel a temperature: conditional acceptance solid, prefix acceptance dashed."""
    tasks, temperatures = _seen(rows, "task"), _seen(rows, "temperature")
    figure, panels = plots.grid(len(tasks), len(temperatures), sharex=True, sharey=True)
    colour = plots.colours(r["drafter"] for r in rows)
    for row in rows:
        panel = panels[tasks.index(row["task"])][temperatures.index(row["temperature"])]
        panel.set_title(f"{row['task']}, temperature {row['temperature']:g}")
        for key, style in (("conditional", "o-"), ("prefix", "s--")):
            rates, label = row[f"accept_rates_{key}"], f"{row['drafter']}, {key}"
            _slots(panel, rates, style, color=colour[row["drafter"]], label=label)
    _acceptance_axes(panels)
    return figure


def acceptance_by_domain(rows: Sequence[Row], always: bool = False) -> Any:
    """Conditional acceptance by slot, a panel a domain, its tasks pooled (Figure 2 of the paper). None where each
    domain is one task, whose own picture shows the same, unless `always`."""
    domains, temperatures = _seen(rows, "domain"), _seen(rows, "temperature")
    if not always and len(domains) == len(_seen(rows, "task")):
        return None
    figure, panels = plots.grid(len(temperatures), len(domains), sharex=True, sharey=True)
    colour = plots.colours(r["drafter"] for r in rows)
    for t, temperature in enumerate(temperatures):
        for d, domain in enumerate(domains):
            panel = panels[t][d]
            panel.set_title(f"{domain}, temperature {temperature:g}")
            for name in colour:
                these = [
                    r for r in rows if (r["temperature"], r["domain"], r["drafter"]) == (temperature, domain, name)
                ]
                if these:
                    _slots(panel, pooled(these), "o-", color=colour[name], label=name)
    _acceptance_axes(panels)
    return figure


def pooled(rows: Sequence[Row]) -> list[float | None]:
    """[G] conditional acceptance of all rounds of several rows together."""
    counts = [r["accept_counts"] for r in rows]
    accepted, reached = ([sum(slot) for slot in zip(*(c[key] for c in counts))] for key in ("accepted", "reached"))
    return [ratio(a, n) for a, n in zip(accepted, reached)]


def time_by_part(rows: Sequence[Row]) -> Any:
    """Milliseconds a token: drafting and verification over tau, beside the baseline's, a panel a task and temperature.
    The bars' ratio is the speed-up that the parts explain; a drafter whose losslessness is not proven is marked."""
    rows = [r for r in rows if r["decomposition"] is not None]
    if not rows:
        return None
    tasks, temperatures = _seen(rows, "task"), _seen(rows, "temperature")
    figure, panels = plots.grid(len(tasks), len(temperatures), sharex=True)
    for t, task in enumerate(tasks):
        for c, temperature in enumerate(temperatures):
            these = [r for r in rows if (r["task"], r["temperature"]) == (task, temperature)]
            panel = panels[t][c]
            if not these:
                continue
            ms = {k: [1000 * r[f"{k}_seconds_per_round"] / r["tau"] for r in these] for k in ("draft", "verify")}
            names = [r["drafter"] if proven(r) else f"{r['drafter']} {UNPROVEN}" for r in these]
            panel.barh(["baseline"], [1000 * these[0]["target_seconds_per_round"]], color=plots.GREY, label="target")
            panel.barh(names, ms["verify"], color="C0", label="T_verify / tau")
            panel.barh(names, ms["draft"], left=ms["verify"], color="C1", label="T_draft / tau")
            panel.set(title=f"{task}, temperature {temperature:g}", xlim=(0, None))
            panel.invert_yaxis()
    for panel in panels[-1]:
        panel.set_xlabel("ms a token")
    panels[0][0].legend(fontsize=8)
    return figure


def threshold_sweep(rows: Sequence[Row]) -> Any:
    """Accepted and wasted drafts a round as stacked bars, and the acceptance of what was verified as a line, by
    threshold; a panel a drafter, domain and temperature (Figure 5 of the paper)."""
    rows = [r for r in rows if r["schedule"].startswith("threshold:")]
    level = {r["schedule"]: float(r["schedule"].partition(":")[2]) for r in rows}
    if len(level) < 2:
        return None
    groups: dict[tuple[str, str, float], list[Row]] = {}
    for r in sorted(rows, key=lambda r: level[r["schedule"]]):
        plain = r["drafter"].removesuffix(f" {r['schedule']}")
        groups.setdefault((plain, r["domain"], r["temperature"]), []).append(r)
    drafters = list(dict.fromkeys(d for d, _, _ in groups))
    others = list(dict.fromkeys((domain, t) for _, domain, t in groups))
    figure, panels = plots.grid(len(drafters), len(others), sharey=True)
    for (drafter, domain, t), these in groups.items():
        panel = panels[drafters.index(drafter)][others.index((domain, t))]
        levels = list(dict.fromkeys(level[r["schedule"]] for r in these))
        accepted, wasted = zip(*(drafts_a_round([r for r in these if level[r["schedule"]] == x]) for x in levels))
        ticks = range(len(levels))
        panel.bar(ticks, accepted, color="C2", label="accepted")
        panel.bar(ticks, wasted, bottom=accepted, color="C3", alpha=0.6, label="rejected")
        panel.set_xticks(ticks, [f"{x:g}" for x in levels])
        panel.set(title=f"{drafter}: {domain}, temperature {t:g}", xlabel="threshold")
        line = panel.twinx()
        line.plot(ticks, plots.gaps([ratio(a, a + w) for a, w in zip(accepted, wasted)]), "ko-", ms=4)
        line.set(ylim=(0, 1.02), ylabel="acceptance (line)")
        panel.set_ylabel("drafts a round")
    panels[0][0].legend(fontsize=8)
    return figure


def drafts_a_round(rows: Sequence[Row]) -> tuple[float, float]:
    """(accepted, wasted) drafts a round of several rows together."""
    rounds = sum(r["rounds"] for r in rows)
    return tuple(sum(r[f"{k}_per_round"] * r["rounds"] for r in rows if r["rounds"]) / max(rounds, 1)
                 for k in ("accepted", "wasted"))  # type: ignore[return-value]  # fmt: skip


def _seen(rows: Sequence[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(r[key] for r in rows))


def _slots(panel: Any, rates: Sequence[float | None], style: str, **options: Any) -> None:
    panel.plot(range(len(rates)), plots.gaps(rates), style, ms=4, **options)


def _acceptance_axes(panels: Any) -> None:
    for panel in panels.flat:
        panel.set(ylim=(0, 1.02))
        plots.whole_numbers(panel.xaxis)
    for panel in panels[-1]:
        panel.set_xlabel("slot")
    for panels_of_row in panels:
        panels_of_row[0].set_ylabel("acceptance")
    panels[0][0].legend(fontsize=8)


PICTURES: dict[str, tuple[str, Callable[[Sequence[Row]], Any]]] = {
    "tau.png": ("tau by task, with 95 % intervals", tau_by_task),
    "acceptance.png": ("acceptance by slot: conditional solid, prefix dashed", acceptance_by_slot),
    "domains.png": ("conditional acceptance by slot and domain", acceptance_by_domain),
    "time.png": ("where the time of a token goes", time_by_part),
    "thresholds.png": ("drafts accepted and rejected a round, by threshold", threshold_sweep),
}
