"""The matrix of drafters, settings and target families: what a cell is called, and how it is built.

A cell is `kind/setting/family`. Letters: A anchors, G slots, V vocabulary, Vd the kept part of it.
"""

import torch
from helpers import LAYERS, MASK, V, randomize, target

from deepspec import DFlashConfig, DSparkConfig, Eagle3Config
from deepspec.modeling import draft_vocab
from deepspec.modeling.drafter import Drafter

FAMILIES = ("qwen3", "llama", "gemma3", "gemma4")
BLOCK = dict(block_size=4, target_layer_ids=LAYERS, num_draft_layers=2, mask_token_id=MASK, num_anchors=6)
SPARK = BLOCK | dict(markov_rank=6)
EAGLE = dict(block_size=4, target_layer_ids=LAYERS)
MASKS = dict(sample_from_anchor=False, block_size=5)
KINDS = {
    "dflash": (DFlashConfig, BLOCK),
    "dflash-masks": (DFlashConfig, BLOCK | MASKS),
    "vanilla": (DSparkConfig, SPARK),
    "vanilla-masks": (DSparkConfig, SPARK | MASKS),
    "gated": (DSparkConfig, SPARK | dict(markov_head_type="gated")),
    "rnn": (DSparkConfig, SPARK | dict(markov_head_type="rnn")),
    "rank0": (DSparkConfig, BLOCK | dict(markov_rank=0)),
    "no-confidence": (DSparkConfig, SPARK | dict(confidence_head=False)),
    "eagle3": (Eagle3Config, EAGLE),
    "eagle3-qk_norm": (Eagle3Config, EAGLE | dict(qk_norm=True)),
    "eagle3-residual": (Eagle3Config, EAGLE | dict(norm_before_residual=True)),
    "eagle3-norm_fc": (Eagle3Config, EAGLE | dict(norm_before_fc=True)),
    "eagle3-fc_norm": (Eagle3Config, EAGLE | dict(fc_norm=True)),
    "eagle3-output": (Eagle3Config, EAGLE | dict(norm_output=True)),
}
"""Every kind of drafter, its class and settings. All have 4 slots."""
G = 4
SETTINGS = {
    "plain": {},
    "window": dict(sliding_window=6),
    "narrow": dict(width=16),
    "wide": dict(width=48, mlp_width=40),
    "reduced": dict(draft_vocab_size=22),
}
KEPT = torch.arange(V)[torch.arange(V) % 7 < 4][:22]


def allowed(kind: str, setting: str) -> bool:
    """Whether this kind has such a setting."""
    names = {f for f in KINDS[kind][0].__dataclass_fields__}
    return set(SETTINGS[setting]) <= names


CELLS = [f"{k}/{s}/{f}" for k in KINDS for s in SETTINGS for f in FAMILIES if allowed(k, s)]


def quick(cell: str) -> bool:
    """Cells that every run of the tests covers: each kind with each setting on one family, in turn, and the three
    drafters of the paper on every family."""
    kind, setting, family = cell.split("/")
    turn = (list(KINDS).index(kind) + list(SETTINGS).index(setting)) % len(FAMILIES)
    return FAMILIES[turn] == family or (setting == "plain" and kind in ("dflash", "vanilla", "eagle3"))


def config(kind: str, setting: str = "plain", **changes):
    cls, own = KINDS[kind]
    return cls(**{**own, **SETTINGS[setting], **changes})


def build(cell: str, tgt=None, seed: int = 1, **changes) -> Drafter:
    """The drafter of a cell with random weights, norms and layer scalars included."""
    kind, setting, family = cell.split("/")
    tgt = target(family) if tgt is None else tgt
    vocab = draft_vocab.reduce(tgt.vocab, KEPT) if setting == "reduced" else tgt.vocab
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = config(kind, setting, **changes).build(tgt.spec, vocab)
        randomize(made)
    return made.eval()
