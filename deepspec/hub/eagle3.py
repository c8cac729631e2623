"""Eagle3 drafters as others write and read them (facts/formats.md 1.4, 4.5, 5, 6, 7, 10.3).

Read: DeepSpec's (`Qwen3Eagle3Model`: q/k norms, `target_layer_ids`), EAGLE's and SpecForge's (`LlamaForCausalLMEagle3`:
`midlayer.` names, d2t and t2d), ModelOpt's (`eagle_config`) and speculators' (`transformer_layer_config`).
Written: without q/k norms LlamaForCausalLMEagle3, which vLLM and SGLang load; with them Eagle3Qwen3ForCausalLM, which
vLLM alone does; for Gemma targets DeepSpec's form, which no server does.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..checked import InputError
from ..modeling.eagle3 import Eagle3Config
from ..modeling.vocab import Vocab

DEEPSPEC = ("Qwen3Eagle3Model", "Gemma3Eagle3Model", "Gemma4Eagle3Model")
SPECULATORS = ("Eagle3DraftModel", "Eagle3Speculator")
ARCHITECTURES = (
    *DEEPSPEC, *SPECULATORS, "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM",
)  # fmt: skip
SECTIONS = ("transformer_layer_config", "eagle_config", "speculators_config")
"""Objects inside a config.json that say nothing of the block."""
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
RENAMED = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.", "aux_norm_high.": "fc_norm.2.",
}  # fmt: skip
ONLY = {
    "attention_bias": False, "mlp_bias": False, "is_neox_style": True, "logit_scale": 1.0, "pretraining_tp": 1,
    "eagle_config.use_aux_hidden_state": True, "eagle_config.use_input_layernorm_in_first_layer": True,
    "eagle_config.use_last_layernorm": True, "eagle_config.use_mtp_layernorm": False,
}  # fmt: skip
"""Keys of others' configs and the one value of each that this project implements."""


def is_eagle3(raw: dict[str, Any], keys: set[str]) -> bool:
    """Whether a config.json (and the names of its tensors) is an Eagle3 drafter's. EAGLE's own say LlamaForCausalLM."""
    architecture = (raw.get("architectures") or ["?"])[0]
    return architecture in ARCHITECTURES or (architecture == "LlamaForCausalLM" and "fc.weight" in keys)


def rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under this project's names, without what is computed from the config."""
    named = {}
    for name, value in tensors.items():
        if name.endswith("rotary_emb.inv_freq"):
            continue
        for old, new in RENAMED.items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
        if name in named:
            raise InputError(f"two tensors are called {name}")
        named[name] = value
    return named


def flat(raw: dict[str, Any]) -> dict[str, Any]:
    """A config whose backbone is nested (speculators) as one object."""
    return {**(raw.get("transformer_layer_config") or {}), **raw}


def from_json(raw: dict[str, Any], keys: set[str], num_layers: int | None) -> Eagle3Config:
    """Settings of an Eagle3 drafter for a target of num_layers layers; keys: names of its tensors, renamed."""
    for key, only in ONLY.items():
        section, _, name = key.rpartition(".")
        value = ((raw.get(section) or {}) if section else raw).get(name)
        if value is not None and value != only:
            raise InputError(f"config.json says {key} = {value!r}; this version reads Eagle3 with {only!r} alone")
    width, own = raw.get("target_hidden_size"), raw.get("hidden_size")
    if width not in (None, own):
        raise InputError(f"target_hidden_size is {width}, hidden_size {own}; this version reads equal widths alone")
    proposals = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    lengths = (raw.get("block_size"), raw.get("ttt_length"), proposals[0].get("speculative_tokens"), 7)
    return Eagle3Config(
        block_size=next(x for x in lengths if x),
        target_layer_ids=_layer_ids(raw, num_layers),
        num_draft_layers=raw.get("draft_num_hidden_layers") or raw.get("num_hidden_layers", 1),
        qk_norm="layers.0.self_attn.q_norm.weight" in keys,
        draft_vocab_size=_draft_size(raw, keys),
        **{flag: bool(raw.get(flag, False)) for flag in FLAGS},
    )


def check_target(raw: dict[str, Any], vocab: Vocab) -> None:
    """InputError where a drafter that reads plain embeddings meets a target that scales them (Gemma): servers' and
    trainers' Eagle3 classes use the table's rows as they are and cap no logits."""
    architecture = (raw.get("architectures") or ["?"])[0]
    if architecture not in DEEPSPEC and "deepspec" not in raw and vocab.embed_scale is not None:
        raise InputError(
            f"{architecture} reads unscaled embeddings; with a target that scales them, only "
            f"{', '.join(DEEPSPEC[1:])} can be read"
        )


def _draft_size(raw: dict[str, Any], keys: set[str]) -> int | None:
    size = raw.get("draft_vocab_size")
    return size if size != raw.get("vocab_size") and "lm_head.weight" in keys else None


def _layer_ids(raw: dict[str, Any], num_layers: int | None) -> tuple[int, ...]:
    """0-based layers whose outputs are read, whichever of two conventions a key uses."""
    nested = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    top = raw.get("eagle_aux_hidden_state_layer_ids")
    captured = None if top is None else [i - 1 for i in top]  # counts layers already run
    named = [ids for ids in (raw.get("target_layer_ids"), nested, captured) if ids is not None]
    if not named:
        if num_layers is None:
            raise InputError("config.json names no target layers")
        return 1, num_layers // 2 - 1, num_layers - 4  # what EAGLE and every server take where nothing is said
    if any(list(ids) != list(named[0]) for ids in named):
        raise InputError(
            f"config.json names different target layers: target_layer_ids {raw.get('target_layer_ids')}, "
            f"eagle_config {nested}, eagle_aux_hidden_state_layer_ids {top} (these count from 1)"
        )
    return tuple(named[0])


def to_json(config: Eagle3Config, model_type: str, vocab: Vocab) -> dict[str, Any]:
    """What an Eagle3 drafter's config.json has beside its block's dimensions; model_type: what describes that block."""
    ids = list(config.target_layer_ids)
    architecture = "Eagle3Qwen3ForCausalLM"
    if model_type != "qwen3":
        architecture = model_type.removesuffix("_text").capitalize() + "Eagle3Model"
    elif not config.qk_norm:
        model_type, architecture = "llama", "LlamaForCausalLMEagle3"
    return {
        "architectures": [architecture],
        "model_type": model_type,
        # null is "the target's own head": none is saved then
        "draft_vocab_size": vocab.draft_size if vocab.has_own_head else None,
        "ttt_length": config.block_size,
        "num_aux_hidden_states": len(ids),
        "num_aux_layers": len(ids),
        "target_layer_ids": ids,
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in ids],  # vLLM counts layers already run
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids},  # SGLang does not
        **{flag: getattr(config, flag) for flag in FLAGS},
    }
