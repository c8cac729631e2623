"""`python -m deepspec.train --report DIR`: a run's metrics.jsonl as pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checked import InputError

Row = dict[str, Any]
TERMS = ("loss", "ce", "kl", "l1", "confidence")


def read(out: Path) -> list[Row]:
    """The rows of a run directory's metrics.jsonl; InputError where there is none."""
    file = out / "metrics.jsonl"
    if not file.is_file():
        raise InputError(f"no metrics.jsonl in {str(out)!r}; give a run directory (`out` of a config)")
    found = rows(file)
    if not found:
        raise InputError(f"{file} is empty: the run has not logged a step yet")
    return found


def rows(file: Path) -> list[Row]:
    """The lines of a metrics.jsonl; none where there is no file."""
    found = []
    for number, line in enumerate(file.read_text().splitlines() if file.is_file() else [], 1):
        try:
            found.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            raise InputError(f"{file}, line {number}: not a JSON object") from None
    return found


def series(rows: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of the rows that have `key`."""
    found = [(row["step"], float(row[key])) for row in rows if row.get(key) is not None]
    return [step for step, _ in found], [value for _, value in found]


def draw(out: Path) -> Path:
    """Write curves.png into a run directory: loss terms, acceptance of each slot, tau, throughput, gradient norm."""
    logged = read(out)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("--report needs matplotlib: pip install deepspec[plot]") from None
    figure = Figure(figsize=(13, 7.5), dpi=130, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    (loss, accept, held), (tau, speed, norm) = figure.subplots(2, 3)
    _lines(loss, logged, [k for k in TERMS if series(logged, k)[0]], "loss and its terms (mean a slot)")
    for axes, prefix, title in (
        (accept, "accept@", "expected acceptance by slot, training rows"),
        (held, "val_accept@", "true acceptance by slot, held-out prompts"),
    ):
        keys = sorted({k for row in logged for k in row if k.startswith(prefix)}, key=lambda k: int(k.split("@")[1]))
        _lines(axes, logged, keys, title, shade=True)
        axes.set_ylim(0, 1.02)
    _lines(tau, logged, ["tau", "val_tau"], "tau: expected on training rows, true on held-out prompts")
    bands = [(r["step"], *r["val_tau_interval"]) for r in logged if r.get("val_tau_interval")]
    if bands:
        steps, low, high = zip(*bands)
        tau.fill_between(steps, low, high, color="C1", alpha=0.2, linewidth=0)
    _lines(speed, logged, ["tokens_per_second"], "tokens a second")
    _lines(norm, logged, ["grad_norm"], "gradient norm before clipping")
    norm.set_yscale("log")
    for row in logged:
        for axes in (loss, tau):
            if row.get("warnings"):
                axes.axvline(row["step"], color="red", alpha=0.4, linewidth=0.8)
    path = out / "curves.png"
    temporary = path.with_name(f".{path.name}")
    try:
        canvas.print_png(str(temporary))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _lines(axes: Any, rows: Sequence[Row], keys: Sequence[str], title: str, shade: bool = False) -> None:
    drawn = 0
    for i, key in enumerate(keys):
        steps, values = series(rows, key)
        if not steps:
            continue
        from matplotlib import colormaps

        colour = {"color": colormaps["viridis"](i / max(1, len(keys) - 1))} if shade else {}
        style = "o-" if len(steps) < 20 else "-"
        axes.plot(steps, values, style, ms=3, lw=1.2, label=key, **colour)
        drawn += 1
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("step", fontsize=8)
    axes.grid(alpha=0.3)
    if drawn:
        axes.legend(fontsize=7, ncols=2 if drawn > 4 else 1)
    else:
        axes.text(0.5, 0.5, "not logged", ha="center", transform=axes.transAxes, color="grey")
