"""Where training starts (random, target, another drafter) and the two optimisers, resumed and not."""

import dataclasses
import json
import math

import helpers
import pytest
import torch
from safetensors.torch import load_file

import deepspec
from deepspec.train import init, optim
from deepspec.train.setup import build_drafter


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Qwen3 target on disk and 12 token rows."""
    root = tmp_path_factory.mktemp("start")
    helpers.hf_model("qwen3").save_pretrained(root / "target")
    g = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, helpers.V - 1, (20,), generator=g).tolist() for _ in range(12)]
    lines = [json.dumps({"prompt_ids": row[:4], "answer_ids": row[4:]}) for row in rows]
    (root / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return root


def config(folder, out, **train):
    return deepspec.Config(
        target=str(folder / "target"),
        drafter=helpers.drafter_config("vanilla"),
        loss=deepspec.LossConfig(ce=0.5, tv=0.5, confidence=1.0),
        data=deepspec.DataConfig(path=(str(folder / "rows.jsonl"),)),
        train=deepspec.TrainConfig(
            **{"batch_size": 4, "micro_batch": 2, "max_steps": 4, "precision": "fp32", "save_every": 2, **train}
        ),
        out=out,
    )


def started(folder, drafter_kind="vanilla", source="target", **changes):
    """A drafter as training starts it, and what was said."""
    target = deepspec.Target.load(str(folder / "target"))
    kind, loss = helpers.drafter_config(drafter_kind, **changes), deepspec.LossConfig(ce=1.0)
    c = dataclasses.replace(config(folder, folder / "x"), drafter=kind, loss=loss)
    drafter = build_drafter(c, target)
    return drafter, target, init.warm_start(drafter, target, source)


def test_from_target_takes_the_last_layers_the_norm_and_selects_a_layer(folder):
    drafter, target, said = started(folder)
    theirs = target.model.model
    for i in range(2):
        for name, value in theirs.layers[2 + i].state_dict().items():
            assert torch.equal(drafter.layers[i].state_dict()[name], value), (i, name)
    assert torch.equal(drafter.norm.weight, theirs.norm.weight)
    features = torch.randn(3, 2 * 32)
    assert torch.equal(drafter.fc(features), features[:, 32:])
    assert any("from target layer 3" in line for line in said) and any("markov_head" in line for line in said)
    assert said[-1].startswith("5 tensors start fresh: hidden_norm.weight")
    assert torch.equal(target.model.model.layers[3].mlp.up_proj.weight, drafter.layers[1].mlp.up_proj.weight)
    drafter.layers[1].mlp.up_proj.weight.data.zero_()
    assert theirs.layers[3].mlp.up_proj.weight.abs().sum() > 0, "a copy, not the target's own"


def test_random_is_untouched_and_depends_on_the_seed_only(folder):
    a, b = started(folder, source="random")[0], started(folder, source="random")[0]
    assert started(folder, source="random")[2] == []
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))


def test_a_narrow_drafter_takes_what_fits(folder):
    """Of another width only the head norms fit, and a drafter of which nothing fits is an error."""
    _, _, said = started(folder, width=24)
    assert said[0].startswith("2 tensors from target layer 2: layers.0.self_attn.q_norm.weight")
    narrow, _, _ = started(folder, width=24)
    assert narrow.fc.weight.shape == (24, 64)


def test_from_another_drafter(folder, tmp_path):
    """A DSpark's backbone starts a one-layer DFlash; more draft layers than there were start fresh."""
    first, _, _ = started(folder)
    first.save(tmp_path / "first")
    second, _, said = started(folder, "dflash", str(tmp_path / "first"), num_draft_layers=3)
    for name, value in second.state_dict().items():
        if not name.startswith("layers.2."):
            assert torch.equal(value, first.state_dict()[name]), name
    assert str(tmp_path / "first") in said[0] and "layers.2" in said[-1]


def test_init_is_checked_before_weights_are_read(folder, tmp_path):
    with pytest.raises(deepspec.InputError, match="no drafter in"):
        next(iter(deepspec.fit(config(folder, tmp_path, init=str(tmp_path / "nothing")))))


def test_a_run_records_where_it_started(folder, tmp_path):
    list(deepspec.fit(config(folder, tmp_path / "run", init="target", max_steps=1)))
    saved = json.loads((tmp_path / "run" / "drafter" / "config.json").read_text())
    assert any("target layer" in line for line in saved["deepspec"]["init"])


def test_muon_takes_the_matrices_of_the_layers(folder):
    drafter, _, _ = started(folder)
    optimizer = optim.build(drafter, deepspec.TrainConfig(optimizer="muon"))
    names = {p: n for n, p in drafter.named_parameters()}
    muon = {names[p] for p in optimizer.parts[1].param_groups[0]["params"]}
    assert muon == {n for n, p in drafter.named_parameters() if n.startswith("layers.") and n.endswith("proj.weight")}
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(grouped) == len(set(grouped)) == len(names)


def test_muon_moves_a_matrix_as_far_as_adamw(folder):
    """The first update's root mean square is about lr for both, so one learning rate serves them."""
    drafter, _, _ = started(folder, source="random")
    before = {n: p.detach().clone() for n, p in drafter.named_parameters()}
    optimizer = optim.build(drafter, deepspec.TrainConfig(optimizer="muon", lr=1e-3))
    for p in drafter.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    optimizer.zero_grad()
    assert all(p.grad is None for p in drafter.parameters())
    for name, p in drafter.named_parameters():
        moved = (p - before[name]).square().mean().sqrt().item()
        assert 1e-4 < moved < 1.1e-3, (name, moved)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resume_is_uninterrupted(folder, tmp_path, optimizer):
    """Two steps, stop, two steps: the same learning rates, losses and weights as four at once."""
    whole = [(r.lr, r.metrics["loss"]) for r in deepspec.fit(config(folder, tmp_path / "a", optimizer=optimizer))]
    run = deepspec.fit(config(folder, tmp_path / "b", optimizer=optimizer))
    first = []
    for report in run:
        first.append((report.lr, report.metrics["loss"]))
        if report.step == 2:
            run.close()
            break
    second = [(r.lr, r.metrics["loss"]) for r in deepspec.fit(config(folder, tmp_path / "b", optimizer=optimizer))]
    assert first + second == whole and len(whole) == 4
    a, b = (load_file(tmp_path / x / "drafter" / "model.safetensors") for x in "ab")
    assert all(torch.equal(a[k], b[k]) for k in a)
    state = load_file(tmp_path / "a" / "checkpoints" / "step-0000004" / "optimizer.state")
    assert any(k.endswith("momentum_buffer") for k in state) == (optimizer == "muon")
    assert math.isclose(whole[0][0], 6e-4, rel_tol=0.1)


def test_a_run_from_before_these_settings_goes_on(folder, tmp_path):
    c = config(folder, tmp_path / "run", max_steps=2)
    list(deepspec.fit(c))
    path = tmp_path / "run" / "checkpoints" / "step-0000002" / "trainer.json"
    old = json.loads(path.read_text())
    for key in ("init", "optimizer"):
        del old["settings"]["train"][key]
    path.write_text(json.dumps(old))
    assert list(deepspec.fit(c)) == []
    with pytest.raises(deepspec.ConfigError, match=r"train\.optimizer"):
        list(deepspec.fit(config(folder, tmp_path / "run", max_steps=2, optimizer="muon")))
