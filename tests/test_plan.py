"""Recipes load, hold the paper's values, and `--plan` says what they take: figures frozen here, no network, no weights.

Dimensions are those of shared/facts/targets.md.
"""

import json
import math
from pathlib import Path

import helpers
import pytest
import torch

import deepspec
from deepspec import cli
from deepspec.modeling import two_parts
from deepspec.train import __main__ as train
from deepspec.train.plan import plan, target_config

ROOT = Path(__file__).parents[1] / "config"
QWEN = {
    "model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "eos_token_id": 151645,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip


def qwen(hidden, mlp, layers, heads, tied=False):
    return QWEN | {
        "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }  # fmt: skip


GEMMA3 = {
    "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 640, "intermediate_size": 2048,
    "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    "max_position_embeddings": 32768, "sliding_window": 512, "tie_word_embeddings": True,
}  # fmt: skip
# of Gemma 4 12B, targets.md knows the vocabulary, width, depth and the head size of full attention; the rest is made up
GEMMA4 = {
    "model_type": "gemma4_unified",
    "text_config": {
        "model_type": "gemma4_unified_text", "vocab_size": 262144, "hidden_size": 3840, "num_hidden_layers": 48,
        "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512, "final_logit_softcapping": 30.0,
        "max_position_embeddings": 262144, "tie_word_embeddings": True,
    },
}  # fmt: skip
SMOLLM2 = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}, "tie_word_embeddings": True, "eos_token_id": 2,
    "pad_token_id": 2, "dtype": "bfloat16",
}  # fmt: skip
TARGETS = {
    "qwen3_4b": qwen(2560, 9728, 36, 32, tied=True),
    "qwen3_8b": qwen(4096, 12288, 36, 32),
    "qwen3_14b": qwen(5120, 17408, 40, 40),
    "gemma3_270m": GEMMA3,
    "gemma4_12b": GEMMA4,
    "smollm2_135m": SMOLLM2,
}
SMALL = ("gemma3_270m", "smollm2_135m")
CELLS = [(kind, name) for kind in ("dspark", "dflash", "eagle3") for name in TARGETS]


@pytest.fixture
def whole(monkeypatch):
    """Attention in one slice: the same sums in fewer operations, which is what a dry run takes its time for."""
    for name in ("SLICE", "SCORES_ALIVE"):
        monkeypatch.setattr(two_parts, name, 1 << 60)


@pytest.fixture
def planned(tmp_path):
    def make(kind, name, *overrides, tokens=1_240_000_000):
        (tmp_path / "target.json").write_text(json.dumps(TARGETS[name]))
        config = deepspec.load_config(ROOT / kind / f"{name}.py", *overrides)
        return plan(config, target_config(config, str(tmp_path / "target.json")), tokens)

    return make


@pytest.mark.parametrize("kind,name", CELLS)
def test_every_recipe_fits_its_target(planned, whole, kind, name):
    """62 tensors for DSpark and 58 for DFlash of five layers, 12 for Eagle3 without q/k norms (formats.md 1.2, 1.4); a
    Gemma 4 layer has no v_proj and three tensors more, a Gemma 3 layer two; a part of the vocabulary needs lm_head, d2t
    and t2d. Eagle3 drafts from every position."""
    p = planned(kind, name)
    layers = 2 if name in SMALL else 5
    more = {"gemma4_12b": 2, "gemma3_270m": 2}.get(name, 0)
    block = 3 + (11 + more) * layers + (4 if kind == "dspark" else 0)
    reduced = 3 if name in SMALL else 0
    assert p.saved_tensors == (12 + more if kind == "eagle3" else block) + reduced
    rows, anchors, slots, length = (2, 40, 5, 512) if name in SMALL else (512, 512, 7, 4096)
    assert p.slots == rows * slots * (length if kind == "eagle3" else anchors)
    text = TARGETS[name].get("text_config", TARGETS[name])
    assert p.frozen["embedding = head" if text["tie_word_embeddings"] else "embedding"] == (
        text["vocab_size"],
        text["hidden_size"],
    )
    assert p.parameters["fc"] == 5 * text["hidden_size"] ** 2
    said = p.text()
    assert "drafter parameters" in said and f"{p.saved_tensors}" in said


