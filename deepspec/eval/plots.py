"""Pictures of result rows. matplotlib is optional, and used without its global state."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

MISSING = "no pictures: matplotlib is not installed; pip install deepspec[plot]"


def acceptance_by_slot(rows: Sequence[dict[str, Any]], path: Path) -> bool:
    """Write a PNG: a row of panels a task, a panel a temperature, a colour a drafter; conditional acceptance solid,
    prefix acceptance dashed. False, and no file, where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return False
    tasks = list(dict.fromkeys(r["task"] for r in rows))
    temperatures = list(dict.fromkeys(r["temperature"] for r in rows))
    colour = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(r["drafter"] for r in rows))}
    size = (1.5 + 4 * len(temperatures), 0.7 + 3 * len(tasks))
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(len(tasks), len(temperatures), squeeze=False, sharex=True, sharey=True)
    for row in rows:
        panel = panels[tasks.index(row["task"])][temperatures.index(row["temperature"])]
        for key, style in (("conditional", "o-"), ("prefix", "s--")):
            rates = [float("nan") if r is None else r for r in row[f"accept_rates_{key}"]]
            label = f"{row['drafter']}, {key}"
            panel.plot(range(len(rates)), rates, style, color=colour[row["drafter"]], label=label, ms=4)
    for t, task in enumerate(tasks):
        for c, temperature in enumerate(temperatures):
            panel = panels[t][c]
            panel.set(title=f"{task}, temperature {temperature:g}", ylim=(0, 1.02))
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
            panel.grid(alpha=0.3)
        panels[t][0].set_ylabel("acceptance")
    for panel in panels[-1]:
        panel.set_xlabel("slot")
    panels[0][0].legend(fontsize=8)
    temporary = path.with_name(f".{path.name}")
    try:
        canvas.print_png(str(temporary))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return True
