"""Where a drafter is measured on a target that answers otherwise than the one whose answers it was trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..checked import InputError
from ..data.chat import Thinking, render_prompt
from ..data.manifest import differences, template_hash
from ..data.records import Skip
from ..hub.files import find_drafter, read_config


def doubts(drafters: Mapping[str, str], tokenizer: Any, used: Mapping[str, Any]) -> Iterator[str]:
    """A line for each way in which the target is used otherwise now than where it wrote the answers that drafters (name
    -> directory) were trained on: `used` is target, target_revision, dtype (or "auto"), thinking. None for a drafter
    that does not say what it was trained on."""
    thinking = used["thinking"]
    used = {**used, "dtype": None if used["dtype"] == "auto" else used["dtype"]}
    used |= {"chat_template_sha256": template_hash(tokenizer)}
    whose: dict[str, tuple[list[str], list[str]]] = {}
    for name, path in drafters.items():
        section = read_config(find_drafter(path)).get("deepspec")
        data = section.get("data") if isinstance(section, dict) else None
        for file, manifest in (data.get("manifests") or {}).items() if isinstance(data, dict) else ():
            settings = manifest.get("settings", {}) if isinstance(manifest, dict) else {}
            same = _same_prompts(tokenizer, settings.get("thinking"), thinking)
            if found := differences(settings, {**used, "thinking": None if same else thinking}):
                names, files = whose.setdefault(found, ([], []))
                names += [name] * (name not in names)
                files += [file] * (file not in files)
    for found, (names, files) in whose.items():
        who = f"drafter{'s' * (len(names) > 1)} {', '.join(names)} {'were' if len(names) > 1 else 'was'}"
        yield f"{who} trained on answers made otherwise ({', '.join(files)}): {found}"


def _same_prompts(tokenizer: Any, before: Thinking | None, now: Thinking) -> bool:
    """Whether the template makes the same prompt of either thinking mode: many know no such switch."""
    question = [{"role": "user", "content": "a"}]
    try:
        return before is None or render_prompt(tokenizer, question, before) == render_prompt(tokenizer, question, now)
    except (Skip, InputError):  # no template
        return True
