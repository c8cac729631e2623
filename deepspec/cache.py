"""Where things that can be made again are kept, and how a file or folder is written whole or not at all."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from .checked import InputError


def cache_dir(*parts: str) -> Path:
    """A path under $DEEPSPEC_CACHE, or the user's cache directory. Pure: creates nothing."""
    root = os.environ.get("DEEPSPEC_CACHE")
    if root:
        return Path(root, *parts)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "deepspec", *parts)


def writable_dir(path: Path, what: str) -> Path:
    """Create `path` and prove that a file can be written there; InputError names `what` otherwise."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".writable-"):
            pass
    except OSError as error:
        raise InputError(f"{what} {str(path)!r} cannot be written: {error.strerror or error}") from None
    return path


@contextlib.contextmanager
def tentative(path: Path) -> Iterator[None]:
    """Directories that were made on the way to `path` vanish again on failure, where nothing was put into them."""
    made = [p for p in (path, *path.parents) if not p.exists()]
    try:
        yield
    except BaseException:
        for p in made:
            with contextlib.suppress(OSError):
                p.rmdir()
        raise


@contextlib.contextmanager
def whole_dir(path: Path) -> Iterator[Path]:
    """A temporary sibling directory that becomes `path` on success and vanishes on failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
    temporary.chmod(0o777 & ~_umask())
    try:
        yield temporary
        if path.exists():  # a directory cannot be renamed over a non-empty one
            old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-old-"))
            path.rename(old / "old")
            temporary.rename(path)
            shutil.rmtree(old)
        else:
            temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a whole file or nothing."""
    with whole_file(path) as file:
        file.write(text)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[str]]:
    """A temporary sibling file that becomes `path` on success and vanishes on failure."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            yield file
        Path(temporary).chmod(0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
