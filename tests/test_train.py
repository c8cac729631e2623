"""Laws of the training loop: a run is a function of its config, however often it is interrupted.

Everything runs on a tiny target and token rows, through `fit`.
"""

import dataclasses
import itertools
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from helpers import V, hf_model, write_run
from safetensors.torch import load_file

import deepspec
from deepspec import ConfigError, InputError, fit, generate, load_config, load_drafter
from deepspec.data.ahead import Ahead
from deepspec.modeling.target import Target
from deepspec.train import checkpoint, optim

TIMES = ("seconds", "tokens_per_second", "data_seconds")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"))


def config(file, out, *overrides):
    return load_config(file, f"out={out}", *overrides)


def rows_of(out) -> list[dict]:
    """metrics.jsonl without what a clock says."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def weights(drafter) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in drafter.state_dict().items()}


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture(scope="module")
def straight(file, tmp_path_factory):
    """One uninterrupted run of six steps: its directory, reports' numbers, last weights."""
    out = tmp_path_factory.mktemp("straight") / "out"
    reports, last = [], None
    for report in fit(config(file, out)):
        reports.append((report.step, report.lr, report.metrics))
        last = weights(report.drafter)
    return out, reports, last


def test_reports_say_what_happened(straight):
    """One report a step, counting from 1; finite metrics of the contract; metrics.jsonl holds the same numbers."""
    out, reports, _ = straight
    assert [step for step, _, _ in reports] == [1, 2, 3, 4, 5, 6]
    for _, _, m in reports:
        assert {"loss", "ce", "l1", "confidence", "tau", "grad_norm", *(f"accept@{g}" for g in range(4))} <= set(m)
        assert all(math.isfinite(x) for x in m.values()) and 0 <= m["accept@0"] <= 1 <= m["tau"] <= 5
    assert rows_of(out) == [{"step": s, "lr": lr, **m} for s, lr, m in reports]
    assert len({m["loss"] for _, _, m in reports}) == 6


def test_a_run_is_deterministic(file, straight, tmp_path):
    """The same config again: bit-equal weights and equal metrics, whatever the global random state; another seed
    differs."""
    torch.manual_seed(77)
    last = None
    for report in fit(config(file, tmp_path / "again")):
        torch.rand(3)
        last = report.drafter
    assert same(weights(last), straight[2]) and rows_of(tmp_path / "again") == rows_of(straight[0])
    for report in fit(config(file, tmp_path / "other", "seed=4", "train.max_steps=1")):
        assert report.metrics["loss"] != straight[1][0][2]["loss"]


@pytest.mark.parametrize("stops", [(2,), (1, 4), (5,), (3, 3)], ids=str)
def test_interrupted_is_uninterrupted(file, straight, stops, tmp_path):
    """N straight steps equal k steps, closing, and going on from what is on disk, however often: bit-equal weights
    and optimiser state, the same learning rates, one metrics row a step. The global random state differs between the
    parts."""
    out, reports = tmp_path / "out", []
    for part, stop in enumerate((*stops, None)):
        torch.manual_seed(part)
        run = fit(config(file, out))
        for report in run:
            reports.append((report.step, report.lr, report.metrics))
            if report.step == stop:
                run.close()
                assert checkpoint.found(out)[-1].name == f"step-{stop:07d}"
                break
    assert reports == straight[1]
    assert same(weights(report.drafter), straight[2]) and rows_of(out) == rows_of(straight[0])
    name = "checkpoints/step-0000006"
    ours, theirs = (load_file(folder / name / "optimizer.state") for folder in (out, straight[0]))
    assert same(ours, theirs) and len(ours) == 3 * len(straight[2])
    assert {t.dtype for t in ours.values()} == {torch.float32}
    assert same(
        load_file(out / "drafter" / "model.safetensors"), load_file(straight[0] / "drafter" / "model.safetensors")
    )


