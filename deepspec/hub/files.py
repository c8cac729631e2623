"""Where a drafter's files are, and what is in them: config.json and safetensors, whoever wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from ..checked import InputError

PREFIXES = ("_orig_mod.", "module.", "model.")
"""What wrappers put before the names of tensors."""


def find_drafter(path: str | Path) -> Path:
    """The directory with config.json: the path itself, its `drafter/` (a run directory), or a hub snapshot."""
    local = Path(path).expanduser()
    for folder in (local, local / "drafter"):
        if (folder / "config.json").is_file():
            return folder
    name = str(path)
    if local.exists() or local.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise InputError(f"no drafter in {name!r}: a drafter directory holds config.json and model.safetensors")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["config.json", "*.safetensors*"]))
    except Exception as error:
        raise InputError(
            f"drafter {name!r} is neither a directory nor a hub repository that can be read: "
            f"{str(error).splitlines()[0]}"
        ) from None


def read_config(folder: Path) -> dict[str, Any]:
    try:
        raw = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:  # not UTF-8, not JSON
        raise InputError(f"{folder / 'config.json'} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{folder / 'config.json'} must hold an object")
    return raw


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a drafter's safetensors files, prefixes of wrappers removed."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError(f"{folder} has no model.safetensors")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file} is truncated or damaged: {error}") from None
    return {_strip(name): value for name, value in tensors.items()}


def _strip(name: str) -> str:
    while name.startswith(PREFIXES):  # wrappers wrap each other in any order
        name = name.split(".", 1)[1]
    return name
