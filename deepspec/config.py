"""A run is one frozen `Config`, written in a Python file and changed only by `dotted.key=value` overrides."""

import ast
import dataclasses
import difflib
import math
import os
import runpy
import traceback
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .checked import Checked, ConfigError, InputError, convert, require, type_name
from .modeling.drafter import DrafterConfig


@dataclass(frozen=True, kw_only=True)
class LossConfig(Checked):
    """Weights of the objective's terms; each is a sum over supervised slots, slot g weighted by slot_decay ** g."""

    ce: float = 0.0
    """Cross-entropy with the token in the data."""
    kl: float = 0.0
    """Cross-entropy with the target's whole distribution."""
    tv: float = 0.0
    """L1 distance to the target's distribution (not halved): twice the rejection rate."""
    confidence: float = 0.0
    """Binary cross-entropy of the confidence head with the true acceptance rate, 1 - L1 / 2."""
    slot_decay: float = 1.0
    reduce: Literal["slot", "document"] = "slot"
    """Average over supervised slots, or first within each document and then over documents."""
    chunk: int | None = None
    """Slots of one product with the vocabulary: their logits are alive at once, in the products' dtype. A product of
    many slots is faster (on a CPU 512 take half of the time a slot that 64 do). None: those of 32 MiB, at least 64."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(max(self.ce, self.kl, self.tv) > 0, "one of loss.ce, loss.kl, loss.tv must be > 0")
        for name in ("ce", "kl", "tv", "confidence"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"loss.{name} must be >= 0 and finite, got {value}")
        require(0 < self.slot_decay <= 1, f"loss.slot_decay must be in (0, 1], got {self.slot_decay}")
        require(self.chunk is None or self.chunk >= 1, f"loss.chunk must be >= 1 or None, got {self.chunk}")

    def slots(self, row: int) -> int:
        """Most slots of a chunk, where one's logits take `row` bytes."""
        return max(64, (32 << 20) // row) if self.chunk is None else self.chunk


def _files(given: Any) -> Any:
    """One file or several as a tuple, ~ expanded; what is neither is left to the check of types."""
    given = (given,) if isinstance(given, str | Path) else given
    if not isinstance(given, tuple | list):
        return given
    return tuple(os.path.expanduser(p) if isinstance(p, str | Path) else p for p in given)


@dataclass(frozen=True, kw_only=True)
class DataConfig(Checked):
    """Where training rows come from (`deepspec.data`)."""

    path: tuple[str, ...]
    """JSONL files of conversations or token rows."""
    max_length: int = 4096
    """Tokens of a row; longer ones are cut on the right."""
    min_supervised: int = 14
    """Rows with fewer supervised tokens are dropped and counted."""
    thinking: Literal["on", "off", "auto"] = "auto"
    """Passed to the chat template as enable_thinking; auto passes nothing."""
    turns: Literal["apart", "together"] = "apart"
    """One row for every turn of a conversation, or one row for all turns that see each other as inference would."""
    malformed: Literal["error", "skip"] = "error"
    """What a line that is no record is: an error that names it, or counted and read over."""
    pack_tokens: int | None = None
    """Rows packed side by side into sequences of at most this many tokens; None: a row is a sequence. Batch sizes, and
    a block drafter's num_anchors, count per sequence either way."""
    features: str = "live"
    """'live': computed by the target in training; or the directory of a cache (`deepspec.data features`). A run from a
    cache reads the target's embedding and head only, unless train.init is 'target'."""
    max_refused: float = 0.01
    """Training stops when more than this fraction of the rows have features that are not finite, all zero or constant;
    such rows are counted and never trained on."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", _files(self.path))
        super().__post_init__()
        object.__setattr__(self, "features", os.path.expanduser(self.features))
        require(len(self.path) > 0, "data.path must name at least one JSONL file")
        require(self.max_length >= 2, f"data.max_length must be >= 2, got {self.max_length}")
        require(self.min_supervised >= 2, f"data.min_supervised must be >= 2, got {self.min_supervised}")
        require(
            self.pack_tokens is None or self.pack_tokens >= self.max_length,
            f"data.pack_tokens ({self.pack_tokens}) must be >= data.max_length ({self.max_length}), or None",
        )
        require(0 <= self.max_refused <= 1, f"data.max_refused must be in [0, 1], got {self.max_refused}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Checked):
    """The optimisation. Batch sizes count sequences."""

    lr: float = 6e-4
    init: str = "random"
    """Where weights start: 'random', 'target' (its last layers, final norm, and a projection that selects the last
    tapped layer), or an existing drafter's directory or hub id; what does not fit stays random."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the matrices of the layers, scaled so that AdamW's lr fits it, and AdamW for everything else."""
    epochs: int = 10
    max_steps: int | None = None
    """Stop after this many optimiser steps, whatever `epochs` says."""
    batch_size: int = 512
    """Sequences an optimiser step."""
    micro_batch: int = 1
    """Sequences a forward pass of one process. Halved while training where memory runs out."""
    sharding: Literal["ddp", "fsdp"] = "ddp"
    """Under a launcher: every process holds all weights (ddp), or weights, gradients and optimiser are split over the
    processes between steps (fsdp: FSDP2)."""
    warmup: float = 0.04
    """Fraction of all steps over which the learning rate rises from 0; then it falls to 0 on a cosine."""
    weight_decay: float = 0.0
    betas: tuple[float, ...] = (0.9, 0.95)
    clip: float = 1.0
    """Largest global gradient norm."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Of the drafter's products; its trainable weights are float32 either way. auto: bf16, but fp32 on a CPU without
    instructions for bfloat16 products."""
    target_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """dtype of the target's weights; auto is the checkpoint's, but float32 on a CPU that is slow in it."""
    target_devices: Literal["one", "all"] = "one"
    """all: the target's layers are spread over all GPUs of the machine (and main memory), for one training process."""
    target_bits: int | None = None
    """8 or 4: the target's layers are quantised by bitsandbytes when they are loaded; embedding and head are not."""
    attention: Literal["auto", "flex", "sdpa"] = "auto"
    """auto is flex on CUDA and SDPA elsewhere."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile of the drafter and the objective; auto is on for CUDA. On a CPU it needs a C++ compiler and about a
    minute, and pays for large vocabularies."""
    checkpoint_layers: bool = False
    """Recompute the drafter's layers in the backward pass instead of keeping what they computed: less memory, about a
    third more work for the drafter."""
    device: str = "auto"
    trackers: tuple[str, ...] = ()
    """Trackers of accelerate that get what metrics.jsonl gets: tensorboard, wandb, mlflow, ..."""
    log_every: int = 10
    save_every: int = 500
    """Optimiser steps between checkpoints; the last step is always saved."""
    keep_last: int = 2
    """Checkpoints kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.lr < math.inf, f"train.lr must be > 0 and finite, got {self.lr}")
        require(0 <= self.weight_decay < math.inf, f"train.weight_decay must be >= 0, got {self.weight_decay}")
        require(0 <= self.warmup < 1, f"train.warmup must be in [0, 1), got {self.warmup}")
        for name in ("epochs", "batch_size", "micro_batch", "log_every", "save_every", "keep_last"):
            require(getattr(self, name) >= 1, f"train.{name} must be >= 1, got {getattr(self, name)}")
        require(self.max_steps is None or self.max_steps >= 1, f"train.max_steps must be >= 1, got {self.max_steps}")
        require(
            self.batch_size % self.micro_batch == 0,
            f"train.micro_batch ({self.micro_batch}) must divide train.batch_size ({self.batch_size})",
        )
        require(self.target_bits in (None, 4, 8), f"train.target_bits must be 8, 4 or None, got {self.target_bits}")
        require(
            self.init != "target" or self.target_bits is None,
            "train.init 'target' copies the target's layers, which train.target_bits quantises: set one of them back",
        )
        require(self.clip > 0, f"train.clip must be > 0, got {self.clip}")
        require(
            len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas),
            f"train.betas: two in [0, 1), got {self.betas}",
        )


@dataclass(frozen=True, kw_only=True)
class ValidateConfig(Checked):
    """Decoding of held-out prompts during training, as `deepspec.eval` does it."""

    path: tuple[str, ...] = ()
    """JSONL files of prompts; none: no validation."""
    every: int = 500
    """Optimiser steps between validations; the last step is always validated."""
    prompts: int = 32
    """Of each file, spread over it."""
    max_new_tokens: int = 64
    temperature: float = 0.0
    concurrency: int = 16
    """Requests in flight."""
    seed: int = 0
    """Prompt i of a file is decoded with seed + i."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", _files(self.path))
        super().__post_init__()
        for name in ("every", "prompts", "max_new_tokens", "concurrency"):
            require(getattr(self, name) >= 1, f"validate.{name} must be >= 1, got {getattr(self, name)}")
        require(0 <= self.temperature < math.inf, f"validate.temperature must be >= 0, got {self.temperature}")
        require(abs(self.seed) < 2**62, f"validate.seed must be between -2**62 and 2**62, got {self.seed}")


