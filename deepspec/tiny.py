"""The embedded default target, "deepspec/tiny": a small Qwen3-architecture language model, trained and not downloaded.

It learns from text that every Python installation carries (the language reference in `pydoc_data` and the sources of
the standard library), takes two to three minutes on two cores, once, and is kept in the cache directory together with
a tokenizer, prompts to train drafters on, held-out prompts to evaluate them on, and `tiny.json`: how it was made.

    python -m deepspec.tiny
"""

import argparse
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import random
import re
import shlex
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import load_file, safe_open, save_file
from torch import Tensor
from tqdm import tqdm

from . import cli
from .cache import cache_dir, whole_dir, writable_dir, write_text
from .checked import Checked, InputError
from .eval.stats import distinct_rate
from .provenance import provenance

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NAME = "deepspec/tiny"
SPECIAL_TOKENS = ("<|endoftext|>", "<|pad|>", "<|mask|>", "<|user|>", "<|assistant|>", "<|end|>")
ENDOFTEXT_ID, PAD_ID, MASK_ID, USER_ID, ASSISTANT_ID, END_ID = range(6)
"""Their ids, at the start of the vocabulary. The mask is for drafters: the target never reads or writes it."""
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ ('<|assistant|>' if message['role'] == 'assistant' else '<|user|>') + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SAVE_SECONDS = 30.0
"""Time between two checkpoints of the training."""
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


@dataclass(frozen=True, kw_only=True)
class Recipe(Checked):
    """Everything the target depends on, beside the Python that provides the text."""

    version: int = 1
    """Raised when this file changes what a recipe means."""
    seed: int = 42
    vocab_size: int = 2048
    layers: int = 6
    hidden_size: int = 256
    intermediate_size: int = 768
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    source_chars: int = 4_000_000
    """Characters of standard-library source, beside the language reference."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Muon makes the better model (560 steps: held-out loss 3.30 against 4.13), which small drafters trained for two
    minutes cannot follow: DSpark's tau at temperature 0 was 2.2 on it."""
    steps: int = 560
    batch_size: int = 12
    length: int = 128
    """Tokens of a training sequence."""
    lr: float = 3e-3
    warmup_steps: int = 30
    prompt_tokens: int = 32
    train_prompts: int = 768
    held_out_prompts: int = 192
    measure_prompts: int = 64
    measure_tokens: int = 64
    """The greedy continuations whose distinct 4-gram rate is stored: held-out prompts, and new tokens of each."""


RECIPE = Recipe()


def target_dir(recipe: Recipe = RECIPE) -> Path:
    """Where the target of `recipe` is kept. Pure: neither builds nor looks.

    The name covers the recipe and the Python version, since the text differs between versions: the same name is the
    same target, up to rounding.
    """
    text = json.dumps([dataclasses.asdict(recipe), sys.version_info[:2]])
    return cache_dir("tiny", f"v{recipe.version}-{hashlib.sha256(text.encode()).hexdigest()[:10]}")


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


# -- text --------------------------------------------------------------------------------------------------------------


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
    files = {}
    for file in root.rglob("*.py"):
        parts = file.relative_to(root).parts
        # Only what belongs to Python: site-packages and per-platform files lie in the same folder.
        if parts[0].removesuffix(".py") in sys.stdlib_module_names and not _SKIP & set(parts):
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


def _encode(tokenizer: "PreTrainedTokenizerBase", documents: dict[str, str]) -> Tensor:
    """[T] all documents in one row, each as a chat in which the user gives its name and the assistant writes it."""
    names = tokenizer(list(documents)).input_ids
    texts = tokenizer(list(documents.values())).input_ids
    row: list[int] = []
    for name, text in zip(names, texts):
        row += [USER_ID, *name, END_ID, ASSISTANT_ID, *text, END_ID, ENDOFTEXT_ID]
    return torch.tensor(row)


