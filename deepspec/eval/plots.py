"""What all pictures share: a grid of panels, colours, saving. matplotlib is optional, and used without global state."""

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

MISSING = "no pictures: matplotlib is not installed; pip install deepspec[plot]"
GREY = "0.6"


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def grid(rows: int, columns: int, *, width: float = 4.0, height: float = 3.0, **shared: Any) -> tuple[Any, Any]:
    """(figure, panels [rows, columns]) of `width` by `height` inches a panel; `shared` as in `Figure.subplots`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.0 + width * columns, 0.7 + height * rows), dpi=150, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **shared)
    for panel in panels.flat:
        panel.grid(alpha=0.3)
        panel.set_axisbelow(True)
    return figure, panels


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour a name, in the order in which they first appear."""
    return {name: f"C{i % 10}" for i, name in enumerate(dict.fromkeys(names))}


def whole_numbers(axis: Any) -> None:
    """Ticks of an axis at integers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def gaps(values: Sequence[float | None]) -> list[float]:
    """None, what was not measured, as a gap in a line."""
    return [float("nan") if v is None else v for v in values]


def bars(panel: Any, groups: Sequence[str], series: Mapping[str, Sequence[float | None]], **options: Any) -> Any:
    """Bars side by side: a group of them a place on the x axis, one a name of `series` [groups]. `options[name]` are
    further arguments of its bars. Returns name -> centres of its bars."""
    width = 0.8 / max(len(series), 1)
    centres = {}
    for i, (name, values) in enumerate(series.items()):
        centres[name] = [g + (i - (len(series) - 1) / 2) * width for g in range(len(groups))]
        panel.bar(centres[name], gaps(values), width=0.9 * width, label=name, **options.get(name, {}))
    panel.set_xticks(range(len(groups)), groups)
    return centres


def save(figure: Any, path: Path) -> None:
    """Write a PNG, whole or not at all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    temporary = path.with_name(f".{path.name}")
    try:
        FigureCanvasAgg(figure).print_png(str(temporary))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
