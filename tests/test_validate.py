"""Laws of validation during training: it says what an evaluation of the same checkpoint would, and disturbs nothing."""

import json
import math
from typing import ClassVar

import pytest
import torch
from helpers import hf_model, token_rows, write_jsonl, write_run
from test_train import files, rows_of, same, weights

from deepspec import ConfigError, InputError, fit, load_config
from deepspec.config import ValidateConfig
from deepspec.eval.__main__ import run as evaluate
from deepspec.train import checkpoint, curves, trackers
from deepspec.train.validate import overlap, read_prompts

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    records = [{"id": f"p{i}", "prompt_ids": r["prompt_ids"]} for i, r in enumerate(token_rows(7, seed=9))]
    return write_jsonl(tmp_path_factory.mktemp("held") / "held_out.jsonl", records)


def config(file, out, prompts, *more):
    validate = [f"validate.path={prompts}", "validate.every=2", "validate.max_new_tokens=12", "validate.concurrency=3"]
    return load_config(file, f"out={out}", *validate, *more)


def validations(out) -> dict[int, dict]:
    return {row["step"]: row for row in curves.rows(out / "metrics.jsonl") if "val_tau" in row}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_validation_is_an_evaluation(file, prompts, tmp_path, temperature):
    """tau, its interval and acceptance by slot in metrics.jsonl equal those of `python -m deepspec.eval` on the same
    checkpoint, prompts, limit, seed and temperature, though the batch is another; the drafter trains in float32 and is
    decoded in the target's dtype, as it is served."""
    out = tmp_path / "out"
    for _ in fit(
        config(file, out, prompts, "train.save_every=3", "validate.every=3", "train.keep_last=9", "validate.prompts=5",
               "validate.seed=11", "train.lr=1e-2", f"validate.temperature={temperature}")
    ):  # fmt: skip
        pass
    rows = validations(out)
    assert list(rows) == [3, 6]
    for step, row in rows.items():
        evaluate(
            ["--drafter", str(checkpoint.folder(out, step)), "--tasks", prompts, "--out", str(tmp_path / f"e{step}"),
             "--limit", "5", "--max-new-tokens", "12", "--seed", "11", "--temperature", str(temperature),
             "--concurrency", "1", "--equality", "0", "--warmup", "0", "--device", "cpu"]
        )  # fmt: skip
        (result,) = json.loads((tmp_path / f"e{step}" / "results.json").read_text())
        assert result["samples"] == 5 and result["tau"] == row["val_tau"] and 1 <= row["val_tau"] <= 5
        assert result["tau_interval"] == row["val_tau_interval"]
        slots = {g: r for g, r in enumerate(result["accept_rates_conditional"]) if r is not None}
        assert slots == {g: row[f"val_accept@{g}"] for g in range(4) if f"val_accept@{g}" in row}


def test_validation_disturbs_nothing(file, prompts, tmp_path):
    """Weights, losses and the optimiser are bit-equal with and without it; the drafter is left in training mode, in
    float32; a run without prompts logs no figure of it."""
    *_, plain = fit(load_config(file, f"out={tmp_path / 'a'}"))
    *_, watched = fit(config(file, tmp_path / "b", prompts))
    assert same(weights(plain.drafter), weights(watched.drafter)) and watched.drafter.training
    kept = [{k: v for k, v in row.items() if not k.startswith("val_")} for row in rows_of(tmp_path / "b")]
    assert kept == rows_of(tmp_path / "a") and not validations(tmp_path / "a")


def test_the_best_checkpoint_stays(file, prompts, tmp_path, monkeypatch):
    """The checkpoint of the highest tau is kept though newer ones come, also across an interruption; ties go to the
    earlier; a validation between two saves saves by itself."""
    taus = {2: 1.5, 4: 2.5, 6: 2.5}

    def run(out, stop=None):
        monkeypatch.setattr("deepspec.train.validate.stats.tau", lambda g: taus[step[0]])
        for report in fit(config(file, out, prompts, "train.save_every=5", "train.keep_last=1")):
            step[0] = report.step + 1
            if report.step == stop:
                return

    step = [1]
    run(tmp_path / "a")
    assert [p.name for p in checkpoint.found(tmp_path / "a")] == ["step-0000004", "step-0000006"]
    assert checkpoint.best(tmp_path / "a") == (4, 2.5)
    step = [1]
    run(tmp_path / "b", stop=5)
    step = [6]
    run(tmp_path / "b")
    assert checkpoint.best(tmp_path / "b") == (4, 2.5) and checkpoint.found(tmp_path / "b")[0].name == "step-0000004"


