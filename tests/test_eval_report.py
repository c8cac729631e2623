"""Tables, Markdown and pictures hold what the rows hold, and say when a speed-up is not proven lossless."""

import base64
import copy
import csv
import html.parser
import re
import shutil
import struct
import subprocess
from typing import Any

import pytest

from deepspec.eval import page, pictures, plots, report
from deepspec.eval.benchmarks import published
from deepspec.eval.output import table, write

SETTINGS = {
    "target": {"name": "some/target", "revision": "0123456789abcdef"},
    "dtype": "bfloat16",
    "device": "cpu",
    "threads": 2,
    "max_new_tokens": 64,
    "concurrency": 1,
    "processes": 1,
    "schedule": ["verify_all"],
    "verify": ["token"],
    "draft": ["sample"],
    "thinking": "auto",
    "warnings": [],
    "turns": "first",
    "seed": 0,
    "command": "python -m deepspec.eval --drafter x",
}


def row(drafter: str = "dspark", temperature: float = 0.0, **changes: Any) -> dict[str, Any]:
    return {
        "task": "held-out",
        "domain": "held-out",
        "samples": 64,
        "dropped": {},
        "later_turns": 0,
        "first_prompt": "<|user|>\nHow?\n",
        "paper_tau": None,
        "schedule": "verify_all",
        "verify": "token",
        "draft": "sample",
        "drafter": drafter,
        "temperature": temperature,
        "tau": 4.59,
        "tau_interval": (4.4, 4.8),
        "tau_differences": {},
        "accept_rates_conditional": [0.9, 0.845, None],
        "accept_rates_prefix": [0.9, 0.76, None],
        "accept_counts": {"reached": [1000, 900, 0], "accepted": [900, 760, 0]},
        "verified_per_round": 6.5,
        "accepted_per_round": 3.5,
        "wasted_per_round": 3.0,
        "rounds": 1000,
        "tokens": 4000,
        "decomposition": 2.953,
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
    cells = [
        "dspark",
        "0",
        "4.59",
        "[4.40,",
        "4.80]",
        ".90",
        ".84",
        "-",
        "6.50",
        "3.00",
        "421.0",
        "2.00",
        "[1.90,",
        "2.10]",
    ]
    assert lines(text, "dspark ")[0] == [*cells, "2.95", "1.23", "5.67", "4.44"]
    assert lines(text, "baseline ")[0] == ["baseline", "0", "1", "-", "0", "0", "210.0", "1", "1", "-", "-", "4.44"]
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
            {
                "equal": 63,
                "total": 64,
                "dtype": "float32",
                "differ": [{"id": "p7", "turn": 0, "index": 5, "margin": 2e-7}],
            },
            "did not pass",
        ),
        ({"equal": 0, "total": 0, "dtype": "float32", "differ": []}, "did not pass"),
        (None, "was not run"),
    ],
)
def test_an_unproven_speedup_is_marked(equal, why):
    rows = [row("dflash"), row("dspark", greedy_equal=equal)]
    text = report.text(rows)
    assert lines(text, "dspark ")[0][14] == report.UNPROVEN
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
    nothing = {
        k: None for k in row() if k.endswith("_per_round") or k.startswith(("tau", "speedup", "distinct", "decomp"))
    }
    text = report.text([row(**(nothing | {"tau_differences": {"dflash": None}}))])
    assert "None" not in text and "nan" not in text
    assert lines(text, "dspark ")[0] == ["dspark", "0", "-", ".90", ".84", *"---", "421.0", *"-----"]


def test_markdown_holds_the_same_cells_and_notes():
    rows = both() + [{**r, "task": "other|task"} for r in both()]
    page = report.markdown(rows, {"acceptance.png": "by slot"})
    for section in report.sections(rows):
        for cells in section.cells:
            assert "| " + " | ".join(cells) + " |" in page
        for note in section.notes:
            assert f"- {note}" in page
    assert page.count("## ") == 2 and "## other\\|task" in page
    assert "![by slot](acceptance.png)" in page and SETTINGS["command"] in page
    assert "````\n<|user|>\nHow?\n\n````" in page, "the prompt is shown as it is"
    tables = [line for line in page.splitlines() if line.startswith("| ")]
    assert {line.count(" | ") for line in tables} == {len(report.HEADER) - 1, 3}


def test_reporting_changes_nothing():
    rows = both()
    before = copy.deepcopy(rows)
    report.text(rows), report.markdown(rows), page.html(rows, {}), table(rows), [draw(rows) for _, draw in DRAWN]
    assert rows == before


