"""Laws of a run's report: pictures of whatever was logged, and one line where nothing was."""

import json

import pytest

from deepspec import InputError
from deepspec.train import curves
from deepspec.train.__main__ import command


def write(folder, rows):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


ROWS = [
    {"step": s, "loss": 2 / s, "ce": 1.0, "accept@0": 0.5, "accept@1": 0.4, "tau": 1.5, "grad_norm": 1.0,
     "tokens_per_second": 9.0}
    | ({"val_tau": 1.4, "val_tau_interval": [1.2, 1.6], "val_accept@0": 0.4, "warnings": ["x"]} if s == 3 else {})
    for s in range(1, 6)
]  # fmt: skip


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], [{"step": 1, "loss": 1.0}]], ids=["all", "one", "little"])
def test_curves_are_a_picture(rows, tmp_path):
    """A PNG, whole, and nothing else is written; drawn again it is replaced."""
    out = write(tmp_path / "run", rows)
    for _ in range(2):
        path = curves.draw(out)
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000
    assert sorted(p.name for p in out.iterdir()) == ["curves.png", "metrics.jsonl"]


def test_series_are_the_rows_that_have_the_key():
    assert curves.series(ROWS, "val_tau") == ([3], [1.4]) and curves.series(ROWS, "nothing") == ([], [])
    assert curves.series(ROWS, "loss") == ([1, 2, 3, 4, 5], [2.0, 1.0, 2 / 3, 0.5, 0.4])


def test_the_command_draws(tmp_path, monkeypatch, capsys):
    """`--report DIR` needs no config and says where the picture is."""
    out = write(tmp_path / "run", ROWS)
    monkeypatch.setattr("sys.argv", ["train", "--report", str(out)])
    assert command() == 0 and str(out / "curves.png") in capsys.readouterr().out


def test_nothing_to_draw_is_one_line(tmp_path):
    """No run, an empty log, a torn line: InputError that names it."""
    with pytest.raises(InputError, match=r"no metrics\.jsonl"):
        curves.draw(tmp_path)
    with pytest.raises(InputError, match="has not logged"):
        curves.draw(write(tmp_path / "empty", []))
    out = write(tmp_path / "torn", ROWS)
    (out / "metrics.jsonl").write_text('{"step": 1}\n{"ste')
    with pytest.raises(InputError, match="line 2"):
        curves.draw(out)
