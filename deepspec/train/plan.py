"""What a run would take, before any weight is read: `python -m deepspec.train --config C --plan`.

Dimensions come from the target's config alone. The drafter is built of fake tensors, which have shapes and no memory;
its floating-point operations and what its backward pass keeps are counted while it runs on them, whichever drafter it
is. Bytes and operations are of one device; a FLOP is a multiplication or an addition of a matrix product.

Letters: T positions of a row, A anchors, G slots, L tapped layers, D hidden, V vocabulary, R rank.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checked import InputError
from ..config import Config, as_dict
from ..modeling import loading
from ..modeling.devices import auto_dtype, dtype_name, dtype_of, pick_device
from ..modeling.drafter import Batch, Drafter
from ..modeling.families import Family, read_family
from ..modeling.vocab import Vocab
from ..units import byte_size
from .precision import settled

TOKENS = 1_240_000_000
"""Tokens of the paper's data set: 38 TB of cached features for Qwen3-4B."""


@dataclass(frozen=True)
class Plan:
    """Figures of a run. Bytes are of one device, FLOPs of one optimiser step."""

    target: dict[str, Any]
    parameters: dict[str, int]
    """Trainable, by part of the drafter."""
    saved_tensors: int
    """Tensors of the drafter's file."""
    frozen: dict[str, tuple[int, ...]]
    """The target's tensors the drafter shares; never saved with it."""
    slots: int
    """Supervised slots a step, at most: every anchor real, every slot supervised."""
    memory: dict[str, int]
    flops: dict[str, float]
    cache_bytes: int
    """Features, last hidden state and log Z of `tokens` tokens, in the target's dtype."""
    live_flops: float
    """The target's forward pass over `tokens` tokens, once an epoch."""
    tokens: int
    resolved: dict[str, Any]

    def text(self) -> str:
        per_token = self.cache_bytes / self.tokens
        sections = {
            "target": self.target,
            "drafter parameters": {
                **{k: _count(v) for k, v in self.parameters.items()},
                "total": _count(sum(self.parameters.values())),
            },
            "files": {
                "tensors saved": self.saved_tensors,
                "frozen, never saved": ", ".join(f"{k} {list(v)}" for k, v in self.frozen.items()),
            },
            "work a step": {"supervised slots, at most": f"{self.slots:,}"}
            | {k: f"{v:.3g} FLOPs" for k, v in {**self.flops, "total": sum(self.flops.values())}.items()},
            "memory (one device, estimated)": {
                k: byte_size(v) for k, v in {**self.memory, "total": sum(self.memory.values())}.items()
            },
            f"features of {self.tokens:,} tokens": {
                "cached": f"{byte_size(self.cache_bytes)} ({per_token:,.0f} bytes a token)",
                "live": f"{self.live_flops:.3g} FLOPs an epoch of target forward passes",
            },
            "settings": self.resolved,
        }
        lines = []
        for title, rows in sections.items():
            lines.append(f"{title}:")
            lines += [f"  {name:<34} {value}" for name, value in rows.items()]
        return "\n".join(lines)


def target_config(config: Config, source: str | None = None) -> Any:
    """The target's Hugging Face config: from `source` (a JSON file or a directory) or by the target's name."""
    if source is not None and Path(source).is_file():
        from transformers import AutoConfig

        try:
            raw = json.loads(Path(source).read_text())
            return AutoConfig.for_model(raw.pop("model_type"), **raw)
        except (json.JSONDecodeError, KeyError, ValueError, TypeError) as error:
            raise InputError(f"{source} is no target config: {error or type(error).__name__}") from None
    if source is not None and not Path(source).is_dir():
        raise InputError(f"no target config {source!r}; give a config.json or a directory that holds one")
    try:
        return loading.load_config(source or config.target, config.target_revision if source is None else None)
    except InputError as error:
        raise InputError(f"{error} (without network, give --target-config FILE.json)") from None