@pytest.mark.parametrize(
    "target, task, tau",
    [
        ("Qwen/Qwen3-4B", "gsm8k", 6.11),
        ("/models/qwen3-8b/", "arena-hard-v2", 3.21),
        ("~/hub/models--Qwen--Qwen3-14B/snapshots/0a1b", "mbpp", 5.26),
        ("google/gemma-4-12B-it", "aime25", 5.12),
        ("Qwen/Qwen3-4B", "held-out", None),
        ("Qwen/Qwen3-4B-Base", "gsm8k", None),
        ("someone/Qwen3-4B-tuned", "gsm8k", None),
    ],
)
def test_the_papers_row_stands_beside_ours_where_target_and_task_are_the_same(target, task, tau):
    found = published(target, task)
    assert (found and found["DSpark"]) == tau
    rows = [row(d, task=task, paper_tau=found, paper_samples=500) for d in ("dflash", "dspark")]
    paper = [line[:4] for line in lines(report.text(rows), "DSpark (paper)")]
    assert paper == ([] if tau is None else [["DSpark", "(paper)", "1", f"{tau:.2f}"]])
    assert ("2048 new tokens, first turn, thinking off, 500 prompts" in report.text(rows)) == (tau is not None)


def test_what_a_section_says_of_its_run():
    """Title, settings and notes name every figure in its place; each temperature has its own baseline and text."""
    many = {"concurrency": 8, "processes": 2, "seed": 5, "thinking": "off", "schedule": ["verify_all", "lagged"]}
    timed = {"equal": 61, "total": 64, "dtype": "bfloat16"}
    differ = [{"id": f"p{i}", "turn": i % 2, "index": i, "margin": 0.5} for i in range(4)]
    checked = {"equal": 60, "total": 64, "dtype": "float32", "differ": differ}
    same = dict(settings={**SETTINGS, **many, "turns": "all", "warnings": ["one", "two"]}, later_turns=3)
    cold = row(
        samples=50, greedy_equal=checked, timed_greedy_equal=timed, dropped={"no user turn": 7, "twice": 1}, **same
    )
    hot = row(temperature=1.0, baseline_tokens_per_second=99.5, target_seconds_per_round=0.5, distinct_4gram=0.75)
    hot |= {"repetition_rate": 0.25, "greedy_equal": checked}
    (section,) = report.sections([cold, hot])
    assert section.title == "held-out: 50 prompts, up to 64 new tokens"
    assert section.settings == (
        "target some/target@0123456789ab, bfloat16 on cpu, 2 threads x 2 processes, concurrency 8, "
        "verify_all and lagged, token, sample, thinking off, seed 5"
    )
    assert [c[6:] for c in section.cells[::2]] == [
        ("210.0", "1", "1", "-", "-", "4.44"),
        ("99.5", "1", "1", "-", "-", "500.00"),
    ]
    apart = "on (the target's two best logits there: 0.5 apart)"
    assert section.notes == [
        "left out: 7 no user turn, 1 twice",
        "3 later turns of the prompts: asked after the model's own answers",
        "one",
        "two",
        "greedy float32 output equal to the baseline's: dspark 60/64",
        "in the timed bfloat16, where rounding may break a tie either way: dspark 61/64",
        f"dspark differs on prompt p0 from new token 0 {apart}",
        f"dspark differs on prompt p1 from new token 1 of turn 2 {apart}",
        f"dspark differs on prompt p2 from new token 2 {apart}",
        "? speed-up not proven lossless for dspark: the check above did not pass",
        "T=0: the baseline's text has 0.51 distinct 4-grams; 3% of its continuations end in a loop",
        "T=1: the baseline's text has 0.75 distinct 4-grams; 25% of its continuations end in a loop",
    ]
    assert "x 1 processes" not in report.text([row()]) and "rounding may break" not in report.text([row()])
    exact = row(timed_greedy_equal={**timed, "dtype": "float32"})
    assert "rounding may break" not in report.text([exact])


@pytest.mark.parametrize(
    "difference, interval, said",
    [
        (0.5, (0.1, 0.9), "+0.50 [+0.10, +0.90]: b is above a beyond"),
        (-0.5, (-0.9, -0.1), "-0.50 [-0.90, -0.10]: b is below a beyond"),
        (0.1, (-0.1, 0.3), "+0.10 [-0.10, +0.30]: no difference beyond"),
        (0.0, (0.0, 0.0), "+0.00 [+0.00, +0.00]: no difference beyond"),
        (0.5, None, "+0.50 (too few prompts for an interval)"),
    ],
)
def test_a_difference_is_called_what_it_is(difference, interval, said):
    d = {"difference": difference, "interval": interval}
    rows = [row("a", tau_differences={"b": d}), row("b", tau_differences={"a": d})]
    assert f"T=0: tau of b - tau of a = {said}" in report.text(rows)