def test_a_killed_run_goes_on_from_its_last_checkpoint(file, straight, tmp_path):
    """A kill (no close, no clean-up): steps after the last checkpoint are done again, half-written checkpoints are not
    seen, a torn last line of metrics.jsonl is dropped, and the end is the uninterrupted run's."""
    out = tmp_path / "out"
    run = fit(config(file, out, "train.save_every=2"))
    for report in run:
        if report.step == 3:
            break
    saved = files(out)
    run.close()  # saves step 3; a kill would not have
    shutil.rmtree(out)
    for name, content in saved.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(content)
    half = out / "checkpoints" / ".step-0000003-abc"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    (out / "checkpoints" / "step-0000005").mkdir()  # made, never filled
    with (out / "metrics.jsonl").open("a") as log:
        log.write('{"step": 4, "lr": 0.00')
    steps = [r.step for r in fit(config(file, out, "train.save_every=2"))]
    assert steps == [3, 4, 5, 6] and rows_of(out) == rows_of(straight[0])
    assert same(load_file(out / "drafter" / "model.safetensors"), straight[2])


def test_a_finished_run_stays_finished(file, straight, tmp_path):
    """Running a finished run again does no step, yields nothing, and leaves the same drafter."""
    shutil.copytree(straight[0], tmp_path / "out")
    assert list(fit(config(file, tmp_path / "out"))) == []
    assert same(load_file(tmp_path / "out" / "drafter" / "model.safetensors"), straight[2])
    assert rows_of(tmp_path / "out") == rows_of(straight[0])


def test_never_resuming_starts_over(file, straight, tmp_path):
    """resume="never" forgets checkpoints and metrics of an earlier run in the same place."""
    shutil.copytree(straight[0], tmp_path / "out")
    reports = [(r.step, r.lr, r.metrics) for r in fit(config(file, tmp_path / "out"), resume="never")]
    assert reports == straight[1] and rows_of(tmp_path / "out") == rows_of(straight[0])


def test_nothing_runs_before_the_first_step_is_asked_for(file, tmp_path):
    """Making the generator trains nothing and saves nothing; closing it unasked is no error."""
    run = fit(config(file, tmp_path / "out"))
    run.close()
    assert not [p for p in (tmp_path / "out").rglob("*") if p.is_file()]


# -- checkpoints and the drafter -----------------------------------------------------------------------------------


def test_the_last_drafter_is_the_reported_one(straight):
    """out/drafter loads by itself and through the run directory, is bit-equal to what the last report held, and says
    what it was made from."""
    out, _, last = straight
    raw = json.loads((out / "drafter" / "config.json").read_text())["deepspec"]
    tgt = Target.load(raw["target"]["name"])
    assert same(weights(load_drafter(out / "drafter", tgt)), last) and same(weights(load_drafter(out, tgt)), last)
    assert raw["step"] == 6 and raw["settings"]["train"]["lr"] == 3e-3 and raw["data"]["rows"] == 10
    assert raw["versions"]["torch"] == torch.__version__
    assert sorted(p.name for p in (out / "drafter").iterdir()) == ["config.json", "model.safetensors"]


def test_the_last_report_comes_after_the_drafter_is_written(file, tmp_path):
    """A caller may stop at the last report: the drafter is already there."""
    for report in fit(config(file, tmp_path / "out", "train.max_steps=2")):
        if report.step == report.total_steps:
            break
    assert (tmp_path / "out" / "drafter" / "model.safetensors").is_file()


def test_checkpoints_come_when_told_and_the_last_is_always_saved(file, tmp_path):
    """save_every counts optimiser steps, whatever the micro-batches; the last step is saved though it is no multiple;
    only keep_last stay; each checkpoint is itself a drafter."""
    out = tmp_path / "out"
    seen = []
    for _ in fit(
        config(file, out, "train.save_every=2", "train.keep_last=9", "train.max_steps=5", "train.micro_batch=1")
    ):
        seen.append([p.name for p in checkpoint.found(out)])
    names = [f"step-{n:07d}" for n in (2, 4, 5)]
    assert seen == [[], names[:1], names[:1], names[:2], names]
    assert load_drafter(checkpoint.found(out)[0], Target(hf_model("qwen3"))).num_slots == 4
    for _ in fit(config(file, tmp_path / "few", "train.save_every=1", "train.keep_last=2")):
        assert len(checkpoint.found(tmp_path / "few")) <= 2
    assert [p.name for p in sorted((tmp_path / "few" / "checkpoints").iterdir())] == ["step-0000005", "step-0000006"]


