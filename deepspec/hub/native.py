"""DeepSpec's own drafter format, which vLLM and SGLang read: config.json + model.safetensors.

config.json is a Qwen3-style config (block drafters have q/k norms on every family; Gemma blocks have a Gemma config)
plus the drafter's keys, plus a `deepspec` section with our own provenance. The target's embedding and head are never
written; where a checkpoint of another trainer carries copies of them, the target's own are used. A head of a drafter's
own (rows of a reduced vocabulary, Eagle3's trained ones) is kept. What is different for Eagle3 is in eagle3.py.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cache import whole_dir
from ..checked import InputError
from ..modeling import draft_vocab
from ..modeling.block import BlockConfig
from ..modeling.dflash import DFlashConfig
from ..modeling.drafter import Drafter, DrafterConfig
from ..modeling.dspark import DSparkConfig
from ..modeling.eagle3 import Eagle3Config
from ..modeling.families import read_family
from ..modeling.spec import BlockSpec
from ..modeling.vocab import Vocab
from . import eagle3

COPIES = {"embed_tokens.weight": "embedding", "lm_head.weight": "head"}
"""Copies of the target's tensors that other trainers save, and what they are called in Vocab."""
PREFIXES = ("_orig_mod.", "module.", "model.")


def save_drafter(drafter: Drafter, path: Path, provenance: dict[str, Any]) -> None:
    """Write a drafter directory, all of it or nothing. InputError where anything but a drafter of ours is there."""
    if path.exists() and not _replaceable(path):
        raise InputError(f"{str(path)!r} exists and is no drafter directory; nothing of it will be overwritten")
    with whole_dir(path) as temporary:
        write_drafter(drafter, temporary, provenance)


def _replaceable(path: Path) -> bool:
    """Whether nothing would be lost: an empty directory, or one that holds a drafter we wrote and nothing else."""
    if not path.is_dir():
        return False
    names = {p.name for p in path.iterdir()}
    return not names or (names <= {"config.json", "model.safetensors"} and "deepspec" in read_config(path))


def write_drafter(
    drafter: Drafter, folder: Path, provenance: dict[str, Any], weights: dict[str, Tensor] | None = None
) -> None:
    """Write config.json and model.safetensors into an existing folder. `weights`: the drafter's own tensors where it
    holds only a part of them. InputError where `provenance` has a key that we use."""
    from safetensors.torch import save_file

    weights = drafter.state_dict() if weights is None else weights
    tensors = {name: value.detach().contiguous() for name, value in weights.items()}
    dtype = next(iter(tensors.values())).dtype
    tensors |= {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in draft_vocab.to_tensors(drafter.vocab).items()
    }
    config = to_json(drafter.config, drafter.spec, drafter.vocab, dtype=dtype)
    if taken := sorted(config["deepspec"].keys() & provenance.keys()):
        raise InputError(f"provenance may not be called {' or '.join(taken)}: that describes the drafter itself")
    config["deepspec"] |= provenance
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def to_json(config: DrafterConfig, spec: BlockSpec, vocab: Vocab, *, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of a drafter: its block, its kind's own keys, and ours."""
    model_type, style = _style(spec, vocab)
    if isinstance(config, Eagle3Config):
        window, own = None, eagle3.to_json(config, model_type, vocab)
    elif isinstance(config, BlockConfig):
        window, own = config.sliding_window, _block_json(config, model_type, vocab)
    else:
        raise TypeError(f"no format for {type(config).__name__} yet")
    rope = {key: json.loads(value) for key, value in spec.rope}
    if window is not None and "full_attention" in rope:
        rope["sliding_attention"] = rope["full_attention"]  # layer types choose the mask here, not the rotary
    name = str(dtype).removeprefix("torch.")
    return {
        "dtype": name,
        "torch_dtype": name,
        "hidden_size": spec.dim,
        "target_hidden_size": vocab.dim,
        "num_target_layers": spec.target_layers or None,
        "num_hidden_layers": config.num_draft_layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.mlp_dim,
        "hidden_act": spec.act,
        "rms_norm_eps": spec.norm_eps,
        "vocab_size": vocab.size,
        "max_position_embeddings": spec.max_positions,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": ["sliding_attention" if window else "full_attention"] * config.num_draft_layers,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "tie_word_embeddings": False,
        **style,
        "rope_parameters": rope,
        "rope_theta": rope.get("rope_theta"),
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        **own,
        "deepspec": {"format": 1, "drafter": config_to_json(config)},
    }


def _block_json(config: BlockConfig, model_type: str, vocab: Vocab) -> dict[str, Any]:
    """Keys of a block drafter (and their traps: facts/formats.md 1.1 and 10.2)."""
    spark = config if isinstance(config, DSparkConfig) else None
    ids = list(config.target_layer_ids)
    prefix = model_type.removesuffix("_text").capitalize()
    return {
        "architectures": [f"{prefix}DSparkModel" if config.sample_from_anchor else "DFlashDraftModel"],
        "model_type": model_type,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": ids,
        "num_anchors": config.num_anchors,
        "markov_rank": spark.markov_rank if spark else 0,
        "markov_head_type": spark.markov_head_type if spark else "vanilla",
        "enable_confidence_head": spark.confidence_head if spark else False,
        "confidence_head_with_markov": bool(spark and spark.confidence_head and spark.confidence_reads_markov),
        "sample_from_anchor": config.sample_from_anchor,
        # never sample_from_anchor in here: vLLM's DSpark loader refuses it
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": ids,
            "block_size": config.block_size,
            # servers take sliding layers for causal ones otherwise
            **({} if config.sliding_window is None else {"causal": False}),
        },
        **({"draft_vocab_size": vocab.draft_size} if vocab.has_own_head else {}),
    }  # fmt: skip


