"""Tables, Markdown and pictures hold what the rows hold, and say when a speed-up is not proven lossless."""

import builtins
import copy
from typing import Any

import pytest

from deepspec.eval import plots, report

SETTINGS = {
    "target": {"name": "some/target", "revision": "0123456789abcdef"},
    "dtype": "bfloat16",
    "device": "cpu",
    "threads": 2,
    "max_new_tokens": 64,
    "concurrency": 1,
    "schedule": "verify_all",
    "seed": 0,
    "command": "python -m deepspec.eval --drafter x",
}


def row(drafter: str = "dspark", temperature: float = 0.0, **changes: Any) -> dict[str, Any]:
    return {
        "task": "held-out",
        "samples": 64,
        "dropped": {},
        "drafter": drafter,
        "temperature": temperature,
        "tau": 4.59,
        "tau_interval": (4.4, 4.8),
        "tau_differences": {},
        "accept_rates_conditional": [0.9, 0.845, None],
        "accept_rates_prefix": [0.9, 0.76, None],
        "tokens_per_second": 421.04,
        "baseline_tokens_per_second": 210.0,
        "speedup": 2.005,
        "speedup_interval": (1.9, 2.1),
        "draft_seconds_per_round": 0.00123,
        "verify_seconds_per_round": 0.00567,
        "target_seconds_per_round": 0.00444,
        "greedy_equal": {"equal": 64, "total": 64, "dtype": "float32", "differ": []},
        "timed_greedy_equal": None,
        "distinct_4gram": 0.51,
        "repetition_rate": 0.03,
        "settings": SETTINGS,
        **changes,
    }


def both() -> list[dict[str, Any]]:
    d = {"difference": 1.71, "interval": (1.6, 1.83)}
    back = {"difference": -1.71, "interval": (-1.83, -1.6)}
    return [
        row("dflash", t, tau=2.88, tau_differences={"dspark": back}) for t in (0.0, 1.0)
    ] + [row("dspark", t, tau_differences={"dflash": d}) for t in (0.0, 1.0)]  # fmt: skip


def lines(text: str, start: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.startswith(start)]


def test_table_has_a_baseline_row_and_a_row_a_drafter_at_each_temperature():
    text = report.text(both())
    assert [line[1] for line in lines(text, "baseline ")] == ["0", "1"]
    cells = ["dspark", "0", "4.59", "[4.40,", "4.80]", ".90", ".84", "-", "421.0", "2.00", "[1.90,", "2.10]"]
    assert lines(text, "dspark ")[0] == [*cells, "1.23", "5.67", "4.44"]
    assert lines(text, "baseline ")[0] == ["baseline", "0", "1", "-", "210.0", "1", "-", "-", "4.44"]
    table = text.split("\n\n")[1].splitlines()
    column = table[0].index("T_verify")
    assert all(line[column - 1] == " " != line[column] for line in table), "columns are aligned"
    assert "some/target@0123456789ab, bfloat16 on cpu, 2 threads" in text


def test_the_counted_line_and_the_difference_are_printed_once():
    text = report.text(both())
    assert text.count("greedy float32 output equal to the baseline's: dflash 64/64, dspark 64/64\n") == 1
    above = "tau of dspark - tau of dflash = +1.71 [+1.60, +1.83]: dspark is above dflash beyond the 95 % interval"
    assert text.count(above) == 2 and text.count("tau of dflash -") == 0
    assert "0.51 distinct 4-grams; 3% of its continuations end in a loop" in text
    assert "not proven" not in text and report.UNPROVEN not in text


@pytest.mark.parametrize(
    "equal, why",
    [
        (
            {"equal": 63, "total": 64, "dtype": "float32", "differ": [{"id": "p7", "index": 5, "margin": 2e-7}]},
            "did not pass",
        ),
        ({"equal": 0, "total": 0, "dtype": "float32", "differ": []}, "did not pass"),
        (None, "was not run"),
    ],
)
def test_an_unproven_speedup_is_marked(equal, why):
    rows = [row("dflash"), row("dspark", greedy_equal=equal)]
    text = report.text(rows)
    assert lines(text, "dspark ")[0][12] == report.UNPROVEN
    assert report.UNPROVEN not in lines(text, "dflash ")[0]
    assert "speed-up not proven lossless for dspark" in text
    if equal is None:
        rows = [row("dspark", greedy_equal=None)]
    assert why in report.text(rows)
    if equal and equal["differ"]:
        assert (
            "dspark differs on prompt p7 from new token 5 on (the target's two best logits there: 2e-07 apart)" in text
        )


def test_what_was_not_measured_is_a_dash():
    nothing = {k: None for k in row() if k.endswith("_per_round") or k.startswith(("tau", "speedup", "distinct"))}
    text = report.text([row(**(nothing | {"tau_differences": {"dflash": None}}))])
    assert "None" not in text and "nan" not in text
    assert lines(text, "dspark ")[0] == ["dspark", "0", "-", ".90", ".84", "-", "421.0", "-", "-", "-", "-"]


def test_markdown_holds_the_same_cells_and_notes():
    rows = both() + [{**r, "task": "other|task"} for r in both()]
    page = report.markdown(rows, ["acceptance.png"])
    for section in report.sections(rows):
        for cells in section.cells:
            assert "| " + " | ".join(cells) + " |" in page
        for note in section.notes:
            assert f"- {note}" in page
    assert page.count("## ") == 2 and "## other\\|task" in page
    assert "](acceptance.png)" in page and SETTINGS["command"] in page
    tables = [line for line in page.splitlines() if line.startswith("|")]
    assert {line.count(" | ") for line in tables} == {len(report.HEADER) - 1}


def test_reporting_changes_nothing():
    rows = both()
    before = copy.deepcopy(rows)
    report.text(rows), report.markdown(rows)
    assert rows == before


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "acceptance.png"
    assert plots.acceptance_by_slot(both() + [{**r, "task": "other"} for r in both()], path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["acceptance.png"]


def test_without_matplotlib_there_is_no_picture_and_no_error(tmp_path, monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert not plots.acceptance_by_slot(both(), tmp_path / "acceptance.png")
    assert not list(tmp_path.iterdir())
    assert "pip install deepspec[plot]" in plots.MISSING and "\n" not in plots.MISSING