def test_other_settings_are_refused_with_the_difference(file, straight, tmp_path):
    """Going on with other settings: ConfigError that shows each difference, old and new, and changes no file; settings
    that do not touch the result may change."""
    out = tmp_path / "out"
    shutil.copytree(straight[0], out)
    before = files(out)
    for override, words in (
        ("train.lr=1e-3", "train.lr: 0.003 -> 0.001"),
        ("seed=9", "seed: 3 -> 9"),
        ("drafter.markov_rank=8", "drafter.markov_rank: 4 -> 8"),
        ("loss.ce=0.2", "loss.ce: 0.1 -> 0.2"),
        ("train.max_steps=7", "train.max_steps: 6 -> 7"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            fit(config(file, out, override))
        assert len(str(caught.value).splitlines()) == 1 and str(out) in str(caught.value)
        assert files(out) == before
    assert list(fit(config(file, out, "train.log_every=3", "train.save_every=1", "train.keep_last=1"))) == []


@pytest.mark.parametrize("what", ["model.safetensors", "optimizer.state", "trainer.json", "trainer.json empty"])
def test_a_damaged_checkpoint_is_one_clear_line(file, straight, what, tmp_path):
    """Cut anywhere, the newest checkpoint is named in an InputError of one line, and nothing is overwritten."""
    out = tmp_path / "out"
    shutil.copytree(straight[0], out)
    path = out / "checkpoints" / "step-0000006" / what.split(" ")[0]
    path.write_bytes(b"" if "empty" in what else path.read_bytes()[:-40])
    before = files(out)
    with pytest.raises(InputError, match="step-0000006") as caught:
        fit(config(file, out))
    assert len(str(caught.value).splitlines()) == 1 and files(out) == before


def test_a_run_that_fails_leaves_the_checkpoint_it_had(file, tmp_path, monkeypatch):
    """When a checkpoint cannot be written (disk full), the older ones stay whole and no half is left."""
    import safetensors.torch

    out, real, calls = tmp_path / "out", safetensors.torch.save_file, []

    def sometimes(tensors, path, metadata=None):
        calls.append(path)
        if len(calls) == 4:  # the optimiser of the second checkpoint
            Path(path).write_bytes(b"half")
            raise OSError("No space left on device")
        real(tensors, path, metadata=metadata)

    monkeypatch.setattr(safetensors.torch, "save_file", sometimes)
    with pytest.raises(OSError, match="No space"):
        for _ in fit(config(file, out, "train.save_every=1")):
            pass
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["step-0000001"]


# -- the optimisation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce", ["slot", "document"])
def test_accumulation_changes_nothing(file, reduce, tmp_path):
    """micro_batch 1, 2 and 4 of a batch of 4: the same losses and weights to 1e-5, for both reductions."""
    results = []
    for micro in (1, 2, 4):
        reports = list(
            fit(
                config(
                    file,
                    tmp_path / str(micro),
                    f"train.micro_batch={micro}",
                    f"loss.reduce={reduce}",
                    "train.max_steps=4",
                )
            )
        )
        results.append(
            (
                [r.metrics["loss"] for r in reports],
                [r.metrics["grad_norm"] for r in reports],
                weights(reports[-1].drafter),
            )
        )
    for losses, norms, last in results[1:]:
        assert losses == pytest.approx(results[0][0], rel=1e-5) and norms == pytest.approx(results[0][1], rel=1e-4)
        for name, value in last.items():
            torch.testing.assert_close(value, results[0][2][name], atol=1e-5, rtol=1e-4)


def test_each_pass_is_announced_before_it_is_asked_for(file, tmp_path, monkeypatch):
    """Within a step and into the next, in a run and in one that goes on; nothing is announced after the last."""
    asked, announced = [], []
    batch, expect = Ahead.batch, Ahead.expect
    monkeypatch.setattr(Ahead, "batch", lambda self, picked: (asked.append(list(picked)), batch(self, picked))[1])
    monkeypatch.setattr(Ahead, "expect", lambda self, picked: (announced.append(list(picked)), expect(self, picked))[1])
    c = config(file, tmp_path / "out", "train.micro_batch=3", "train.batch_size=6", "train.max_steps=3")
    run = fit(c)
    next(run)
    run.close()
    list(fit(c))
    assert len(asked) == 6 and announced == asked[1:]


def test_frozen_tensors_stay_and_all_others_move(file, tmp_path):
    """The target's every tensor is bit-equal after training; the optimiser holds the drafter's parameters, all of them,
    once; each has moved, the norms too."""
    loaded = []
    real = Target.load.__func__

    def load(cls, *args, **kwargs):
        loaded.append(real(cls, *args, **kwargs))
        return loaded[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "load", classmethod(load))
        run = fit(config(file, tmp_path / "out", "train.precision=bf16"))
        before = None
        for report in run:
            if before is None:
                first = {k: v.clone() for k, v in loaded[0].model.state_dict().items()}
                before = weights(report.drafter)
    own = hf_model("qwen3").state_dict()
    assert all(torch.equal(v, own[k]) for k, v in loaded[0].model.state_dict().items()) and first.keys() == own.keys()
    assert all(not torch.equal(v, before[k]) for k, v in weights(report.drafter).items())
    assert {p.dtype for p in report.drafter.parameters()} == {torch.float32}
    optimizer = optim.build(report.drafter, deepspec.TrainConfig())
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in report.drafter.parameters()} and len(held) == len(
        set(map(id, held))
    )
    assert {p.dim() for p in optimizer.param_groups[1]["params"]} == {1}


def test_norms_move_under_small_steps(tmp_path, file):
    """Weights live in float32: 100 steps of at most 6e-4 under bf16 autocast move all norm weights off 1.0, though each
    step is less than the least that a bfloat16 weight of 1 can move by, 2 ** -8."""
    small = ("train.precision=bf16", "train.lr=6e-4", "train.max_steps=100", "train.epochs=99", "train.batch_size=2")
    *_, report = fit(config(file, tmp_path / "out", *small, "train.log_every=100"))
    assert report.step == 100
    norms = {name: p.detach() for name, p in report.drafter.named_parameters() if "norm" in name}
    assert len(norms) >= 6
    for name, p in norms.items():
        assert (p != 1).all() and 2**-9 < (p - 1).abs().max() < 100 * 6e-4, name


def test_learning_rate(file, straight):
    """Warm-up from above 0 to lr, then a cosine to nearly 0; a pure function of the step, so a resumed run has the
    same."""
    train = deepspec.TrainConfig(lr=1.0, warmup=0.2)
    rates = [optim.learning_rate(s, 50, train) for s in range(50)]
    assert rates[:10] == pytest.approx([(s + 1) / 10 for s in range(10)])
    assert rates[10] == 1 and all(a > b for a, b in itertools.pairwise(rates[10:])) and 0 < rates[-1] < 0.01
    assert optim.learning_rate(0, 5, deepspec.TrainConfig(lr=2.0, warmup=0)) == 2.0
    assert [lr for _, lr, _ in straight[1]] == [optim.learning_rate(s, 6, config(file, "x").train) for s in range(6)]


def test_gradients_are_clipped_to_the_global_norm(file, tmp_path):
    """The norm reported is the gradient's own, over all parameters together; what Adam takes in has min(norm, clip)."""
    norms = []
    for clip in (0.25, 1e3):
        out = tmp_path / str(clip)
        (report,) = fit(config(file, out, f"train.clip={clip}", "train.max_steps=1", "train.betas=0.9,0.95"))
        state = load_file(out / "checkpoints" / "step-0000001" / "optimizer.state")
        taken = torch.cat([v.flatten() for k, v in state.items() if k.endswith("exp_avg")]).norm() / 0.1
        norms.append(report.metrics["grad_norm"])
        assert taken.item() == pytest.approx(min(norms[-1], clip), rel=1e-4)
    assert norms[0] == pytest.approx(norms[1]) and norms[0] > 0.25


def test_epochs_and_steps(file, tmp_path):
    """epochs * rows / batch_size steps, rounded up; max_steps cuts; every row is seen once an epoch."""
    reports = list(fit(config(file, tmp_path / "a", "train.max_steps=None", "train.epochs=2")))
    assert len(reports) == 5 == reports[0].total_steps
    reports = list(fit(config(file, tmp_path / "b", "train.max_steps=3", "train.epochs=2")))
    assert len(reports) == 3


def test_rows_without_an_anchor_are_harmless(tmp_path):
    """A step whose rows have no usable anchor (supervised tokens apart from each other are impossible here, so: answers
    cut to fewer than two by max_length are dropped) never divides by zero."""
    file = write_run(
        tmp_path, rows=[{"prompt_ids": [1] * 9, "answer_ids": [2] * 12}, {"prompt_ids": [1], "answer_ids": [2] * 4}]
    )
    for report in fit(load_config(file, "data.max_length=13", "train.max_steps=2")):
        assert all(math.isfinite(x) for x in report.metrics.values())
        assert all(p.isfinite().all() for p in report.drafter.parameters())


# -- does it learn, and does decoding agree --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with a target that writes varied text, and a data file of one sequence of its own."""
    folder = tmp_path_factory.mktemp("overfit")
    prompt = [25, 4, 14, 10, 1, 24, 10, 36]
    tgt = Target(hf_model("qwen3"))
    (g,) = generate(tgt, None, [prompt], max_new_tokens=40)
    write_run(folder, rows=[{"prompt_ids": prompt, "answer_ids": g.tokens}])
    return folder, tgt, prompt, g.tokens


@pytest.mark.parametrize("kind", ["dspark", "dflash", "dflash-masks"])
def test_what_is_overfit_is_accepted(kind, written, tmp_path):
    """Overfit one sequence that the target wrote, then decode it: at least 0.9 of the drafts are accepted at every
    slot, as training said; the same weights read with the other slot convention fall below 0.3."""
    folder, tgt, prompt, tokens = written
    base = load_config(
        folder / "run.py",
        f"out={tmp_path / 'out'}",
        "train.max_steps=150",
        "train.epochs=1000",
        "train.lr=1e-2",
        "train.batch_size=1",
        "train.micro_batch=1",
    )
    common = dict(target_layer_ids=(0, 2), num_draft_layers=1, mask_token_id=V - 1, num_anchors=32)
    drafter = {
        "dspark": lambda: deepspec.DSparkConfig(block_size=4, markov_rank=4, **common),
        "dflash": lambda: deepspec.DFlashConfig(block_size=4, **common),
        "dflash-masks": lambda: deepspec.DFlashConfig(block_size=5, sample_from_anchor=False, **common),
    }[kind]()
    loss = deepspec.LossConfig(ce=1.0, confidence=1.0 if kind == "dspark" else 0.0)
    *_, report = fit(dataclasses.replace(base, drafter=drafter, loss=loss))

    def rates(folder) -> list[float]:
        (g,) = generate(tgt, load_drafter(folder, tgt), [prompt], max_new_tokens=len(tokens))
        assert g.tokens == tokens  # whatever the drafter
        slots = load_drafter(folder, tgt).num_slots
        return [
            sum(a > s for v, a in g.rounds if v > s and a >= s) / max(1, sum(v > s and a >= s for v, a in g.rounds))
            for s in range(slots)
        ]

    assert report.metrics["ce"] < 0.2
    learnt = rates(tmp_path / "out")
    assert len(learnt) == 4 and min(learnt) >= 0.9, learnt
    flipped = tmp_path / "flipped"
    shutil.copytree(tmp_path / "out" / "drafter", flipped)
    raw = json.loads((flipped / "config.json").read_text())
    own = raw["deepspec"]["drafter"]
    own["sample_from_anchor"] = not own["sample_from_anchor"]
    (flipped / "config.json").write_text(json.dumps(raw))
    assert rates(flipped)[0] < 0.3