def plan(config: Config, hf: Any, tokens: int = TOKENS) -> Plan:
    """Figures of a run on a target described by its Hugging Face config. ConfigError where the two do not fit."""
    text, family, train = hf.get_text_config(), read_family(hf), config.train
    eos = text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]
    special: dict[str, Sequence[int]] = {
        "eos": [i for i in eos if i is not None],
        "pad": [] if text.pad_token_id is None else [text.pad_token_id],
    }
    config.drafter.check_target(num_layers=text.num_hidden_layers, vocab_size=text.vocab_size, special_ids=special)
    device = pick_device(train.device)
    config = settled(config, device)
    train, dtype = config.train, _target_dtype(config, hf, device)
    T, D, V = config.data.max_length, family.block.dim, text.vocab_size
    Vd = config.drafter.draft_vocab_size or V
    seen = V if config.data.features == "live" else Vd  # a cache knows log Z (one of format 1 does not)
    run = _dry_run(config, family, V, T)
    layers = _layer_parameters(text)
    L, size = len(config.drafter.target_layer_ids), dtype.itemsize
    batch, micro = train.batch_size, train.micro_batch
    slots = run.anchors * run.num_slots
    tied = bool(text.tie_word_embeddings)
    heads: dict[str, tuple[int, ...]] = {"embedding = head": (V, D)} if tied else {"embedding": (V, D), "head": (V, D)}
    vocabulary = len(heads) * V * D
    if Vd < V:
        heads["draft head"] = (Vd, D)
    trainable = sum(run.parameters.values())
    moments = trainable * 8 if train.optimizer == "adamw" else trainable * 8 - run.inner * 4
    attend = 2 * T * T * text.num_attention_heads * family.block.head_dim * text.num_hidden_layers
    forward = 2 * layers * T + attend
    row = V * (4 if train.precision == "fp32" else 2)
    return Plan(
        target={
            "name": config.target,
            "type": text.model_type,
            "layers": f"{text.num_hidden_layers} x {D}, vocabulary {V:,}",
            "parameters": f"{_count(layers + vocabulary)} in {str(dtype).removeprefix('torch.')}",
            "draft block": f"{family.block.heads}/{family.block.kv_heads} heads of {family.block.head_dim}, "
            f"MLP {run.mlp_dim}, width {run.width}",
        },
        parameters=dict(run.parameters),
        saved_tensors=run.saved,
        frozen=heads,
        slots=batch * slots,
        memory={
            "target weights": layers * (train.target_bits or size * 8) // 8 + vocabulary * size,
            "drafter weights": trainable * 4,
            "gradients": trainable * 4,
            f"optimiser ({train.optimizer})": moments,
            "features of a micro-batch": micro * T * (L + 1) * D * size,
            "activations of a micro-batch": micro * run.kept,
            "slot states and their gradients": micro * slots * 2 * (D + run.rank) * 4,
            # the target's logits and the drafter's
            "loss, one chunk": config.loss.slots(row * Vd // V) * (row * seen // V + row * Vd // V),
        },
        flops={
            "target forward (live features)": batch * float(forward),
            "drafter, forward and backward": batch * 3 * float(run.flops),
            "head and loss": batch * float(slots * 2 * Vd * (2 * D + 3 * run.rank) + 2 * min(T, slots) * seen * D),
        },
        cache_bytes=tokens * ((L + 1) * D * size + 4),  # log Z
        live_flops=tokens / T * float(forward),
        tokens=tokens,
        resolved=_resolved(config, device, dtype, run.num_slots),
    )


@dataclass(frozen=True)
class _DryRun:
    """One row of T positions through a drafter of fake tensors."""

    parameters: Counter[str]
    inner: int
    """Parameters that Muon would take."""
    saved: int
    anchors: int
    num_slots: int
    rank: int
    width: int
    mlp_dim: int
    flops: int
    """Forward matrix products, attention to the whole row counted (flex attention skips what is masked)."""
    kept: int
    """Bytes that the backward pass keeps, weights cast by autocast included."""


def _dry_run(config: Config, family: Family, V: int, T: int) -> _DryRun:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    D, L = family.block.dim, len(config.drafter.target_layer_ids)
    cast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if config.train.precision == "bf16":
        cast = torch.autocast("cpu", dtype=torch.bfloat16)
    with FakeTensorMode(), torch.random.fork_rng(devices=[]):
        size = config.drafter.draft_vocab_size
        vocab = Vocab(
            torch.empty(V, D), torch.empty(V, D), softcap=family.softcap, embed_scale=family.embed_scale,
            kept=None if size is None else torch.arange(size),
        )  # fmt: skip
        drafter = config.drafter.build(family.block, vocab)
        tokens = torch.zeros(1, T, dtype=torch.long)
        batch = Batch(tokens, tokens == 0, torch.empty(1, T, L * D), torch.empty(1, T, D))
        anchors, _ = drafter.anchors(batch, torch.zeros(1, dtype=torch.long))
        counter, kept = FlopCounterMode(display=False), _Kept(drafter)
        with counter, kept, cast:
            hidden = drafter.hidden(batch, anchors)
            rows = drafter.rows(hidden, tokens[:, :1, None].expand(*hidden.shape[:-1]))
    named = list(drafter.named_parameters())
    return _DryRun(
        parameters=_parts(named),
        inner=sum(p.numel() for name, p in named if name.startswith("layers.") and p.dim() == 2),
        saved=len(drafter.state_dict()) + (0 if size is None else 3),  # lm_head, d2t, t2d
        anchors=anchors.shape[1],
        num_slots=drafter.num_slots,
        rank=rows.shape[-1],
        width=drafter.spec.dim,
        mlp_dim=drafter.spec.mlp_dim,
        flops=counter.get_total_flops(),
        kept=kept.bytes,
    )


class _Kept(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes autograd keeps, each storage once, the drafter's own weights and the vocabulary not."""

    def __init__(self, drafter: Drafter) -> None:
        self.bytes = 0
        self._alive: list[Tensor] = []  # or a freed storage's number would come back
        self._seen = {p.untyped_storage()._cdata for p in [*drafter.parameters(), *drafter.vocab.parameters()]}
        super().__init__(self._pack, lambda x: x)

    def _pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._alive.append(x)
            self.bytes += storage.nbytes()
        return x


def _parts(named: list[tuple[str, nn.Parameter]]) -> Counter[str]:
    """Parameters by part; the layers, which are alike, together."""
    numbers = {name.split(".")[1] for name, _ in named if name.startswith("layers.")}
    parts: Counter[str] = Counter()
    for name, p in named:
        first, *rest = name.split(".")
        parts[f"{len(numbers)} layers, {rest[1]}" if first == "layers" and len(rest) > 2 else first] += p.numel()
    return parts


def _layer_parameters(text: Any) -> int:
    """Parameters of the target's text model without embedding and head, from its own module on no device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text)
    out = {id(p) for m in (model.get_input_embeddings(), model.get_output_embeddings()) for p in m.parameters()}
    return sum(p.numel() for p in model.parameters() if id(p) not in out)


def _target_dtype(config: Config, hf: Any, device: torch.device) -> torch.dtype:
    said = dtype_of(config.train.target_dtype)
    found = loading.own_dtype(hf, device) if said == "auto" else said
    return auto_dtype(torch.bfloat16, device) if found == "auto" else found


def _resolved(config: Config, device: torch.device, dtype: torch.dtype, slots: int) -> dict[str, Any]:
    """Every setting by its dotted name, and what 'auto' and fractions come to."""
    flat: dict[str, Any] = {}

    def walk(value: Any, key: str) -> None:
        if isinstance(value, dict):
            for name, child in value.items():
                walk(child, f"{key}.{name}" if key else name)
        else:
            flat[key] = value

    walk(as_dict(config), "")
    train = config.train
    flat["train.device"] = str(device)
    flat["train.target_dtype"] = dtype_name(dtype)
    if train.attention == "auto":
        flat["train.attention"] = "flex" if device.type == "cuda" else "sdpa"
    flat["(draft tokens a round)"] = slots
    flat["(micro-batches a step)"] = train.batch_size // train.micro_batch
    flat["(weight of each slot)"] = " ".join(f"{config.loss.slot_decay**g:.3f}" for g in range(slots))
    return flat


def _count(n: int) -> str:
    return f"{n:,}" + (f" ({n / 1e9:.2f} G)" if n >= 1e9 else f" ({n / 1e6:.1f} M)" if n >= 1e6 else "")
