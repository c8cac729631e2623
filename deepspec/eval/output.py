"""The files of an evaluation, each written whole or not at all."""

import contextlib
import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..cache import writable_dir, write_text
from . import page, pictures, report
from .records import Records
from .results import Row

COLUMNS = (
    "task", "domain", "samples", "drafter", "schedule", "verify", "draft", "temperature", "tau", "tau_low", "tau_high",
    "verified_per_round", "accepted_per_round", "wasted_per_round", "rounds", "tokens", "tokens_per_second",
    "baseline_tokens_per_second", "speedup", "speedup_low", "speedup_high", "lossless", "draft_seconds_per_round",
    "verify_seconds_per_round", "target_seconds_per_round", "decomposition", "repetition_rate",
)  # fmt: skip


@contextlib.contextmanager
def output(path: Path, records: Records) -> Iterator[None]:
    """A directory proven writable; a failure takes away what was made and is still empty."""
    made = [p for p in (path, *path.parents) if not p.exists()]  # the innermost first
    try:
        writable_dir(path, "--out")
        yield
    except BaseException:
        records.abandon()
        for directory in made:
            with contextlib.suppress(OSError):  # not empty, or never made
                directory.rmdir()
        raise


def write(out: Path, rows: Sequence[Row], texts: Sequence[Row]) -> list[str]:
    """All files, results.json last. Returns the names of the pictures; none without matplotlib."""
    drawn = pictures.draw_all(rows, out)
    write_text(out / "generations.jsonl", "".join(json.dumps(t) + "\n" for t in texts))
    write_text(out / "results.md", report.markdown(rows, drawn))
    write_text(out / "results.csv", table(rows))
    write_text(
        out / "results.html", page.html(rows, {title: (out / name).read_bytes() for name, title in drawn.items()})
    )
    write_text(out / "results.json", json.dumps(rows, indent=1, allow_nan=False) + "\n")
    return list(drawn)


def table(rows: Sequence[Row]) -> str:
    """CSV: a line a row, the acceptance of every slot behind the other columns; empty where nothing was measured."""
    slots = max((len(r["accept_rates_conditional"]) for r in rows), default=0)
    kinds = ("conditional", "prefix")
    names = [*COLUMNS, *(f"{kind}_{g}" for kind in kinds for g in range(slots))]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for r in rows:
        flat = dict(r)
        for name in ("tau", "speedup"):
            flat[f"{name}_low"], flat[f"{name}_high"] = r[f"{name}_interval"] or (None, None)
        flat["lossless"] = report.verdict(r)
        for kind in kinds:
            flat |= {f"{kind}_{g}": rate for g, rate in enumerate(r[f"accept_rates_{kind}"])}
        writer.writerow(flat)
    return text.getvalue()
