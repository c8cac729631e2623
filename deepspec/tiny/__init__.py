"""The embedded default target, "deepspec/tiny": a small Qwen3-architecture language model, trained and not downloaded.

It learns from text that every Python installation carries (the language reference in `pydoc_data` and the sources of
the standard library), takes two to three minutes on two cores, once, and is kept in the cache directory together with
a tokenizer, prompts to train drafters on, held-out prompts to evaluate them on, and `tiny.json`: how it was made.

    python -m deepspec.tiny
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..cache import whole_dir, writable_dir, write_text
from ..eval.stats import distinct_rate
from ..provenance import provenance
from . import training
from .recipe import (
    ASSISTANT_ID,
    CHAT_TEMPLATE,
    END_ID,
    ENDOFTEXT_ID,
    MASK_ID,
    NAME,
    PAD_ID,
    RECIPE,
    SPECIAL_TOKENS,
    USER_ID,
    Recipe,
    target_dir,
)  # fmt: skip
from .text import encode, prompts, read_corpus, train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "ASSISTANT_ID", "CHAT_TEMPLATE", "ENDOFTEXT_ID", "END_ID", "MASK_ID", "NAME", "PAD_ID", "RECIPE", "SPECIAL_TOKENS",
    "USER_ID", "Recipe", "ensure", "read_corpus", "target_dir",
]  # fmt: skip


def ensure(progress: bool = True, recipe: Recipe = RECIPE) -> Path:
    """The target's directory, built first where it is missing (minutes; an interrupted build goes on where it was).

    A second process that asks meanwhile waits. InputError where the cache directory cannot be written.
    """
    path = target_dir(recipe)
    if not (path / "tiny.json").is_file():
        writable_dir(path.parent, "the cache directory")
        with _lock(path.with_name(f".{path.name}.lock")):
            if not (path / "tiny.json").is_file():
                _build(path, recipe, progress)
    return path


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Only one process builds; the others wait here. The file stays: removing it would let two of them in."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that is building {NAME}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(path: Path, recipe: Recipe, progress: bool) -> None:
    if progress:
        print(f"Training {NAME} once, two to three minutes on two cores, into {path}", file=sys.stderr)
    begun = time.perf_counter()
    train, held_out = read_corpus(recipe)
    tokenizer = train_tokenizer(list(train.values()), recipe.vocab_size)
    tokens, held_out_tokens = encode(tokenizer, train), encode(tokenizer, held_out)
    text_seconds = time.perf_counter() - begun

    model = training.fresh(recipe)
    part = path.with_name(f".{path.name}.part.safetensors")
    trained = training.train(model, tokens, recipe, part, progress)
    for p in model.parameters():  # stored in bfloat16, as targets are; what is measured below is what is stored
        p.data = p.data.bfloat16().float()

    begun = time.perf_counter()
    starts = {
        "train": prompts(tokenizer, train, recipe.train_prompts, recipe),
        "held_out": prompts(tokenizer, held_out, recipe.held_out_prompts, recipe, unseen="\0".join(train.values())),
    }
    continuations = _continue(model, starts["held_out"][: recipe.measure_prompts], recipe.measure_tokens)
    facts = {
        "name": NAME,
        "command": shlex.join(sys.orig_argv),
        "versions": provenance(),
        "threads": torch.get_num_threads(),
        "recipe": dataclasses.asdict(recipe),
        "seed": recipe.seed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": {
            "train": len(tokens),
            "held_out": len(held_out_tokens),
            "seen": recipe.steps * recipe.batch_size * recipe.length,
        },
        "documents": {"train": len(train), "held_out": len(held_out)},
        "text_sha256": hashlib.sha256(tokens.numpy().tobytes()).hexdigest(),
        "loss": {"train": round(trained["loss"], 4), "held_out": round(_loss(model, held_out_tokens, recipe), 4)},
        "distinct_4gram_rate": round(distinct_rate(continuations), 4),
        "measured_on": f"greedy float32 continuations of {len(continuations)} held-out prompts",
        "seconds": {
            "text": round(text_seconds, 1),
            "train": round(trained["seconds"], 1),
            "measure": round(time.perf_counter() - begun, 1),
        },
    }
    with whole_dir(path) as temporary:
        model.bfloat16().save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        for kind, rows in starts.items():
            lines = [
                json.dumps({"id": f"tiny-{kind.replace('_', '-')}-{i}", "task": "tiny", "prompt_ids": ids})
                for i, ids in enumerate(rows)
            ]
            write_text(temporary / f"prompts_{kind}.jsonl", "\n".join(lines) + "\n")
        write_text(temporary / "tiny.json", json.dumps(facts, indent=2) + "\n")
    part.unlink(missing_ok=True)


@torch.no_grad()
def _loss(model: "PreTrainedModel", tokens: Tensor, recipe: Recipe) -> float:
    """Mean loss in float32 over at most 128 windows spread over `tokens`."""
    windows = tokens[: len(tokens) // recipe.length * recipe.length].view(-1, recipe.length)
    windows = windows[:: max(1, len(windows) // 128)][:128]
    return model(input_ids=windows, labels=windows).loss.item()


def _continue(model: "PreTrainedModel", prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy continuations, each up to and without its stop id."""
    ids = torch.tensor(prompts)
    mask = torch.ones_like(ids)
    output: Any = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)  # type: ignore
    rows = output[:, ids.shape[1] :].tolist()
    stops = {END_ID, ENDOFTEXT_ID, PAD_ID}
    return [row[: next((i for i, t in enumerate(row) if t in stops), len(row))] for row in rows]
