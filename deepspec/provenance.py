"""Where a file came from: the versions and the commit that made it."""

import contextlib
import functools
import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

from . import __version__


def provenance() -> dict[str, Any]:
    """Versions, and the git commit where this package runs from its checkout. Imports nothing heavy."""
    found: dict[str, Any] = {"deepspec": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return {**found, "git_sha": git_sha()}


@functools.cache
def git_sha() -> str | None:
    """The commit, with '-dirty' where tracked files differ; None outside a checkout of this project. Asked once: what
    runs is what was there at the start."""
    root = Path(__file__).resolve().parents[1]

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if Path(git("rev-parse", "--show-toplevel")) == root:  # an installed copy may lie inside another repository
            return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    return None