@dataclass(frozen=True, kw_only=True)
class Config(Checked):
    """Everything that defines a training run."""

    target: str
    """Directory, hub id, GGUF file, or 'deepspec/tiny' (see `deepspec.tiny`)."""
    target_revision: str | None = None
    drafter: DrafterConfig
    loss: LossConfig
    data: DataConfig
    train: TrainConfig = field(default_factory=TrainConfig)
    validate: ValidateConfig = field(default_factory=ValidateConfig)
    out: Path
    """The run directory."""
    seed: int = 42

    def __post_init__(self) -> None:
        super().__post_init__()
        require(-(2**63) <= self.seed < 2**64, f"seed must fit into 64 bits, got {self.seed}")
        require(
            self.loss.confidence == 0 or self.drafter.has_confidence,
            f"loss.confidence is {self.loss.confidence:g}, but the drafter has no confidence head: set it to 0",
        )


def load_config(path: str | Path, *overrides: str) -> Config:
    """Read `config` from a Python file, then apply overrides such as 'train.lr=1e-4'.

    A recipe that builds on another calls `load_config(Path(__file__).parent / "other.py")`. ConfigError says what is
    wrong, where, and what would be right.
    """
    if not Path(path).is_file():
        raise ConfigError(f"no config file {str(path)!r}")
    try:
        config = runpy.run_path(str(path)).get("config")
    except InputError as error:
        raise ConfigError(f"{path}: {error}") from None
    except TypeError as error:  # a keyword that no section has
        raise ConfigError(f"{path}: {_unknown_keyword(str(error))}") from None
    except SyntaxError as error:
        raise ConfigError(f"{path}, line {error.lineno}: {error.msg}") from None
    except Exception as error:  # the file is the user's code: a wrong name, a missing module
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{path}, line {lines[-1] if lines else '?'}: {what}") from error
    if not isinstance(config, Config):
        raise ConfigError(f"{path} must define `config = deepspec.Config(...)`, found {type(config).__name__}")
    changes = []
    for override in overrides:
        key, sign, text = override.partition("=")
        if not sign:
            raise ConfigError(f"override {override!r} must look like dotted.key=value")
        changes.append((key.strip().split("."), text.strip(), key.strip()))
    return _replace(config, changes)


