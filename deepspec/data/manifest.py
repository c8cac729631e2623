"""The manifest beside a file of answers: what decided what is in it, and what does not fit when it is used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
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


def doubts(paths: Iterable[str | Path], now: Mapping[str, Any]) -> Iterator[str]:
    """A line for every file whose answers were made otherwise than they are used `now` (see `differences`), or of which
    nobody says how they were made."""
    for path in paths:
        manifest = read_manifest(path)
        if manifest is None:
            yield f"{path} has no manifest: nothing says that the target itself wrote these answers"
        elif found := differences(manifest["settings"], now):
            yield f"the answers of {path} were made otherwise: {found}"


def differences(settings: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """'thinking was "on" and is "off"; ...' of what decides how a target answers: target, target_revision, dtype,
    thinking, chat_template_sha256. What either side does not know (None) does not count."""
    found = []
    for key in ("target", "target_revision", "dtype", "thinking", "chat_template_sha256"):
        before, after = settings.get(key), now.get(key)
        if before is None or after is None or before == after:
            continue
        if key == "chat_template_sha256":
            found.append("the chat template was another")
        else:
            found.append(f"{key} was {json.dumps(before)} and is {json.dumps(after)}")
    return "; ".join(found)