def _prompts(
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


# -- training ----------------------------------------------------------------------------------------------------------


def _model(recipe: Recipe) -> "PreTrainedModel":
    """A fresh float32 model; the caller's random state is left alone."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[END_ID, ENDOFTEXT_ID],
        pad_token_id=PAD_ID,
        dtype="float32",
    )
    config._attn_implementation = "eager"  # at this size a fourth faster than SDPA, whose backward repeats the keys
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return Qwen3ForCausalLM(config)


def _batch(tokens: Tensor, step: int, recipe: Recipe) -> Tensor:
    """[batch_size, length] for a step. It depends on the step alone: a resumed run sees what it would have seen.

    Each epoch cuts the row into windows from another offset and goes through them in another order.
    """
    windows = (len(tokens) - recipe.length) // recipe.length
    rows = []
    for i in range(step * recipe.batch_size, (step + 1) * recipe.batch_size):
        epoch, place = divmod(i, windows)
        generator = torch.Generator().manual_seed(recipe.seed + epoch)
        offset = int(torch.randint(recipe.length, (), generator=generator))
        start = offset + int(torch.randperm(windows, generator=generator)[place]) * recipe.length
        rows.append(tokens[start : start + recipe.length])
    return torch.stack(rows)


def _train(model: "PreTrainedModel", tokens: Tensor, recipe: Recipe, part: Path, progress: bool) -> dict[str, float]:
    """Train in place, going on from the checkpoint `part` where it fits. Returns the seconds and the last loss."""
    named = dict(model.named_parameters())
    matrices = [p for n, p in named.items() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in named.items() if p.dim() != 2 or "embed" in n]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=recipe.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        if recipe.optimizer == "muon"
        else torch.optim.AdamW(matrices, lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.1),
        torch.optim.AdamW(others, lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    fingerprint = hashlib.sha256(tokens.numpy().tobytes() + repr(recipe).encode()).hexdigest()
    first, seconds, average = _resume(part, named, optimizers, fingerprint)

    begun = saved = time.perf_counter()
    model.train()
    with tqdm(total=recipe.steps, initial=first, desc=NAME, unit="step", disable=not progress) as bar:
        for step in range(first, recipe.steps):
            # Up in a straight line, then down to zero in another.
            lr = recipe.lr * min((step + 1) / recipe.warmup_steps, 1.0) * (1 - step / recipe.steps)
            batch = _batch(tokens, step, recipe)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr
                optimizer.step()
                optimizer.zero_grad()
            average = loss.item() if step == 0 else 0.95 * average + 0.05 * loss.item()
            bar.set_postfix(loss=f"{average:.2f}", refresh=False)
            bar.update()
            now = time.perf_counter()
            if now - saved >= SAVE_SECONDS and step + 1 < recipe.steps:
                facts = {"step": step + 1, "seconds": seconds + now - begun, "loss": average, "of": fingerprint}
                _save(part, named, optimizers, facts)
                saved = now
    model.eval()
    return {"seconds": seconds + time.perf_counter() - begun, "loss": average}


def _save(
    part: Path, named: dict[str, Any], optimizers: Sequence[torch.optim.Optimizer], facts: dict[str, Any]
) -> None:
    """Weights as weight.NAME, what optimizer o keeps for its parameter i as state.o.i.KEY, and the facts."""
    tensors = {f"weight.{name}": p.detach() for name, p in named.items()}
    for o, optimizer in enumerate(optimizers):
        for i, state in optimizer.state_dict()["state"].items():
            tensors |= {f"state.{o}.{i}.{key}": value for key, value in state.items()}
    temporary = part.with_name(part.name + ".new")
    save_file(tensors, temporary, metadata={"facts": json.dumps(facts)})
    temporary.replace(part)


def _resume(
    part: Path, named: dict[str, Any], optimizers: Sequence[torch.optim.Optimizer], fingerprint: str
) -> tuple[int, float, float]:
    """Load a checkpoint of the same training: steps done, seconds spent, loss. (0, 0, 0) where there is none."""
    if not part.is_file():
        return 0, 0.0, 0.0
    with safe_open(part, framework="pt") as file:
        facts = json.loads(file.metadata()["facts"])
    if facts["of"] != fingerprint:  # the text changed, as when Python was updated in between
        return 0, 0.0, 0.0
    states: list[dict[int, dict[str, Tensor]]] = [{} for _ in optimizers]
    for key, tensor in load_file(part).items():
        kind, name = key.split(".", 1)
        if kind == "weight":
            named[name].data.copy_(tensor)
        else:
            o, i, field = name.split(".")
            states[int(o)].setdefault(int(i), {})[field] = tensor
    for optimizer, state in zip(optimizers, states):
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return facts["step"], facts["seconds"], facts["loss"]


# -- building ----------------------------------------------------------------------------------------------------------


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
    tokens, held_out_tokens = _encode(tokenizer, train), _encode(tokenizer, held_out)
    text_seconds = time.perf_counter() - begun

    model = _model(recipe)
    part = path.with_name(f".{path.name}.part.safetensors")
    trained = _train(model, tokens, recipe, part, progress)

    begun = time.perf_counter()
    prompts = {
        "train": _prompts(tokenizer, train, recipe.train_prompts, recipe),
        "held_out": _prompts(tokenizer, held_out, recipe.held_out_prompts, recipe, unseen="\0".join(train.values())),
    }
    continuations = _continue(model, prompts["held_out"][: recipe.measure_prompts], recipe.measure_tokens)
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
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        for kind, rows in prompts.items():
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


def main() -> None:
    """Build where needed; print where it is and its figures."""
    parser = argparse.ArgumentParser(prog="python -m deepspec.tiny", description="Build the embedded target, once.")
    parser.parse_args()
    path = ensure()
    facts = json.loads((path / "tiny.json").read_text(encoding="utf-8"))
    print(
        f"{path}\n{facts['parameters']:,} parameters, held-out loss {facts['loss']['held_out']}, "
        f"distinct 4-grams {facts['distinct_4gram_rate']}, trained in {facts['seconds']['train']} s"
    )


if __name__ == "__main__":
    cli.main(main)
