"""Laws of a target that is not simply in one memory: spread by accelerate, or in 8 or 4 bits."""

import contextlib
import io

import pytest
import torch
from helpers import LAYERS, hf_model, write_run

import deepspec
from deepspec import InputError, fit, load_config
from deepspec.modeling.cache import KVCache, Ragged
from deepspec.modeling.passes import Pass
from deepspec.modeling.target import Target

CPU = torch.device("cpu")
TOKENS, COUNTS = torch.arange(24).view(2, 12), [12, 7]


def everything(target: Target) -> list[torch.Tensor]:
    """Features, hidden, and logits of a session that is extended, rewound and extended again."""
    session = target.open(2, 24, LAYERS)
    first = session.score(TOKENS[:, :8])
    session.rewind([5, 8])
    second = session.score(TOKENS[:, 8:], [4, 2])
    return [*target.features(TOKENS, COUNTS, LAYERS), first.logits, first.features, second.logits, second.hidden]


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
@pytest.mark.parametrize("how", ["hooks", "offloaded", "offloaded, tied"])
def test_a_spread_target_is_the_target(family, how):
    """Behind accelerate's hooks, with weights in memory or brought in layer by layer, all it computes is bit-equal, and
    the vocabulary that drafters share is in memory."""
    from accelerate import cpu_offload, dispatch_model

    tied = "tied" in how
    plain = Target(hf_model(family, tie_word_embeddings=tied))
    model = hf_model(family, tie_word_embeddings=tied)
    if how == "hooks":
        names = [f"model.layers.{i}" for i in range(4)]
        spread = dispatch_model(
            model, {n: "cpu" for n in ("model.embed_tokens", *names, "model.norm", "model.rotary_emb", "lm_head")},
            main_device="cpu", force_hooks=True,
        )  # fmt: skip
    else:
        spread = cpu_offload(model, execution_device=CPU)
        assert model.lm_head.weight.is_meta
    target = Target(spread, device=CPU)
    assert target.device == CPU and torch.equal(target.vocab.head, plain.vocab.head)
    assert torch.equal(target.vocab.embedding, plain.vocab.embedding)
    for a, b in zip(everything(target), everything(plain), strict=True):
        assert torch.equal(a, b)
    if how != "hooks":
        with pytest.raises(InputError, match="no drafter can start from them"):
            target.weights()


def test_a_pass_follows_its_layer():
    """Asked for on its own device a pass is itself; elsewhere it is one other pass with the same places."""
    view = Pass(Ragged([3, 0, 2], CPU), [4, 1, 0], KVCache(3, 8))
    assert view.to("cpu") is view and view.to(CPU, non_blocking=True) is view
    other = view.to("meta")
    assert other is view.to(torch.device("meta")) and other is not view
    assert other.positions.is_meta and other.positions.shape == view.positions.shape
    assert other.ragged.counts == view.ragged.counts and other.cache is view.cache


def test_several_processes_do_not_spread(tmp_path, monkeypatch):
    """One process takes all devices; more would meet there, so they are refused before anything is read."""
    from deepspec.train import loop

    monkeypatch.setattr(loop.World, "join", staticmethod(lambda device: loop.World(0, 2, CPU)))
    with pytest.raises(deepspec.ConfigError, match="one process"):
        fit(load_config(write_run(tmp_path), "train.target_devices=all"))


def test_a_spread_target_trains_the_same(tmp_path):
    """target_devices=all where there is one device changes nothing in a run."""
    file = write_run(tmp_path)
    losses = [
        [r.metrics["loss"] for r in fit(load_config(file, f"out={tmp_path / how}", f"train.target_devices={how}"))]
        for how in ("one", "all")
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantised_target_trains_a_drafter(tmp_path, bits):
    """Layers in 8 or 4 bits: the loss is near the whole target's and falls; the vocabulary is untouched; none can
    start from quantised layers; a drafter decodes losslessly on that target."""
    pytest.importorskip("bitsandbytes")
    with contextlib.redirect_stderr(io.StringIO()):
        hf_model("qwen3", hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "target")
    file = write_run(tmp_path)
    whole = next(fit(load_config(file, f"out={tmp_path / 'whole'}")))
    reports = list(fit(load_config(file, f"out={tmp_path / 'few'}", f"train.target_bits={bits}", "train.max_steps=30")))
    assert reports[0].metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=0.1)
    assert reports[0].metrics["loss"] != whole.metrics["loss"] and reports[-1].metrics["loss"] < 2.3
    target = Target.load(str(tmp_path / "target"), bits=bits)
    plain = Target.load(str(tmp_path / "target"))
    assert torch.equal(target.vocab.head, plain.vocab.head) and target.dtype == plain.dtype
    with pytest.raises(InputError, match="quantised"):
        target.weights()
    with pytest.raises(deepspec.ConfigError, match="target_bits quantises"):
        load_config(file, "train.target_bits=8", "train.init=target")
    drafter = deepspec.load_drafter(tmp_path / "few", target)
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    drafted, alone = (deepspec.generate(target, d, prompts, max_new_tokens=16) for d in (drafter, None))
    assert [g.tokens for g in drafted] == [g.tokens for g in alone]