def _style(spec: BlockSpec, vocab: Vocab) -> tuple[str, dict[str, Any]]:
    """The model_type that describes this block, and the keys it has beyond Qwen3's."""
    if not spec.sandwich:
        return "qwen3", {}
    gemma = {
        "hidden_activation": spec.act,
        "final_logit_softcapping": vocab.softcap,
        "use_bidirectional_attention": None,
    }
    if not spec.layer_scalar:
        return "gemma3_text", gemma | {"query_pre_attn_scalar": round(spec.attn_scale**-2)}
    return "gemma4_text", gemma | {
        "global_head_dim": spec.head_dim,
        "num_global_key_value_heads": spec.kv_heads,
        "attention_k_eq_v": spec.share_kv,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": False,
    }


def config_to_json(config: DrafterConfig) -> dict[str, Any]:
    return {"kind": type(config).__name__.removesuffix("Config").lower(), **dataclasses.asdict(config)}


def from_json(raw: dict[str, Any], keys: set[str], num_layers: int | None = None) -> DrafterConfig:
    """The drafter's settings from its config.json; `keys` are the names of its tensors, num_layers the target's."""
    kinds = {"dflash": DFlashConfig, "dspark": DSparkConfig, "eagle3": Eagle3Config}
    section = raw.get("deepspec")
    own = section.get("drafter") if isinstance(section, dict) else None
    if isinstance(own, dict):
        kind, settings = own.get("kind"), {k: v for k, v in own.items() if k != "kind"}
        if kind not in kinds:
            raise InputError(f"drafter kind {kind!r} is unknown; this version reads {', '.join(kinds)}")
        try:
            return kinds[kind](**settings)
        except TypeError as error:  # a setting of another version
            raise InputError(f"config.json, deepspec.drafter: {error}") from None
    if eagle3.is_eagle3(raw, keys):
        return eagle3.from_json(raw, keys, num_layers)
    nested = raw.get("dflash_config") or {}
    look = {**nested, **{k: v for k, v in raw.items() if v is not None}}
    architecture = (raw.get("architectures") or ["?"])[0]
    known = ("Qwen3DSparkModel", "Gemma4DSparkModel", "DSparkDraftModel", "DFlashDraftModel")
    if architecture not in known:
        readable = ", ".join((*known, *eagle3.ARCHITECTURES))
        raise InputError(f"drafter architecture {architecture!r} is unknown; this version reads {readable}")
    missing = [k for k in ("block_size", "mask_token_id", "target_layer_ids", "num_hidden_layers") if k not in look]
    if missing:
        raise InputError(f"config.json has no {', '.join(missing)}")
    from_anchor = look.get("sample_from_anchor", architecture != "DFlashDraftModel" or bool(nested.get("shift_label")))
    common = {
        "block_size": look["block_size"],
        "target_layer_ids": look["target_layer_ids"],
        "mask_token_id": look["mask_token_id"],
        "num_draft_layers": raw["num_hidden_layers"],
        "num_anchors": look.get("num_anchors", 512),
        "sample_from_anchor": from_anchor,
        "sliding_window": _window(raw, nested),
    }
    markov = "markov_head.markov_w1.weight" in keys
    confidence = "confidence_head.proj.weight" in keys
    if not markov and not confidence:
        return DFlashConfig(**common)
    return DSparkConfig(
        **common,
        markov_head_type=look.get("markov_head_type") or "vanilla",
        markov_rank=look.get("markov_rank", 256) if markov else 0,
        confidence_head=confidence,
        confidence_with_markov=look.get("confidence_head_with_markov", markov),
        draft_vocab_size=look.get("draft_vocab_size") if "d2t" in keys else None,
    )


