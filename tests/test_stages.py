"""The stages of the long scripts (scripts/venv.sh): commands at once, failures, an interruption."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

VENV = Path(__file__).parents[1] / "scripts" / "venv.sh"
JOB = """
job() { # job NAME STATUS: leaves when every job is there
    echo "job $1"
    touch "here-$1"
    for _ in $(seq 200); do [ -e here-a ] && [ -e here-b ] && [ -e here-c ] && return "$2"; sleep 0.05; done
    return 99
}
"""
# as deepspec.train does: told to stop, it saves and ends well
SAVES = """import pathlib, signal, sys, time
told = []
signal.signal(signal.SIGINT, lambda *_: told.append(1))
pathlib.Path(sys.argv[1] + ".ready").touch()
while not told: time.sleep(0.01)
time.sleep(float(sys.argv[2]))
pathlib.Path(sys.argv[1] + ".saved").touch()
"""


def script(folder: Path, text: str) -> list[str]:
    path = folder / "script.sh"
    path.write_text(f"set -euo pipefail\nsource {VENV}\n{JOB}\n{text}\necho went on\ntime_spent\n")
    return ["bash", str(path)]


@pytest.mark.parametrize("statuses", [(0, 0, 0), (0, 0, 7), (7, 0, 0), (0, 7, 0)])
def test_all_run_at_once_and_one_that_fails_fails_the_stage(tmp_path: Path, statuses: tuple[int, ...]) -> None:
    a, b, c = statuses
    text = f"stage jobs at_once logs a job a {a} ++ b job b {b} ++ c job c {c}"
    done = subprocess.run(script(tmp_path, text), cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == max(statuses), done
    assert ("went on" in done.stdout) == (max(statuses) == 0)
    assert "job c" in done.stdout and (tmp_path / "logs/a.log").read_text() == "job a\n"
    assert [name for name in "ab" if f"error: {name} failed:\njob {name}" in done.stderr] == [
        name for name, status in zip("ab", statuses) if status
    ]


def test_an_interruption_lets_all_save_and_ends_the_script(tmp_path: Path) -> None:
    (tmp_path / "saves.py").write_text(SAVES)
    job = f"{sys.executable} saves.py"
    running = subprocess.Popen(
        script(tmp_path, f"stage jobs at_once logs a {job} a 1 ++ b {job} b 0.1"), cwd=tmp_path, start_new_session=True,
        stdout=subprocess.PIPE, text=True,
        # a shell that was started with the signal ignored, as in the background of another, cannot trap it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    until = time.monotonic() + 30
    while not all((tmp_path / f"{name}.ready").exists() for name in "ab"):
        assert time.monotonic() < until and running.poll() is None
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGINT)
    told, _ = running.communicate(timeout=30)
    assert running.returncode == 130
    assert "went on" not in told
    assert all((tmp_path / f"{name}.saved").exists() for name in "ab")