def test_tasks_side_by_side():
    cells = (("gsm8k", "a", 1.0), ("gsm8k", "b", 2.0), ("mine", "a", None), ("mine", "b", 4.0))
    rows = [row(d, task=t, tau=x, paper_tau=published("Qwen/Qwen3-4B", t), paper_samples=1) for t, d, x in cells]
    assert report.summary(rows) == [
        ("tau", "T", "gsm8k", "mine"),
        ("a", "0", "1.00", "-"),
        ("b", "0", "2.00", "4.00"),
        ("Eagle3 (paper)", "1", "5.14", "-"),
        ("DFlash (paper)", "1", "5.40", "-"),
        ("DSpark (paper)", "1", "6.11", "-"),
    ]
    assert report.summary(rows[:2]) == []
    rows = [{**r, "temperature": t, "tau": 1 + t} for t in (0.0, 1.0) for r in rows[::-1]]  # the paper's row is last
    assert report.summary(rows)[:5] == [
        ("tau", "T", "mine", "gsm8k"),
        *[(name, t, *(tau,) * 2) for t, tau in (("0", "1.00"), ("1", "2.00")) for name in "ba"],
    ]
    assert report.summary(rows)[-1] == ("DSpark (paper)", "1", "-", "6.11")
    overview = "| " + " | ".join(report.summary(rows)[1]) + " |"
    assert overview in report.markdown(rows) and "a &lt;b" in report.markdown([row(task="a <b")])


def test_what_makes_runs_incomparable_is_said():
    told = [row(later_turns=80, settings={**SETTINGS, "warnings": ["dspark was trained otherwise"]})]
    text = report.text(told)
    assert "80 later turns of the prompts: not asked (--turns all asks them)" in text
    assert "\ndspark was trained otherwise\n" in text
    assert "trained" not in report.text([row()]) and "turns" not in report.text([row()])


def test_csv_has_a_line_a_row_with_every_slot():
    rows = [*both(), row("wide", accept_rates_conditional=[0.5] * 4, accept_rates_prefix=[0.25] * 4, greedy_equal=None)]
    read = list(csv.DictReader(table(rows).splitlines()))
    assert [(r["drafter"], float(r["temperature"])) for r in read] == [(r["drafter"], r["temperature"]) for r in rows]
    assert read[2]["tau_low"] == "4.4" and read[2]["speedup_high"] == "2.1" and read[2]["conditional_2"] == ""
    assert read[4]["conditional_3"] == "0.5" and read[4]["prefix_3"] == "0.25" and read[0]["conditional_3"] == ""
    assert [r["lossless"] for r in read] == ["passed"] * 4 + ["not run"]


DRAWN = tuple(pictures.PICTURES.values())


class Reader(html.parser.HTMLParser):
    """Collects what a page shows and what it would fetch."""

    def __init__(self):
        super().__init__()
        self.open, self.cells, self.fetched, self.images = [], [], [], []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.fetched += [v for k, v in found.items() if k in ("src", "href") and not v.startswith("data:")]
        if tag == "img":
            self.images.append(found)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "td":
            self.cells.append(data)


