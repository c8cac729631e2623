"""Prompts that the target writes itself, for those who have none.

After the tokens that open a user's turn, a chat model goes on with what it thinks a user would ask. Sampled many times
over, that is a set of prompts of the kind it was trained on (Magpie: Xu et al., arXiv 2406.08464).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cache import whole_file
from ..checked import InputError, require
from ..sampling import Sampling
from .answers import regenerate
from .chat import needs_template
from .manifest import read_manifest
from .prompts import Prompt, read_records
from .records import record_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

_TEXT = "@@@@"
"""Stands for what a user says; no template holds it."""


def opening(tokenizer: Tokenizer | None, stop_ids: Collection[int]) -> list[int]:
    """Token ids of the chat template up to where a user's first words stand.

    InputError where there is no template, where it shows the words other than as they are, and where it ends a user's
    turn with a token that is not in `stop_ids`, so that the target would write on into its own answer.
    """
    tokenizer = needs_template(tokenizer)
    text = str(tokenizer.apply_chat_template([{"role": "user", "content": _TEXT}], tokenize=False))
    before, found, after = text.partition(_TEXT)
    ids = [list(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in (before, after)]
    if not found or not ids[0] or not ids[1]:
        raise InputError("the chat template does not put a user's words between tokens of its own")
    if ids[1][0] not in stop_ids:
        end = tokenizer.decode(ids[1][:1])
        raise InputError(f"the chat template ends a user's turn with {end!r}, which is no stop token of the target")
    return ids[0]


def write_prompts(
    target: Any,
    number: int,
    out: Path,
    *,
    max_new_tokens: int = 256,
    sampling: Sampling | None = None,
    seed: int = 0,
    concurrency: int = 32,
) -> Counter[str]:
    """Let `target` write `number` user turns to `out`, one {"id", "task", "turns"} a line, each text once.

    Their tokens are kept beside it (X.jsonl: X.tokens.jsonl), where a killed or a larger run goes on. Turns without an
    end within `max_new_tokens`, empty and repeated ones are left out; returns how many, by reason. InputError as
    `opening` and `regenerate`, and where `out` is a file that this did not make.
    """
    require(number >= 1, f"the number of prompts must be >= 1, got {number}")
    tokens = out.with_name(f"{out.stem}.tokens{out.suffix}")
    if out.exists() and read_manifest(tokens) is None:
        raise InputError(f"{out} exists and was not made by this command; use another --out")
    ids = opening(target.tokenizer, target.stop_ids)
    todo = [Prompt(f"magpie-{seed}-{i}", "magpie", ids, {}) for i in range(number)]
    regenerate(
        target,
        todo,
        tokens,
        max_new_tokens=max_new_tokens,
        sampling=sampling or Sampling(temperature=1.0),
        seed=seed,
        concurrency=concurrency,
    )
    dropped: Counter[str] = Counter()
    seen: set[str] = set()
    with whole_file(out) as file:
        for _, row in sorted(read_records(tokens), key=lambda found: int(found[1]["id"].split("-")[-1])):
            text = target.tokenizer.decode(row["answer_ids"], skip_special_tokens=True).strip()
            if row["finish"] != "stop" or not text or text in seen:
                dropped["no end" if row["finish"] != "stop" else "repeated" if text else "empty"] += 1
                continue
            seen.add(text)
            record = {"id": record_id({}, [text]), "task": "magpie", "turns": [text]}
            file.write(json.dumps(record) + "\n")
    return dropped