def as_dict(value: Any) -> Any:
    """A config as plain JSON values; sections carry no type names, except the drafter's kind."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: as_dict(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **fields} if isinstance(value, DrafterConfig) else fields
    if isinstance(value, tuple | list):
        return [as_dict(v) for v in value]
    return str(value) if isinstance(value, Path) else value


def _unknown_keyword(message: str) -> str:
    """'DataConfig.__init__() got an unexpected keyword argument 'x'' with the nearest field added."""
    if "unexpected keyword argument" not in message:
        return message
    section, name = message.split(".")[0], message.rsplit("'", 2)[1]
    known = {c.__name__: [f.name for f in dataclasses.fields(c)] for c in _subclasses(Checked)}
    return f"{section} has no {name!r}; {_hint(name, known.get(section, []))}"


def _subclasses(kind: type) -> list[type]:
    children: list[type] = kind.__subclasses__()
    return [kind, *(s for child in children for s in _subclasses(child))]


def _hint(name: str, fields: list[str]) -> str:
    close = difflib.get_close_matches(name, fields, n=1, cutoff=0.5)  # Ir and lr share one letter of two
    return f"did you mean {close[0]!r}?" if close else f"it has: {', '.join(sorted(fields)) or 'no keys'}"


def _replace(node: Any, changes: list[tuple[list[str], str, str]]) -> Any:
    """`node` with all changes (path, text, whole key) made at once, for some settings fit only together."""
    fields = [f.name for f in dataclasses.fields(node)] if dataclasses.is_dataclass(node) else []
    new: dict[str, Any] = {}
    deeper: dict[str, list[tuple[list[str], str, str]]] = {}
    for (name, *rest), text, key in changes:
        if name not in fields:
            raise ConfigError(f"no config key {key!r}: {type(node).__name__} has no {name!r}; {_hint(name, fields)}")
        old = getattr(node, name)
        if rest:
            deeper.setdefault(name, []).append((rest, text, key))
        elif dataclasses.is_dataclass(old):
            raise ConfigError(
                f"{key} is a section; set one of its keys, such as {key}.{dataclasses.fields(old)[0].name}=..."
            )
        else:
            new[name] = parse(text, typing.get_type_hints(type(node))[name], key)
    new |= {name: _replace(getattr(node, name), part) for name, part in deeper.items()}
    return dataclasses.replace(node, **new)


def parse(text: str, kind: Any, key: str) -> Any:
    """Read `text` as a value of type `kind`; ConfigError names `key`. Text that is no Python literal is a string."""
    if kind in (str, Path):
        return convert(text, kind)
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType) and str in typing.get_args(kind):  # a revision may be all digits
        return None if text.lower() == "none" else text
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        value = text
    if origin is tuple and not isinstance(value, tuple | list):
        value = tuple(text.split(",")) if typing.get_args(kind)[0] is str else (value,)
    if origin in (typing.Union, types.UnionType) and isinstance(value, str) and value.lower() == "none":
        value = None
    try:
        return convert(value, kind)
    except TypeError:
        raise ConfigError(f"{key} must be {type_name(kind)}, got {text!r}") from None
