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
    """A line for each drafter (name -> directory) and file of answers that it was trained on, where the target is used
    otherwise now: `used` is target, target_revision, dtype (or "auto"), thinking. None for a drafter that does not say
    what it was trained on."""
    thinking = used["thinking"]
    used = {**used, "dtype": None if used["dtype"] == "auto" else used["dtype"]}
    used |= {"chat_template_sha256": template_hash(tokenizer)}
    for name, path in drafters.items():
        section = read_config(find_drafter(path)).get("deepspec")
        data = section.get("data") if isinstance(section, dict) else None
        for file, manifest in (data.get("manifests") or {}).items() if isinstance(data, dict) else ():
            settings = manifest.get("settings", {}) if isinstance(manifest, dict) else {}
            same = _same_prompts(tokenizer, settings.get("thinking"), thinking)
            if found := differences(settings, {**used, "thinking": None if same else thinking}):
                yield f"drafter {name} was trained on answers made otherwise ({file}): {found}"


def _same_prompts(tokenizer: Any, before: Thinking | None, now: Thinking) -> bool:
    """Whether the template makes the same prompt of either thinking mode: many know no such switch."""
    question = [{"role": "user", "content": "a"}]
    try:
        return before is None or render_prompt(tokenizer, question, before) == render_prompt(tokenizer, question, now)
    except (Skip, InputError):  # no template
        return True
