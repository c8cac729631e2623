"""Experiment trackers: whichever of accelerate's the config names, beside metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checked import InputError


class Trackers:
    """Logs rows of numbers. For the one process that writes."""

    def __init__(self, names: Sequence[str], out: Path, settings: Mapping[str, Any]) -> None:
        """InputError where a tracker is unknown or not installed."""
        self._trackers: list[Any] = []
        for name in names:
            kind = find(name)
            place = {"logging_dir": str(out)} if kind.requires_logging_directory else {}
            tracker = kind(out.name if name != "tensorboard" else "tensorboard", **place)
            if hasattr(tracker, "start"):
                tracker.start()
            tracker.store_init_configuration(flat(settings))
            self._trackers.append(tracker)

    def log(self, row: Mapping[str, Any]) -> None:
        """The numbers of a row, at its `step`."""
        values = {k: float(v) for k, v in row.items() if k != "step" and isinstance(v, int | float)}
        for tracker in self._trackers:
            tracker.log(values, step=row["step"])

    def finish(self) -> None:
        for tracker in self._trackers:
            tracker.finish()


def find(name: str) -> Any:
    """accelerate's class of a tracker; InputError where there is none, or its package is not installed."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    known = {str(kind): cls for kind, cls in LOGGER_TYPE_TO_CLASS.items()}
    if name not in known:
        raise InputError(f"train.trackers: no tracker {name!r}; accelerate knows {', '.join(sorted(known))}")
    if name not in {str(kind) for kind in get_available_trackers()}:
        raise InputError(f"train.trackers: the package of {name!r} is not installed: pip install {name}")
    return known[name]


def flat(settings: Any, key: str = "") -> dict[str, Any]:
    """Settings by dotted name; lists as text, None left out, as trackers want them."""
    if not isinstance(settings, Mapping):
        plain = isinstance(settings, int | float | str)
        return {} if settings is None else {key: settings if plain else str(settings)}
    return {k: v for name, value in settings.items() for k, v in flat(value, f"{key}.{name}" if key else name).items()}