def test_what_is_wrong_is_said_before_training(file, prompts, tmp_path):
    """A prompt file that is missing, a prompt too long, a tracker unknown: one line each, and nothing is left."""
    for changes, words in (
        (["validate.path=nowhere.jsonl"], "nowhere.jsonl"),
        ([f"validate.path={prompts}", "validate.max_new_tokens=255"], "validate.max_new_tokens"),
        (["train.trackers=nothing"], "no tracker 'nothing'"),
    ):
        with pytest.raises(InputError, match=words) as caught:
            list(fit(load_config(file, f"out={tmp_path / 'out'}", *changes)))
        assert len(str(caught.value).splitlines()) == 1
        assert not (tmp_path / "out").exists() or not files(tmp_path / "out")
    for name, value in (("every", 0), ("prompts", 0), ("max_new_tokens", 0), ("concurrency", 0), ("temperature", -1.0)):
        with pytest.raises(ConfigError, match=f"validate.{name}"):
            ValidateConfig(**{name: value})


def test_prompts_that_are_trained_on_are_counted(prompts):
    """A prompt that begins a training row is not held out; one that only shares its first tokens is."""
    import numpy as np

    held = read_prompts(ValidateConfig(path=prompts), None, "auto")
    assert [seed for _, seed in held] == list(range(7))
    ids = [p.prompt_ids for p, _ in held]
    rows = [np.array([*ids[3], 5, 6]), np.array([*ids[4][:-1], (ids[4][-1] + 1) % 39, 1]), np.array([0, *ids[5]])]
    assert overlap(held, rows) == sum(ids[3][: len(x)] == x for x in ids) >= 1
    assert overlap([], rows) == 0


class Fake:
    """A tracker in the form of accelerate's."""

    requires_logging_directory = True
    seen: ClassVar[list] = []

    def __init__(self, name, logging_dir):
        Fake.seen.append(("made", name, logging_dir))

    def store_init_configuration(self, values):
        assert all(isinstance(v, int | float | str) for v in values.values())
        Fake.seen.append(("config", values["train.lr"], values["drafter.target_layer_ids"]))

    def log(self, values, step):
        assert all(isinstance(v, float) and math.isfinite(v) for v in values.values()) and "step" not in values
        Fake.seen.append(("log", step, values))

    def finish(self):
        Fake.seen.append(("finish",))


def test_trackers_get_what_the_log_gets(file, prompts, tmp_path, monkeypatch):
    """Settings once, every logged number at its step, and the end, also where a run is closed."""
    monkeypatch.setattr(trackers, "find", lambda name: Fake)
    monkeypatch.setattr("deepspec.train.setup.find", lambda name: Fake)
    for stop in (None, 3):
        Fake.seen.clear()
        out = tmp_path / str(stop)
        run = fit(config(file, out, prompts, "train.trackers=one,two"))
        for report in run:
            if report.step == stop:
                run.close()
        logged = [x for x in Fake.seen if x[0] == "log"]
        rows = curves.rows(out / "metrics.jsonl")
        assert [s for _, s, _ in logged] == [row["step"] for row in rows for _ in range(2)]
        assert logged[0][2].items() <= {k: v for k, v in rows[0].items() if isinstance(v, int | float)}.items()
        assert "val_tau" in logged[2][2]
        assert [x[0] for x in Fake.seen if x[0] != "log"] == ["made", "config"] * 2 + ["finish"] * 2
        assert Fake.seen[1] == ("config", 3e-3, "[0, 2]")


def test_a_reduced_vocabulary_is_validated(tmp_path, prompts):
    """The served copy drafts from the same tokens as the drafter that trains."""
    run = write_run(tmp_path)
    *_, report = fit(config(run, tmp_path / "out", prompts, "drafter.draft_vocab_size=20"))
    assert validations(tmp_path / "out") and report.drafter.vocab.draft_size == 20
    assert torch.equal(report.drafter.vocab.embedding, hf_model("qwen3").get_input_embeddings().weight)