def _window(raw: dict[str, Any], nested: dict[str, Any]) -> int | None:
    """The window of a foreign drafter's layers, None where there is none. InputError where its layers differ, or where
    its blocks are causal: a drafter decoded with another mask than it was trained with only drafts worse."""
    kinds = set(raw.get("layer_types") or ["full_attention"])
    if kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"} or nested.get("causal") is not False:
        raise InputError(
            f"layer_types {sorted(kinds)} with dflash_config.causal {nested.get('causal')}: sliding layers are read "
            "where all layers are sliding and dflash_config.causal is false"
        )
    return int(raw["sliding_window"])


def read_spec(raw: dict[str, Any]) -> BlockSpec:
    """The drafter's own block, from its config.json: its family, widths and rotary may differ from the target's."""
    from transformers import AutoConfig

    kind = str(raw.get("model_type"))
    kind = kind if kind.startswith("gemma") or kind == "llama" else "qwen3"
    skip = {"deepspec", "dflash_config", "architectures", "model_type", "auto_map", "torch_dtype", *eagle3.SECTIONS}
    fields = {k: v for k, v in raw.items() if k not in skip}
    if kind.startswith("gemma"):  # of a Gemma, the rotary of full attention is read, whatever the window
        rope = {k: v for k, v in (raw.get("rope_parameters") or {}).items() if isinstance(v, dict)}
        full = ["full_attention"] * raw["num_hidden_layers"]
        fields |= {"layer_types": full, "sliding_window": 512, "rope_parameters": rope or None}
    if fields.get("rope_parameters"):
        fields.pop("rope_scaling", None)
        fields.pop("rope_theta", None)
    block = read_family(AutoConfig.for_model(kind, **fields)).block
    return dataclasses.replace(block, target_layers=raw.get("num_target_layers") or 0)


def load_drafter(path: str | Path, target: Any, *, dtype: str | torch.dtype = "target") -> Drafter:
    """A drafter from a directory or hub id, on the target's device, in its dtype (or in `dtype`).

    Reads DeepSpec's format, z-lab's DFlash and the formats of Eagle3. InputError where it is none, is broken, or
    belongs to another target.
    """
    folder = find_drafter(path)
    raw, tensors = eagle3.flat(read_config(folder)), read_tensors(folder)
    try:
        tensors = eagle3.rename(tensors)
        config = from_json(raw, set(tensors), target.num_layers)
        _check_target(str(path), raw, config, target)
        if isinstance(config, Eagle3Config):
            eagle3.check_target(raw, target.vocab)
        _check_copies(str(path), tensors, target, head=isinstance(config, Eagle3Config) or "d2t" in tensors)
        drafter = config.build(_spec_of(str(path), raw), draft_vocab.from_tensors(target.vocab, tensors))
    except InputError as error:
        named = str(error).startswith(f"drafter {str(path)!r}")
        raise error if named else InputError(f"drafter {str(path)!r}: {error}") from None
    expected = {name: tuple(value.shape) for name, value in drafter.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in tensors.items()}
    if expected != found:
        raise InputError(f"drafter {str(path)!r}: {_difference(expected, found)}")
    drafter.load_state_dict(tensors)
    kind = target.dtype if dtype == "target" else dtype
    return drafter.to(device=target.device, dtype=getattr(torch, kind) if isinstance(kind, str) else kind).eval()


