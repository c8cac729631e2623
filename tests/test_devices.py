"""Which dtype a machine computes in: where nobody says it, the one that is quick there."""

import json
import os
import subprocess
import sys

import pytest
import torch
from helpers import hf_model, write_run

import deepspec
from deepspec.checked import ConfigError
from deepspec.modeling import devices
from deepspec.modeling.ends import Ends
from deepspec.modeling.target import Target
from deepspec.train.loop import fit
from deepspec.train.plan import plan, target_config

CPU = torch.device("cpu")
HALF, FULL = torch.bfloat16, torch.float32


def machine(patch: pytest.MonkeyPatch, quick: bool) -> None:
    """A CPU with, or without, instructions for bfloat16 products."""
    patch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: quick)
    patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")


@pytest.fixture(params=[True, False], ids=["quick", "slow"])
def quick(request, monkeypatch) -> bool:
    machine(monkeypatch, request.param)
    return request.param


@pytest.mark.parametrize("used", ["AVX512", "AVX2", "DEFAULT"])
@pytest.mark.parametrize("has", [True, False])
def test_bfloat16_needs_the_instructions_and_a_torch_that_uses_them(monkeypatch, used, has):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: used)
    assert devices.quick_dtype(CPU) == (HALF if has and used == "AVX512" else FULL)
    assert devices.quick_dtype(torch.device("cuda")) == HALF  # no other device is asked for a CPU's instructions


def test_a_torch_told_to_use_less_uses_float32():
    """The environment variable is torch's own; so a plainer CPU can be tried on this one."""
    code = "import torch; from deepspec.modeling.devices import quick_dtype; print(quick_dtype(torch.device('cpu')))"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "torch.float32"


@pytest.mark.parametrize("own", [HALF, torch.float16, FULL])
@pytest.mark.parametrize("said", ["auto", "bfloat16", "float16", "float32"])
def test_a_target_and_its_ends_have_one_dtype(tmp_path, quick, own, said):
    """What is said is done; auto is the checkpoint's own, or float32 where that is slow. A target and its ends alone
    agree, for drafters are trained on either."""
    hf_model().to(own).save_pretrained(tmp_path)
    auto = FULL if own == torch.float16 or (own == HALF and not quick) else own
    wanted = auto if said == "auto" else getattr(torch, said)
    target, ends = Target.load(str(tmp_path), dtype=said), Ends.load(str(tmp_path), dtype=said)
    assert {p.dtype for p in target.model.parameters()} == {wanted} == {target.dtype, ends.dtype}
    assert ends.vocab.embedding.dtype == wanted
    for ours, theirs in ((target, hf_model()), (ends, hf_model())):
        head = theirs.get_output_embeddings().weight
        assert torch.equal(ours.vocab.head, head.to(own).to(wanted))


@pytest.mark.parametrize("says", ["its own", None, "bfloat16", "float16", "float32"])
@pytest.mark.parametrize("own", [HALF, FULL])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gemma4"])
def test_auto_is_the_dtype_it_comes_to(tmp_path, quick, family, own, says):
    """The same bits as where that dtype is said, also of what a model computes for itself (embed_scale) and where a
    config says another dtype than its weights are stored in, or none. Target, ends, and a plan agree on it."""
    hf_model(family).to(own).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if says != "its own":
        config |= {"dtype": says}
    (tmp_path / "config.json").write_text(json.dumps(config))
    meant = own if says in (None, "its own") else getattr(torch, says)
    wanted = meant if meant == FULL or (meant == HALF and quick) else FULL
    auto, ends = Target.load(str(tmp_path)), Ends.load(str(tmp_path))
    named = Target.load(str(tmp_path), dtype=wanted)
    tokens = torch.arange(11)[None]
    assert {wanted} == {p.dtype for p in auto.model.parameters()} == {ends.dtype, ends.vocab.embedding.dtype}
    for ours, theirs in zip(auto.features(tokens, [11], (0, 2)), named.features(tokens, [11], (0, 2)), strict=True):
        assert torch.equal(ours, theirs)
    embedded = auto.model.get_input_embeddings()(tokens)
    for vocab in (auto.vocab, ends.vocab):
        assert torch.equal(vocab.head, named.vocab.head) and torch.equal(vocab.embed(tokens), embedded)
    if says is not None:
        run = deepspec.load_config(write_run(tmp_path / "run"), "train.target_dtype=auto")
        resolved = plan(run, target_config(run, str(tmp_path))).resolved
        assert resolved["train.target_dtype"] == str(wanted).removeprefix("torch.")


def test_other_devices_keep_a_checkpoints_dtype(monkeypatch):
    machine(monkeypatch, False)
    for own in (HALF, torch.float16, FULL):
        assert devices.auto_dtype(own, torch.device("cuda")) == own


def test_a_run_trains_in_what_is_quick_and_goes_on_in_it(tmp_path, quick, monkeypatch):
    """The checkpoint says which precision it was. On a machine that would choose another, going on is refused until
    that is asked for by name."""
    file = write_run(tmp_path)
    change = ("train.precision=auto", f"out={tmp_path / 'auto'}", "train.max_steps=4")
    seen: list[bool] = []
    real = torch.autocast.__init__

    def autocast(self, *args, **kwargs):
        real(self, *args, **kwargs)
        seen.append(self.fast_dtype == HALF and kwargs.get("enabled", True))

    monkeypatch.setattr(torch.autocast, "__init__", autocast)
    run = fit(deepspec.load_config(file, *change))
    next(run)
    run.close()
    assert any(seen) == quick
    saved = next((tmp_path / "auto" / "checkpoints").glob("step-*"))
    assert json.loads((saved / "trainer.json").read_text())["settings"]["train"]["precision"] == (
        "bf16" if quick else "fp32"
    )
    machine(monkeypatch, not quick)
    with pytest.raises(ConfigError, match=r"train\.precision"):
        next(fit(deepspec.load_config(file, *change)))
    named = (*change, f"train.precision={'bf16' if quick else 'fp32'}")
    assert [report.step for report in fit(deepspec.load_config(file, *named))] == [2, 3, 4]


def test_a_plan_is_of_what_would_run(tmp_path, quick):
    config = deepspec.load_config(write_run(tmp_path), "train.precision=auto")
    hf_model().to(HALF).save_pretrained(tmp_path / "target")
    resolved = plan(config, target_config(config, str(tmp_path / "target"))).resolved
    assert resolved["train.precision"] == ("bf16" if quick else "fp32")
    assert resolved["train.target_dtype"] == ("bfloat16" if quick else "float32")
