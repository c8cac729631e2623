"""The embedded target's text: what every Python carries, a tokenizer learned from it, chats and prompts of it."""

import hashlib
import random
import re
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..checked import InputError
from .recipe import (
    ASSISTANT_ID,
    CHAT_TEMPLATE,
    END_ID,
    ENDOFTEXT_ID,
    NAME,
    PAD_ID,
    SPECIAL_TOKENS,
    USER_ID,
    Recipe,
)  # fmt: skip

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Tables, vendored parsers and whole applications: little text, or missing from some distributions of Python.
_SKIP = {
    "distutils",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "test",
    "tests",
    "tkinter",
    "turtledemo",
}
_HELD_OUT_SHARE = 12
"""One document in this many is held out, by a hash of its name."""
_PARAGRAPH = re.compile(r"\n[ \t]*\n")
_LONG_PARAGRAPH = 60
"""Characters from which a paragraph identifies its source: such a one is kept only where it comes first."""


def read_corpus(recipe: Recipe) -> tuple[dict[str, str], dict[str, str]]:
    """Documents to train on and documents held out, text by name, with no paragraph of some length in two places.

    Topics of the language reference quote each other and sources share boilerplate. Held-out documents come first, so
    what they have in common with others is taken from the others: nothing in them is trained on.
    """
    documents = _documents(recipe.source_chars)
    held_out = {name for name in documents if _hash(f"held out: {name}") % _HELD_OUT_SHARE == 0}
    seen: set[str] = set()
    train: dict[str, str] = {}
    held: dict[str, str] = {}
    for name in sorted(documents, key=lambda name: (name not in held_out, name)):
        kept = []
        for paragraph in _PARAGRAPH.split(documents[name]):
            normal = " ".join(paragraph.split())
            if len(normal) < _LONG_PARAGRAPH or normal not in seen:
                kept.append(paragraph)
            if len(normal) >= _LONG_PARAGRAPH:
                seen.add(normal)
        text = "\n\n".join(kept).strip("\n")
        if text.strip():
            (held if name in held_out else train)[name] = text
    return train, held


def _documents(source_chars: int) -> dict[str, str]:
    """Name -> text: every topic, and `source_chars` characters of source files in an order fixed by their names."""
    from pydoc_data.topics import topics

    documents = {f"topic {name}": text for name, text in topics.items()}
    root = Path(sysconfig.get_path("stdlib"))
    # Only what belongs to Python: site-packages and per-platform files lie in the same folder.
    own = [p for p in root.iterdir() if p.name.removesuffix(".py") in sys.stdlib_module_names]
    files = {}
    for file in [f for p in own if p.name not in _SKIP for f in ([p] if p.suffix == ".py" else p.rglob("*.py"))]:
        parts = file.relative_to(root).parts
        if not _SKIP & set(parts):
            files["/".join(parts)] = file
    total = 0
    for name in sorted(files, key=_hash):
        text = files[name].read_text("utf-8", errors="replace")
        if total + len(text) <= source_chars:
            documents[name] = text
            total += len(text)
    if total < source_chars / 2:
        raise InputError(
            f"{NAME} needs {source_chars:,} characters of Python's own sources, but {root} holds {total:,}; "
            "use a Python that has its standard library as .py files"
        )
    return documents


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> "PreTrainedTokenizerBase":
    """A byte-level BPE tokenizer: every text has ids, and decodes to itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=SPECIAL_TOKENS[END_ID],
        pad_token=SPECIAL_TOKENS[PAD_ID],
        additional_special_tokens=list(SPECIAL_TOKENS),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: "PreTrainedTokenizerBase", documents: dict[str, str]) -> Tensor:
    """[T] all documents in one row, each as a chat in which the user gives its name and the assistant writes it."""
    names = tokenizer(list(documents)).input_ids
    texts = tokenizer(list(documents.values())).input_ids
    row: list[int] = []
    for name, text in zip(names, texts):
        row += [USER_ID, *name, END_ID, ASSISTANT_ID, *text, END_ID, ENDOFTEXT_ID]
    return torch.tensor(row)


def prompts(
    tokenizer: "PreTrainedTokenizerBase", documents: dict[str, str], count: int, recipe: Recipe, unseen: str = ""
) -> list[list[int]]:
    """`count` different prompts, or as many as there are: beginnings of paragraphs, none of which is in `unseen`."""
    starts = [(n, m.end()) for n, text in documents.items() for m in re.finditer(r"\A|\n[ \t]*\n+", text)]
    random.Random(recipe.seed).shuffle(starts)
    found: dict[str, list[int]] = {}
    for name, start in starts:
        if len(found) == count:
            break
        # Enough characters for the prompt's tokens whatever they are, so that none is cut short by the slice.
        ids = tokenizer(documents[name][start : start + 32 * recipe.prompt_tokens]).input_ids[: recipe.prompt_tokens]
        text = str(tokenizer.decode(ids))
        if len(ids) == recipe.prompt_tokens and text not in unseen:
            found[text] = ids
    return list(found.values())