def find_drafter(path: str | Path) -> Path:
    """The directory with config.json: the path itself, its `drafter/` (a run directory), or a hub snapshot."""
    local = Path(path).expanduser()
    for folder in (local, local / "drafter"):
        if (folder / "config.json").is_file():
            return folder
    name = str(path)
    if local.exists() or local.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise InputError(f"no drafter in {name!r}: a drafter directory holds config.json and model.safetensors")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["config.json", "*.safetensors*"]))
    except Exception as error:
        raise InputError(
            f"drafter {name!r} is neither a directory nor a hub repository that can be read: "
            f"{str(error).splitlines()[0]}"
        ) from None


def read_config(folder: Path) -> dict[str, Any]:
    try:
        raw = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:  # not UTF-8, not JSON
        raise InputError(f"{folder / 'config.json'} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{folder / 'config.json'} must hold an object")
    return raw


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a drafter's safetensors files, prefixes of wrappers removed."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError(f"{folder} has no model.safetensors")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file} is truncated or damaged: {error}") from None
    return {_strip(name): value for name, value in tensors.items()}


def _strip(name: str) -> str:
    while name.startswith(PREFIXES):  # wrappers wrap each other in any order
        name = name.split(".", 1)[1]
    return name


def _spec_of(path: str, raw: dict[str, Any]) -> BlockSpec:
    from huggingface_hub.errors import StrictDataclassError

    try:
        return read_spec(raw)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise InputError(f"drafter {path!r}: config.json describes no block: {' '.join(str(error).split())}") from None


def _check_target(path: str, raw: dict[str, Any], config: DrafterConfig, target: Any) -> None:
    hidden = raw.get("target_hidden_size") or raw.get("hidden_size")
    if hidden != target.spec.dim:
        raise InputError(
            f"drafter {path!r} is for a target of hidden size {hidden}; {target.name!r} has {target.spec.dim}"
        )
    if raw.get("vocab_size") != target.vocab.size:
        raise InputError(
            f"drafter {path!r} is for a vocabulary of {raw.get('vocab_size')}; {target.name!r} has {target.vocab.size}"
        )
    config.check_target(num_layers=target.num_layers, vocab_size=target.vocab.size, special_ids={})


def _check_copies(path: str, tensors: dict[str, Tensor], target: Any, *, head: bool) -> None:
    """Take copies of the target's tensors out of `tensors`; warn where they are not the target's own. head: whether the
    drafter may have one of its own, which is left for draft_vocab."""
    for name, attribute in COPIES.items():
        if head and attribute == "head":
            continue
        copy = tensors.pop(name, None)
        if copy is None:
            continue
        own = getattr(target.vocab, attribute)
        if copy.shape != own.shape or not torch.equal(copy.to(own), own):
            warnings.warn(
                f"drafter {path!r} carries {name} that differs from the target's; the target's is used", stacklevel=3
            )


def _difference(expected: dict[str, Any], found: dict[str, Any]) -> str:
    parts = []
    if missing := sorted(expected.keys() - found.keys()):
        parts.append(
            f"missing {', '.join(missing[:3])}" + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        )
    if extra := sorted(found.keys() - expected.keys()):
        parts.append(f"unexpected {', '.join(extra[:3])}" + (f" and {len(extra) - 3} more" if len(extra) > 3 else ""))
    for name in sorted(expected.keys() & found.keys()):
        if expected[name] != found[name]:
            parts.append(f"{name} is {list(found[name])}, should be {list(expected[name])}")
            break
    return "tensors do not fit its config: " + "; ".join(parts)
