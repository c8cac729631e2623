"""Laws of drafter directories: what is saved is what servers read and what loads again, whole or not at all."""

import dataclasses
import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from helpers import KINDS, LAYERS, MASK, V, drafter_config, hf_model, make_batch, make_drafter, target
from safetensors.torch import load_file, save_file
from test_golden import CASES, HERE

import deepspec
from deepspec import InputError, Target, load_drafter
from deepspec.hub.load import read_spec

kinds = pytest.mark.parametrize("kind", KINDS)
BACKBONE = ["fc.weight", "hidden_norm.weight", "norm.weight"] + [
    f"layers.{n}.{name}.weight"
    for n in range(5)
    for name in (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "self_attn.q_norm",
        "self_attn.k_norm",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
        "input_layernorm",
        "post_attention_layernorm",
    )
]
"""The 58 tensors of a published five-layer DFlash checkpoint."""
MARKOV = ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"]
CONFIDENCE = ["confidence_head.proj.weight", "confidence_head.proj.bias"]
HEADS = {
    "dflash": [],
    "dflash-masks": [],
    "vanilla": MARKOV + CONFIDENCE,
    "gated": [*MARKOV, "markov_head.gate_proj.weight", "markov_head.gate_proj.bias", *CONFIDENCE],
    "rnn": [*MARKOV, "markov_head.joint_proj.weight", "markov_head.joint_proj.bias", *CONFIDENCE],
    "rnn-masks": [*MARKOV, "markov_head.joint_proj.weight", "markov_head.joint_proj.bias", *CONFIDENCE],
    "rank0": CONFIDENCE,
    "no-confidence": MARKOV,
    "confidence-alone": MARKOV + CONFIDENCE,
}


def edit(folder: Path, **changes) -> None:
    """Change config.json; a value of None removes the key. Our own section goes unless it is given."""
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("deepspec", None)
    raw |= changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))


@kinds
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
def test_round_trip(kind, family, tmp_path):
    """save and load: equal settings, spec and slots, bit-equal tensors, the same states of a batch; for every kind and
    family, read from our own section and from the keys that other tools write."""
    tgt = target(family)
    drafter = make_drafter(kind, tgt)
    drafter.save(tmp_path / "d", note="made by a test")
    batch, anchors = make_batch(tgt), torch.tensor([[2, 5], [3, 8]])
    for foreign in (False, True):
        if foreign:
            edit(tmp_path / "d")
        again = load_drafter(tmp_path / "d", tgt)
        if foreign and kind in ("rank0", "no-confidence"):  # there is no Markov embedding to read, or nobody to read it
            drafter.config = dataclasses.replace(drafter.config, confidence_with_markov=False)
        assert type(again) is type(drafter) and again.config == drafter.config
        assert again.spec == drafter.spec and not again.training
        for name, value in drafter.state_dict().items():
            assert torch.equal(again.state_dict()[name], value)
        with torch.no_grad():
            assert torch.equal(again.hidden(batch, anchors), drafter.hidden(batch, anchors))
        assert again.vocab is tgt.vocab


@kinds
def test_tensor_names_are_the_published_ones(kind, tmp_path):
    """58 backbone names for five layers, 62 with a vanilla head and confidence; shapes by the published rule; neither
    embedding nor head; the file is plain safetensors of contiguous float tensors."""
    tgt = target()
    make_drafter(kind, tgt, num_draft_layers=5).save(tmp_path / "d")
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == ["config.json", "model.safetensors"]
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    assert sorted(tensors) == sorted(BACKBONE + HEADS[kind])
    assert len(BACKBONE) == 58 and (kind != "vanilla" or len(tensors) == 62)
    D, Q, K, H, M, R = 32, 4, 2, 16, 48, 6
    want = {
        "fc": (D, len(LAYERS) * D),
        "q_proj": (Q * H, D),
        "k_proj": (K * H, D),
        "v_proj": (K * H, D),
        "o_proj": (D, Q * H),
        "q_norm": (H,),
        "k_norm": (H,),
        "gate_proj": (M, D),
        "up_proj": (M, D),
        "down_proj": (D, M),
        "markov_w1": (V, R),
        "markov_w2": (V, R),
        "joint_proj": (3 * R, 2 * R + D),
    }
    for name, value in tensors.items():
        module = name.split(".")[-2]
        if name == "confidence_head.proj.weight":
            shape = (1, D + (0 if kind in ("rank0", "confidence-alone") else R))
        elif name == "markov_head.gate_proj.weight":
            shape = (R, D + R)
        elif name.endswith("bias"):
            shape = {"proj": (1,), "gate_proj": (R,), "joint_proj": (3 * R,)}[module]
        else:
            shape = want.get(module, (D,))
        assert tuple(value.shape) == shape, name