@pytest.mark.parametrize("name", ["qwen3_4b", "qwen3_8b", "qwen3_14b", "gemma4_12b"])
def test_recipes_hold_the_papers_values(name):
    ids = {"qwen3_14b": (1, 10, 19, 28, 37), "gemma4_12b": (5, 17, 29, 41, 46)}.get(name, (1, 9, 17, 25, 33))
    for kind in ("dspark", "dflash", "eagle3"):
        c = deepspec.load_config(ROOT / kind / f"{name}.py")
        d, t, x = c.drafter, c.train, c.loss
        assert d.target_layer_ids == ids and d.block_size == 7
        assert (t.lr, t.warmup, t.weight_decay, t.clip, t.precision) == (6e-4, 0.04, 0.0, 1.0, "bf16")
        assert (t.batch_size, t.epochs, c.data.max_length, c.data.min_supervised, c.seed) == (512, 10, 4096, 14, 42)
        assert name in str(c.out) and kind in str(c.out) and name in c.data.path[0]
        if kind == "eagle3":
            assert (x.ce, x.kl, x.tv, x.confidence, x.slot_decay, x.reduce) == (0.0, 1.0, 0.0, 0.0, 0.8, "document")
            assert (d.num_anchors, d.draft_vocab_size, d.qk_norm) == (None, None, False)
            continue
        assert d.mask_token_id == (4 if name == "gemma4_12b" else 151669)
        assert (d.num_draft_layers, d.num_anchors, d.sample_from_anchor) == (5, 512, True)
        assert math.isclose(x.slot_decay, math.exp(-1 / 4)) and x.reduce == "slot"
        if kind == "dspark":
            assert (x.ce, x.kl, x.tv, x.confidence) == (0.1, 0.0, 0.9, 1.0)
            assert (d.markov_rank, d.markov_head_type, d.confidence_head) == (256, "vanilla", True)
        else:
            assert (x.ce, x.kl, x.tv, x.confidence) == (1.0, 0.0, 0.0, 0.0)


def test_frozen_figures_of_qwen3_4b(planned):
    p = planned("dspark", "qwen3_4b")
    V, D, M = 151936, 2560, 9728
    layer = D * (2 * 4096 + 2 * 1024) + 3 * D * M + 2 * 128 + 2 * D
    assert sum(p.parameters.values()) == 5 * D * D + 2 * D + 5 * layer + 2 * V * 256 + D + 256 + 1 == 615_221_249
    assert p.cache_bytes == 1_240_000_000 * (6 * 2560 * 2 + 4) and f"{p.cache_bytes / 1e12:.0f} TB" == "38 TB"
    assert "38.1 TB (30,724 bytes a token)" in p.text()
    assert p.memory["drafter weights"] == p.memory["gradients"] == 4 * 615_221_249
    assert p.memory["target weights"] == 2 * 4_022_468_096
    slots = 512 * 7
    linear = 2 * 4096 * (5 * D * D + 5 * 2 * D * 1024) + 2 * slots * 5 * (layer - 2 * 128 - 2 * D)
    # queries, keys and values of the first layer: of 512 anchors and one mask token
    linear -= 2 * (slots - 512 - 1) * D * (4096 + 2 * 1024)
    attention = 5 * 4 * slots * 32 * 128 * (4096 + 7)
    assert math.isclose(p.flops["drafter, forward and backward"], 512 * 3 * (linear + attention), rel_tol=1e-6)


def test_frozen_figures_of_eagle3_on_qwen3_4b(planned, whole):
    """Of one layer that reads two streams, a token's part made once for all slots; attention of every slot to the whole
    row, and of each but the first to its own other slots."""
    p = planned("eagle3", "qwen3_4b")
    D, M, T, G = 2560, 9728, 4096, 7
    layer = 2 * D * (4096 + 2 * 1024) + 4096 * D + 3 * D * M
    assert sum(p.parameters.values()) == 5 * D * D + layer + 3 * D + D == 149_432_320
    token_part = D * (4096 + 2 * 1024)
    linear = 2 * T * (5 * D * D + G * (layer - token_part) + token_part)
    attention = 4 * 32 * 128 * T * (G * T + (G - 1) ** 2)
    assert math.isclose(p.flops["drafter, forward and backward"], 512 * 3 * (linear + attention), rel_tol=1e-6)
    few = planned("eagle3", "qwen3_4b", "drafter.num_anchors=512")
    assert few.slots == 512 * 512 * 7 and few.flops["drafter, forward and backward"] < sum(p.flops.values()) / 5


