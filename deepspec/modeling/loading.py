"""Finding and reading target models: configs, weights, tokenizers; local directories, hub ids, GGUF files.

Errors say which name failed and what would be right. Reading a vocabulary alone touches two tensors, not the model.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import torch

from ..checked import InputError
from .devices import auto_dtype, dtype_of, pick_device
from .families import Family, read_family
from .vocab import Vocab

TINY = "deepspec/tiny"


def resolve(name: str) -> tuple[str, dict[str, str]]:
    """A target's name -> what transformers loads it by: (directory or hub id, extra arguments)."""
    if name == TINY:
        from ..tiny import ensure

        return str(ensure()), {}
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError(f"no GGUF file {name!r}")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(
                f"target {name!r} is a directory without config.json; a Hugging Face model directory has one"
            )
        return str(path), {}
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise InputError(f"no target directory {name!r}")
    return name, {}


def load_config(name: str, revision: str | None = None) -> Any:
    """The Hugging Face config of a target; no weights are read."""
    from transformers import AutoConfig

    where, extra = resolve(name)
    with _explained(name):
        return AutoConfig.from_pretrained(where, revision=revision or "main", **extra)


def load_model(
    name: str, *, device: str = "auto", dtype: str | torch.dtype = "auto", revision: str | None = None,
    device_map: str | dict[str, Any] | None = None, bits: int | None = None,
) -> Any:  # fmt: skip
    """The target's weights: on one device, or where transformers' `device_map` puts them ('auto': over all devices).
    bits: 8 or 4, what bitsandbytes makes of the layers' matrices; embedding and head keep `dtype`. dtype auto: the
    checkpoint's own, but float32 on a CPU that is slow in it (devices.py)."""
    from transformers import AutoModelForCausalLM

    where, extra = resolve(name)
    said, home, placed = dtype_of(dtype), pick_device(device), device_map is not None or bits is not None
    # the config of a GGUF file names no dtype, and takes long to read
    kind = own_dtype(load_config(name, revision), home) if said == "auto" and not extra else said
    more: dict[str, Any] = dict(extra)
    if placed:
        more["device_map"] = {"": home} if device_map is None else device_map

    def read(kind: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            where, dtype=kind, revision=revision or "main", attn_implementation="sdpa", **more
        )

    with _explained(name):
        if bits is not None:
            from transformers import BitsAndBytesConfig

            own = {"load_in_8bit": True} if bits == 8 else {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
            if bits == 4 and said != "auto":
                own["bnb_4bit_compute_dtype"] = said
            more["quantization_config"] = BitsAndBytesConfig(**own)
        model = read(kind)
        if kind == "auto" and (wanted := auto_dtype(model.dtype, home)) != model.dtype:
            # read again, not cast: what a model computes for itself (Gemma's embed_scale) would stay rounded
            del model
            model = read(wanted)
    return model if placed else model.to(device=home)


def own_dtype(config: Any, device: torch.device) -> Any:
    """'auto' for a target of this config: what that says its weights are, as `auto_dtype` has it on the device; 'auto'
    where it says nothing, so that the weights decide."""
    found = getattr(config, "dtype", None)
    return "auto" if found is None else auto_dtype(dtype_of(found), device)


def weight_at(module: Any, device: torch.device) -> torch.Tensor:
    """A module's weight on `device`: itself where it is there already, else a copy, also where it is kept outside the
    device's memory. InputError where it is stored as integers."""
    weight: torch.Tensor = module.weight
    if weight.is_meta:
        from accelerate.utils import align_module_device

        with align_module_device(module, execution_device=device):
            weight = module.weight.detach().clone()
    if not weight.is_floating_point():
        raise InputError(
            f"the target's {type(module).__name__} of {list(weight.shape)} is quantised; drafters share it"
        )
    return weight.to(device)


def load_tokenizer(name: str, *, revision: str | None = None) -> Any:
    """The target's tokenizer, or None where a directory has none (token rows need none)."""
    from transformers import AutoTokenizer

    where, extra = resolve(name)
    if (
        not extra
        and Path(where).is_dir()
        and not any(
            (Path(where) / f).is_file()
            for f in ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
        )
    ):
        return None
    with _explained(name):
        return AutoTokenizer.from_pretrained(where, revision=revision or "main", **extra)


def load_stop_ids(name: str, config: Any, tokenizer: Any, revision: str | None = None) -> tuple[int, ...]:
    """The ids that end an answer, from generation config, model config and tokenizer; no weights are read."""
    from transformers import GenerationConfig

    where, extra = resolve(name)
    generation = None
    if not extra:
        with contextlib.suppress(OSError):
            generation = GenerationConfig.from_pretrained(where, revision=revision or "main")
    return stop_ids(generation, config.get_text_config(), tokenizer)


def stop_ids(*sources: Any) -> tuple[int, ...]:
    """All eos ids that configs and tokenizers name; each may hold none, one or a list."""
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return tuple(sorted(found))


def load_vocab(
    name: str, *, device: str = "auto", dtype: str | torch.dtype = "auto", revision: str | None = None
) -> tuple[Family, Vocab]:
    """A target's family and vocabulary from two tensors of its safetensors files: enough to train a drafter on features
    that come from elsewhere. `dtype` as for `load_model`."""
    where, extra = resolve(name)
    if extra:
        raise InputError(
            f"{name!r}: a vocabulary alone is read from safetensors; convert the GGUF file to a directory first"
        )
    config = load_config(name, revision)
    text = config.get_text_config()
    family = read_family(config)
    with _explained(name):
        found = _read_tensors(where, revision, ("embed_tokens.weight", "lm_head.weight"))
    if found["embed_tokens.weight"] is None:
        raise InputError(f"target {name!r} has no tensor named embed_tokens.weight")
    embedding = found["embed_tokens.weight"]
    head = found["lm_head.weight"]
    if head is None:
        if not text.tie_word_embeddings:
            raise InputError(f"target {name!r} has no tensor named lm_head.weight and its embeddings are not tied")
        head = embedding
    kind, home = dtype_of(dtype), pick_device(device)
    kind = own_dtype(config, home) if kind == "auto" else kind
    embedding_, head_ = (
        x.to(device=home, dtype=auto_dtype(x.dtype, home) if kind == "auto" else kind) for x in (embedding, head)
    )
    tied = head is embedding
    return family, Vocab(
        embedding_, embedding_ if tied else head_, softcap=family.softcap, embed_scale=family.embed_scale
    )


def _read_tensors(where: str, revision: str | None, endings: tuple[str, ...]) -> dict[str, Any]:
    """Of a local directory or hub id, the tensor whose name ends like each of `endings`; None where there is none."""
    from safetensors import safe_open

    def file(name: str) -> Path | None:
        if Path(where).is_dir():
            return Path(where) / name if (Path(where) / name).is_file() else None
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError

        try:
            return Path(hf_hub_download(where, name, revision=revision))
        except EntryNotFoundError:
            return None

    index = file("model.safetensors.index.json")
    if index is not None:
        places = json.loads(index.read_text())["weight_map"]
    else:
        single = file("model.safetensors")
        if single is None:
            raise InputError(f"target {where!r} has no safetensors weights")
        with safe_open(single, "pt") as f:
            places = {key: "model.safetensors" for key in f.keys()}  # noqa: SIM118
    result: dict[str, Any] = {}
    for ending in endings:
        keys = [k for k in places if k == ending or k.endswith("." + ending)]
        result[ending] = None
        if keys:
            path = file(places[min(keys, key=len)])
            assert path is not None
            with safe_open(path, "pt") as f:
                result[ending] = f.get_tensor(min(keys, key=len))
    return result


class _explained:
    """Turns transformers' long tracebacks about a missing or broken model into one line."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        from safetensors import SafetensorError

        if isinstance(error, OSError | SafetensorError) or (
            isinstance(error, ValueError | ImportError) and not isinstance(error, InputError)
        ):
            first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise InputError(f"target {self.name!r} cannot be loaded: {first}") from error