@kinds
def test_config_serves_in_both_engines(kind, tmp_path):
    """config.json holds every key that vLLM and SGLang read, with the right value, and none of the traps: rope twice
    and alike, confidence keys explicit, sample_from_anchor at the top and never inside dflash_config."""
    tgt = target()
    drafter = make_drafter(kind, tgt)
    drafter.save(tmp_path / "d")
    raw = json.loads((tmp_path / "d" / "config.json").read_text())
    c, spark = drafter.config, "dflash" not in kind
    from_anchor = "masks" not in kind
    want = dict(
        model_type="qwen3",
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=48,
        rms_norm_eps=1e-6,
        vocab_size=V,
        max_position_embeddings=256,
        num_hidden_layers=2,
        layer_types=["full_attention"] * 2,
        tie_word_embeddings=False,
        block_size=c.block_size,
        mask_token_id=MASK,
        target_layer_ids=list(LAYERS),
        markov_rank=c.markov_rank if spark else 0,
        enable_confidence_head=spark and c.confidence_head,
        confidence_head_with_markov=kind in ("vanilla", "gated", "rnn", "rnn-masks"),
        sample_from_anchor=from_anchor,
        rope_theta=10000.0,
        rope_scaling=None,
        dtype="float32",
        torch_dtype="float32",
        hidden_act="silu",
        attention_bias=False,
        architectures=["Qwen3DSparkModel" if from_anchor else "DFlashDraftModel"],
        dflash_config=dict(mask_token_id=MASK, target_layer_ids=list(LAYERS), block_size=c.block_size),
    )
    assert {k: raw.get(k, "absent") for k in want} == want
    assert raw["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert raw["markov_head_type"] == (c.markov_head_type if spark else "vanilla")
    assert "auto_map" not in raw and "eagle_aux_hidden_state_layer_ids" not in raw
    assert raw["deepspec"]["format"] == 1 and raw["deepspec"]["drafter"]["kind"] == ("dspark" if spark else "dflash")


def test_config_counts_the_targets_layers(tmp_path):
    """num_target_layers is among the keys of the published format."""
    make_drafter("vanilla", target()).save(tmp_path / "d")
    assert json.loads((tmp_path / "d" / "config.json").read_text()).get("num_target_layers") == 4


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
def test_the_drafters_block_is_the_targets(family, tmp_path):
    """Reading the saved config gives back the target's spec to the bit, llama3 rope scaling included, also where only
    the older keys rope_theta and rope_scaling are left."""
    tgt = target(family)
    make_drafter("dflash", tgt).save(tmp_path / "d")
    raw = json.loads((tmp_path / "d" / "config.json").read_text())
    assert read_spec(raw) == tgt.spec
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == (50000.0 if family == "llama" else 10000.0)
    if family == "llama":
        assert raw["rope_scaling"]["rope_type"] == "llama3" and raw["rope_scaling"]["factor"] == 4.0
    raw.pop("rope_parameters")
    assert read_spec(raw).inv_freq == tgt.spec.inv_freq
    assert read_spec(raw).rope_factor == tgt.spec.rope_factor


def test_provenance_is_kept(tmp_path):
    """What save is told stands in the deepspec section, beside what the drafter is."""
    make_drafter("vanilla", target()).save(tmp_path / "d", step=7, data={"rows": 3})
    section = json.loads((tmp_path / "d" / "config.json").read_text())["deepspec"]
    assert section["step"] == 7 and section["data"] == {"rows": 3} and section["drafter"]["block_size"] == 4


def test_dtypes(tmp_path):
    """A drafter is saved in its own dtype, named in the config, and loaded in the target's or the one asked for."""
    tgt = target()
    drafter = make_drafter("vanilla", tgt).to(torch.bfloat16)
    drafter.save(tmp_path / "d")
    assert json.loads((tmp_path / "d" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {t.dtype for t in load_file(tmp_path / "d" / "model.safetensors").values()} == {torch.bfloat16}
    for dtype, want in (("target", torch.float32), ("bfloat16", torch.bfloat16), (torch.float16, torch.float16)):
        again = load_drafter(tmp_path / "d", tgt, dtype=dtype)
        assert {p.dtype for p in again.parameters()} == {want} and again.rotary.inv_freq.dtype == torch.float32
    half = Target(hf_model("qwen3").bfloat16())
    assert {p.dtype for p in load_drafter(tmp_path / "d", half).parameters()} == {torch.bfloat16}


def test_zlab_checkpoints(tmp_path):
    """A z-lab DFlash checkpoint, block_size and ids inside dflash_config, no word about the anchor: masks predict their
    own position, block_size - 1 slots. With shift_label the anchor predicts."""
    tgt = target()
    make_drafter("dflash-masks", tgt).save(tmp_path / "d")
    nested = dict(block_size=5, mask_token_id=MASK, target_layer_ids=list(LAYERS))
    edit(
        tmp_path / "d",
        block_size=None,
        mask_token_id=None,
        target_layer_ids=None,
        sample_from_anchor=None,
        dflash_config=nested,
    )
    drafter = load_drafter(tmp_path / "d", tgt)
    assert isinstance(drafter.config, deepspec.DFlashConfig) and drafter.num_slots == 4
    edit(tmp_path / "d", dflash_config={**nested, "shift_label": True})
    assert load_drafter(tmp_path / "d", tgt).num_slots == 5


# -- other people's files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_golden_checkpoints_load_with_copies_of_the_vocabulary(name, tmp_path):
    """DeepSpec saves frozen copies of embedding and head: equal ones are dropped in silence, one that differs is
    warned of by name and the target's own is used."""
    tgt = Target.load(str(HERE / name / "target"))
    folder = tmp_path / "d"
    shutil.copytree(HERE / name / "drafter", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {"embed_tokens.weight": tgt.vocab.embedding.clone(), "lm_head.weight": tgt.vocab.head.clone()}
    save_file(tensors, folder / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drafter = load_drafter(folder, tgt)
    assert drafter.num_slots == json.loads((HERE / name / "meta.json").read_text())["block_size"]
    for copy in ("embed_tokens.weight", "lm_head.weight"):
        save_file({**tensors, copy: tensors[copy] + 1}, folder / "model.safetensors")
        with pytest.warns(UserWarning, match=copy):
            assert load_drafter(folder, tgt).vocab is tgt.vocab


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "model.", "_orig_mod.module.", "module._orig_mod."])
def test_prefixes_of_wrappers_are_dropped(prefix, tmp_path):
    """Tensors saved through torch.compile, DistributedDataParallel, both in either order, or as part of a model."""
    tgt = target()
    drafter = make_drafter("rnn", tgt)
    drafter.save(tmp_path / "d")
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    save_file({prefix + k: v for k, v in tensors.items()}, tmp_path / "d" / "model.safetensors")
    again = load_drafter(tmp_path / "d", tgt)
    assert all(torch.equal(again.state_dict()[k], v) for k, v in tensors.items())


def test_where_a_drafter_is_looked_for(tmp_path):
    """The directory itself, or the `drafter` in a run directory."""
    tgt = target()
    make_drafter("dflash", tgt).save(tmp_path / "run" / "drafter")
    for path in (tmp_path / "run" / "drafter", tmp_path / "run", str(tmp_path / "run")):
        assert load_drafter(path, tgt).num_slots == 4


def tensors_changed(change):
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return spoil


def own_changed(**changes):
    def spoil(folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text())
        raw["deepspec"]["drafter"] |= changes
        (folder / "config.json").write_text(json.dumps(raw))

    return spoil


SPOILT = {
    "truncated": lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-100]),
    "empty weights": lambda d: (d / "model.safetensors").write_bytes(b""),
    "no weights": lambda d: (d / "model.safetensors").unlink(),
    "missing tensor": tensors_changed(lambda t: t.pop("layers.1.mlp.up_proj.weight")),
    "extra tensor": tensors_changed(lambda t: t.update({"layers.9.mlp.up_proj.weight": torch.zeros(2)})),
    "misshapen tensor": tensors_changed(lambda t: t.update({"fc.weight": t["fc.weight"][:, :5].contiguous()})),
    "not JSON": lambda d: (d / "config.json").write_text("{"),
    "a list": lambda d: (d / "config.json").write_text("[]"),
    "not text": lambda d: (d / "config.json").write_bytes(b"\xff\xfe\x00"),
    "no config": lambda d: (d / "config.json").unlink(),
    "no layers": lambda d: edit(d, num_hidden_layers=None),
    "no block size": lambda d: edit(d, block_size=None, dflash_config=None),
    "odd architecture": lambda d: edit(d, architectures=["GPT2LMHeadModel"]),
    "block size of words": lambda d: edit(d, block_size="seven"),
    "unsorted layers": lambda d: edit(d, target_layer_ids=[2, 0]),
    "layer out of range": lambda d: edit(d, target_layer_ids=[0, 4]),
    "mask out of range": lambda d: edit(d, mask_token_id=V),
    "odd heads": lambda d: edit(d, num_attention_heads=3),
    "heads of words": lambda d: edit(d, num_attention_heads="four"),
    "odd activation": lambda d: edit(d, hidden_act="sinh"),
    "section that is no section": lambda d: edit(d, deepspec="yes", block_size=None, dflash_config=None),
    "unknown kind": own_changed(kind="medusa"),
    "setting of a later version": own_changed(tree_width=4),
    "setting that cannot be": own_changed(block_size=0),
    "setting of another type": own_changed(markov_rank="six"),
}
NAMED = {
    "missing tensor": "missing layers.1.mlp.up_proj.weight",
    "extra tensor": "layers.9.mlp.up_proj.weight",
    "misshapen tensor": r"fc.weight is \[32, 5\], should be \[32, 64\]",
    "unsorted layers": "increasing",
    "layer out of range": "layer 4",
    "mask out of range": str(V),
    "setting of a later version": "tree_width",
    "no layers": "num_hidden_layers",
    "no block size": "block_size",
    "heads of words": "num_attention_heads",
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_broken_drafter_is_one_clear_line(what, tmp_path):
    """Whatever is wrong with the files, loading raises InputError of one line that names the directory and the
    fault."""
    tgt = target()
    make_drafter("vanilla", tgt).save(tmp_path / "d")
    SPOILT[what](tmp_path / "d")
    with pytest.raises(InputError, match=NAMED.get(what)) as caught:
        load_drafter(tmp_path / "d", tgt)
    message = str(caught.value)
    assert len(message.splitlines()) == 1 and len(message) < 500
    assert str(tmp_path / "d") in message or what in ("layer out of range", "mask out of range")


@pytest.mark.parametrize("path", ["nowhere", "./nowhere", "/no/where", "owner/name", "a/b/c"])
def test_a_missing_drafter_is_one_clear_line(path, tmp_path, monkeypatch):
    """No such directory, no such repository (offline): InputError with the name."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=path) as caught:
        load_drafter(path, target())
    assert len(str(caught.value).splitlines()) == 1


def test_a_drafter_of_another_target_is_refused(tmp_path):
    """Hidden size or vocabulary differ: both numbers and the target's name are in the message. Fewer target layers than
    tapped: the layer."""
    make_drafter("dflash", target()).save(tmp_path / "d")
    for changes, words in (
        (dict(hidden_size=48), ("32", "48")),
        (dict(vocab_size=V + 8), (str(V), str(V + 8))),
        (dict(num_hidden_layers=2), ("layer 2", "0 to 1")),
    ):
        other = Target(hf_model("qwen3", **changes), name="another")
        with pytest.raises(InputError) as caught:
            load_drafter(tmp_path / "d", other)
        assert all(w in str(caught.value) for w in words) and len(str(caught.value).splitlines()) == 1


# -- whole or nothing ----------------------------------------------------------------------------------------------


def test_a_failed_save_leaves_nothing_behind(tmp_path, monkeypatch):
    """When writing fails in the middle no file is left; a directory that was there is as it was, to the byte."""
    import safetensors.torch

    drafter = make_drafter("vanilla", target())
    drafter.save(tmp_path / "old")
    before = {p.name: p.read_bytes() for p in (tmp_path / "old").iterdir()}

    def half(tensors, path, metadata=None):
        Path(path).write_bytes(b"half a file")
        raise OSError("No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", half)
    for name in ("old", "new"):
        with pytest.raises(OSError, match="No space"):
            drafter.save(tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == ["old"]
    assert {p.name: p.read_bytes() for p in (tmp_path / "old").iterdir()} == before


def test_saving_again_replaces_the_drafter(tmp_path):
    """A second save to the same place leaves the second drafter and nothing of the first, nor of the renaming."""
    make_drafter("vanilla", target()).save(tmp_path / "d")
    second = make_drafter("dflash", target(), seed=5)
    second.save(tmp_path / "d")
    assert torch.equal(load_drafter(tmp_path / "d", target()).fc.weight, second.fc.weight)
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_saving_never_deletes_what_is_no_drafter(tmp_path):
    """A directory that holds anything but a drafter, or a plain file, is refused and stays as it is."""
    drafter = make_drafter("vanilla", target())
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("years of work")
    (tmp_path / "plain").write_text("a file")
    shutil.copytree(HERE / "dflash_qwen3" / "drafter", tmp_path / "theirs")  # the same two names, not ours
    for name in ("thesis", "plain", "theirs"):
        with pytest.raises(InputError, match=name):
            drafter.save(tmp_path / name)
    assert (tmp_path / "thesis" / "chapter1.tex").read_text() == "years of work"
    assert (tmp_path / "plain").read_text() == "a file"
    before = (HERE / "dflash_qwen3" / "drafter" / "config.json").read_bytes()
    assert (tmp_path / "theirs" / "config.json").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plain", "theirs", "thesis"]
    (tmp_path / "empty").mkdir()
    drafter.save(tmp_path / "empty")
    assert load_drafter(tmp_path / "empty", target()).num_slots == 4


def test_saving_does_not_change_the_drafter(tmp_path):
    """Tensors, training flag and gradients are as before."""
    drafter = make_drafter("rnn", target()).train()
    before = {k: v.clone() for k, v in drafter.state_dict().items()}
    drafter.save(tmp_path / "deep" / "er" / "d")
    assert drafter.training and all(torch.equal(v, drafter.state_dict()[k]) for k, v in before.items())
    assert all(p.requires_grad for p in drafter.parameters())


def test_settings_survive_as_json():
    """Every setting, defaults or not, comes back equal through JSON."""
    from deepspec.hub.load import from_json
    from deepspec.hub.native import config_to_json

    for kind in KINDS:
        for changes in ({}, dict(num_anchors=9, num_draft_layers=1)):
            config = drafter_config(kind, **changes)
            raw = json.loads(json.dumps({"deepspec": {"drafter": config_to_json(config)}}))
            assert from_json(raw, set()) == config