def test_settings_change_the_figures(planned, whole):
    """Muon keeps one moment of the layers' matrices where AdamW keeps two; a narrow drafter is smaller; twice the
    tokens are twice the cache."""
    base = planned("dflash", "gemma3_270m")
    muon = planned("dflash", "gemma3_270m", "train.optimizer=muon")
    matrices = 2 * (640 * 1024 * 2 + 2 * 640 * 256 + 3 * 640 * 2048)
    assert base.memory["optimiser (adamw)"] - muon.memory["optimiser (muon)"] == 4 * matrices
    narrow = planned("dflash", "gemma3_270m", "drafter.width=320")
    assert sum(narrow.parameters.values()) < 0.6 * sum(base.parameters.values())
    assert narrow.saved_tensors == base.saved_tensors + 2
    assert planned("dflash", "gemma3_270m", tokens=2_480_000_000).cache_bytes == 2 * base.cache_bytes
    assert base.resolved["train.target_dtype"] == "bfloat16" and base.resolved["(micro-batches a step)"] == 1
    assert planned("dflash", "gemma3_270m", "train.batch_size=6").resolved["(micro-batches a step)"] == 3
    full = planned("dflash", "gemma3_270m", "drafter.draft_vocab_size=None")
    assert full.saved_tensors == base.saved_tensors - 3 and "draft head" not in full.frozen
    assert base.frozen["draft head"] == (16384, 640)
    spared = full.flops["head and loss"] - base.flops["head and loss"]
    assert spared == 2 * 200 * (262144 - 16384) * 2 * (2 * 640)  # the teacher's scores are of all tokens either way


def test_a_recipe_that_does_not_fit_says_so(planned):
    with pytest.raises(deepspec.InputError, match="layer 99 is out of range"):
        planned("dflash", "gemma3_270m", "drafter.target_layer_ids=1,99")
    with pytest.raises(deepspec.InputError, match="eos token"):
        planned("dspark", "qwen3_4b", "drafter.mask_token_id=151645")


def test_what_backward_keeps_is_what_is_planned(tmp_path):
    """The same count on a real drafter of the same shape, for fake tensors replay the real operations."""
    from deepspec.train.plan import _dry_run, _Kept

    hf = helpers.hf_model("qwen3").config
    config = deepspec.Config(
        target="x",
        drafter=helpers.drafter_config("vanilla"),
        loss=deepspec.LossConfig(ce=1.0),
        data=deepspec.DataConfig(path=("x",), max_length=32),
        train=deepspec.TrainConfig(precision="fp32"),
        out=tmp_path,
    )
    from deepspec.modeling.families import read_family

    run = _dry_run(config, read_family(hf), helpers.V, 32)
    target = helpers.target("qwen3")
    drafter = config.drafter.build(target.spec, target.vocab)
    batch = helpers.make_batch(target, rows=1, length=32)
    anchors, _ = drafter.anchors(batch, torch.zeros(1, dtype=torch.long))
    kept = _Kept(drafter)
    with kept:
        hidden = drafter.hidden(batch, anchors)
        drafter.rows(hidden, batch.tokens[:, :1, None].expand(*hidden.shape[:-1]))
    # planned without knowing where anchors fall: as if each slice of them saw the whole row
    assert kept.bytes <= run.kept <= 1.05 * kept.bytes


def test_command_line(tmp_path, monkeypatch, capsys):
    """Reads a config file and no weights; a wrong one is one line and exit code 2."""
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3))
    monkeypatch.chdir(tmp_path)

    def command(target):
        words = ["--config", str(ROOT / "dspark" / "gemma3_270m.py"), "--plan", "--tokens", "1e6"]
        monkeypatch.setattr("sys.argv", ["train", *words, "--target-config", target])
        with pytest.raises(SystemExit) as done:
            cli.main(train.command)
        return done.value.code, *capsys.readouterr()

    code, out, err = command(str(tmp_path))
    assert code == 0 and not err and "7.7 GB (7,684 bytes a token)" in out
    for wrong in ("nothing.json", str(Path(__file__))):
        code, out, err = command(wrong)
        assert code == 2 and err.count("\n") == 1 and not out, err
