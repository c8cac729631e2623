"""Training the embedded target: reproducible, and resumed where it was interrupted."""

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, safe_open, save_file
from torch import Tensor
from tqdm import tqdm

from ..modeling.devices import quick_dtype
from .recipe import END_ID, ENDOFTEXT_ID, NAME, PAD_ID, Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAVE_SECONDS = 30.0
"""Time between two checkpoints of the training."""


def fresh(recipe: Recipe) -> "PreTrainedModel":
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


def train(model: "PreTrainedModel", tokens: Tensor, recipe: Recipe, part: Path, progress: bool) -> dict[str, float]:
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
            with torch.autocast("cpu", torch.bfloat16, enabled=quick_dtype(batch.device) == torch.bfloat16):
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
