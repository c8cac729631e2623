"""config.json of DFlash and DSpark drafters: DeepSpec's keys, and z-lab's `dflash_config` (facts/formats.md 1 to 3).

Written: Qwen3DSparkModel, which vLLM and SGLang load, or z-lab's DFlashDraftModel where masks predict their own place;
for Gemma targets, whose blocks are their own, Gemma4DSparkModel (vLLM) and Gemma3DSparkModel, which no server has: none
taps a Gemma 3 for a block drafter, and under another name one would leave out norms without saying so.
"""

from __future__ import annotations

from typing import Any

from ..checked import InputError
from ..modeling.block import BlockConfig
from ..modeling.dflash import DFlashConfig
from ..modeling.dspark import DSparkConfig
from ..modeling.vocab import Vocab
from . import eagle3

ARCHITECTURES = ("Qwen3DSparkModel", "Gemma4DSparkModel", "DSparkDraftModel", "DFlashDraftModel")
"""Read without a section of our own."""


def to_json(config: BlockConfig, model_type: str, vocab: Vocab) -> dict[str, Any]:
    """Keys of a block drafter (and their traps: facts/formats.md 1.1 and 10.2)."""
    spark = config if isinstance(config, DSparkConfig) else None
    ids = list(config.target_layer_ids)
    prefix = model_type.removesuffix("_text").capitalize()
    zlab = model_type == "qwen3" and not config.sample_from_anchor
    return {
        "architectures": ["DFlashDraftModel" if zlab else f"{prefix}DSparkModel"],
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


def from_json(raw: dict[str, Any], keys: set[str]) -> BlockConfig:
    """Settings of a block drafter from its config.json; `keys` are the names of its tensors."""
    nested = raw.get("dflash_config") or {}
    look = {**nested, **{k: v for k, v in raw.items() if v is not None}}
    architecture = (raw.get("architectures") or ["?"])[0]
    if architecture not in ARCHITECTURES:
        readable = ", ".join((*ARCHITECTURES, *eagle3.ARCHITECTURES))
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
        "draft_vocab_size": look.get("draft_vocab_size") if "d2t" in keys else None,
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
