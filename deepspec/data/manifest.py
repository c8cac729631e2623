"""The manifest beside a file of answers: what decided what is in it, and what does not fit when it is used."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ..checked import InputError
from .prompts import parse_line


def manifest_path(path: str | Path) -> Path:
    """Where the manifest of a data file stands."""
    return Path(f"{path}.manifest.json")


def read_manifest(path: str | Path) -> dict[str, Any] | None:
    """The manifest beside a data file, None without one; InputError where it is damaged."""
    place = manifest_path(path)
    if not place.is_file():
        return None
    manifest = parse_line(place.read_bytes(), str(place))
    if not isinstance(manifest.get("settings"), dict):
        raise InputError(f"{place}: not a manifest, it has no settings")
    return manifest


def template_hash(tokenizer: Any) -> str | None:
    """SHA-256 of the chat template, None without one."""
    template = None if tokenizer is None else tokenizer.chat_template
    return hashlib.sha256(json.dumps(template).encode()).hexdigest() if template else None