def test_the_page_holds_the_same_cells_and_needs_nothing_beside_it():
    rows = [*both(), row("a <b> & c")] + [{**r, "task": "<other> & task"} for r in both()]
    reader = Reader()
    text = page.html(rows, {"by slot": b"\x89PNG1", "by task": b"\x89PNG2"})
    reader.feed(text)
    assert text.count("<li>") == sum(len(section.notes) for section in report.sections(rows)) > 4
    for shown in (report.LEGEND, SETTINGS["command"], report.sections(rows)[1].settings, "How?"):
        assert f">{html.escape(shown)}" in text or f"\n{html.escape(shown)}" in text
    assert base64.b64decode(reader.images[1]["src"].partition(",")[2]) == b"\x89PNG2"
    assert not reader.open and not reader.fetched and "<script" not in text
    expected = [c for line in report.summary(rows)[1:] for c in line]
    expected += [c for section in report.sections(rows) for line in section.cells for c in line]
    assert reader.cells == expected
    assert [i["alt"] for i in reader.images] == ["by slot", "by task"]
    assert "&lt;|user|&gt;" in text and "&lt;other&gt; &amp; task" in text


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PROBE = """<script>addEventListener("load", () => {
  document.body.dataset.drawn = [...document.images].map(i => `${i.naturalWidth}x${i.naturalHeight}`).join(" ");
});</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_a_browser_draws_every_picture_of_the_page(tmp_path):
    """What `eval` writes is opened as it is, but for a script that tells how large the decoded pictures are."""
    pytest.importorskip("matplotlib")
    write(tmp_path, TWO_TASKS, [])
    text = (tmp_path / "results.html").read_text()
    (tmp_path / "probed.html").write_text(text.replace("</body>", PROBE + "</body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile", "--dump-dom"]
    page_url = (tmp_path / "probed.html").as_uri()
    dom = subprocess.run([BROWSER, *flags, page_url], capture_output=True, text=True, timeout=120, check=True).stdout
    drawn = re.search(r'data-drawn="([^"]*)"', dom)[1].split()
    sizes = [
        struct.unpack(">II", p.read_bytes()[16:24]) for p in map(tmp_path.joinpath, pictures.PICTURES) if p.exists()
    ]
    assert len(sizes) == 4 and drawn == [f"{w}x{h}" for w, h in sizes]


SWEEP = [row(f"dspark threshold:{x}", t, schedule=f"threshold:{x}") for x in (0, 0.5, 0.9) for t in (0.0, 1.0)]
TWO_TASKS = [{**r, "task": task, "domain": "math"} for task in ("gsm8k", "math500") for r in both()]


@pytest.mark.parametrize(
    "rows, names",
    [
        (both(), {"tau.png", "acceptance.png", "time.png"}),
        (TWO_TASKS, {"tau.png", "acceptance.png", "domains.png", "time.png"}),
        ([{**r, "task": t, "domain": t} for t in "ab" for r in both()], {"tau.png", "acceptance.png", "time.png"}),
        (SWEEP, {"tau.png", "acceptance.png", "time.png", "thresholds.png"}),
        ([row(tau=None, tau_interval=None, decomposition=None)], {"tau.png", "acceptance.png"}),
    ],
    ids=["one task", "two of a domain", "two domains", "sweep", "nothing measured"],
)
def test_pictures_are_drawn_for_what_the_rows_hold(rows, names, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "thresholds.png").write_bytes(b"of an earlier run")
    drawn = pictures.draw_all(rows, tmp_path)
    assert set(drawn) == names == {p.name for p in tmp_path.iterdir()}
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_pictures_show_the_numbers():
    """Heights and points of the marks are those of the rows, in the right panel and place."""
    pytest.importorskip("matplotlib")
    rows = [
        row(f"d {s}", schedule=s, accepted_per_round=a, wasted_per_round=w, rounds=n, task=t)
        for s, a, w, n, t in (
            ("threshold:0.9", 1.0, 0.0, 100, "s"),
            ("threshold:0", 3.0, 4.0, 100, "s"),
            ("threshold:0", 1.0, 2.0, 300, "t"),
        )
    ]
    panel, line = pictures.threshold_sweep([{**r, "domain": "math"} for r in rows]).axes
    accepted, rejected = ([bar.get_height() for bar in bars] for bars in panel.containers)
    assert accepted == [1.5, 1.0] and rejected == [2.5, 0.0]  # a mean over rounds: 300 of the second task count thrice
    assert [label.get_text() for label in panel.get_xticklabels()] == ["0", "0.9"]
    assert list(line.lines[0].get_ydata()) == [1.5 / 4, 1.0]

    counts = [{"reached": [10, 5, 0], "accepted": [5, 5, 0]}, {"reached": [30, 10, 0], "accepted": [10, 0, 0]}]
    pair = [row(task=t, domain="math", accept_counts=c) for t, c in zip("ab", counts)]
    (panel,) = pictures.acceptance_by_domain(pair).axes
    assert list(panel.lines[0].get_ydata())[:2] == [15 / 40, 5 / 15]

    panel, cold = pictures.time_by_part([row(), row(temperature=1.0, tau=2.0)]).axes
    baseline, verify, draft = (list(bars) for bars in panel.containers)
    assert baseline[0].get_width() == pytest.approx(4.44)
    assert verify[0].get_width() == pytest.approx(5.67 / 4.59) == draft[0].get_x()
    assert draft[0].get_width() == pytest.approx(1.23 / 4.59)
    assert cold.containers[1][0].get_width() == pytest.approx(5.67 / 2)

    (panel,) = pictures.tau_by_task([row("a", tau=1.5, tau_interval=(1.25, 1.75)), row("b", tau=2.5)]).axes
    assert [bars[0].get_height() for bars in panel.containers] == [1.5, 2.5]
    assert panel.collections[0].get_segments()[0][:, 1].tolist() == [1.25, 1.75]
    left = panel.containers[0][0]
    assert left.get_x() < panel.collections[0].get_segments()[0][0, 0] < left.get_x() + left.get_width()


def test_without_matplotlib_there_is_no_picture_and_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "available", lambda: False)
    assert pictures.draw_all(both(), tmp_path) == {}
    assert not list(tmp_path.iterdir())
    assert "pip install deepspec[plot]" in plots.MISSING and "\n" not in plots.MISSING
