"""The embedded target, by a recipe of a few steps: reproducible, resumable, whole or absent, nothing held out seen."""

import dataclasses
import json
import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepspec import tiny
from deepspec.checked import InputError
from deepspec.config import load_config
from deepspec.tiny import recipe, text, training

RECIPE = tiny.Recipe(
    vocab_size=384,
    layers=2,
    hidden_size=32,
    intermediate_size=64,
    heads=2,
    kv_heads=1,
    head_dim=16,
    source_chars=200_000,
    steps=4,
    batch_size=2,
    length=32,
    warmup_steps=2,
    train_prompts=12,
    held_out_prompts=10,
    measure_prompts=4,
    measure_tokens=8,
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target of RECIPE, built once without interruption."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEPSPEC_CACHE", str(tmp_path_factory.mktemp("cache")))
        return tiny.ensure(progress=False, recipe=RECIPE)


def rows(path: Path) -> list[dict]:
    """A JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_target_dir_is_pure_and_names_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking where creates nothing. Any changed setting is another directory, and so is any other Python: even a patch
    release changes the text."""
    monkeypatch.setenv("DEEPSPEC_CACHE", str(tmp_path / "none"))
    assert tiny.target_dir() == tiny.target_dir(tiny.Recipe())
    assert tiny.target_dir().is_relative_to(tmp_path / "none" / "tiny")
    assert not (tmp_path / "none").exists()
    other = {int: lambda value: value * 2, float: lambda value: value * 2, str: lambda value: "muon"}
    values = {f.name: getattr(RECIPE, f.name) for f in dataclasses.fields(tiny.Recipe)}
    changed = [{name: other[type(value)](value)} for name, value in values.items()]
    paths = {tiny.target_dir(dataclasses.replace(RECIPE, **change)) for change in changed}
    paths.add(tiny.target_dir(RECIPE))
    for version in ((3, 11, 2), (3, 11, 7), (3, 12, 7)):
        monkeypatch.setattr(recipe, "sys", SimpleNamespace(version_info=(*version, "final", 0)))
        paths.add(tiny.target_dir(RECIPE))
    assert len(paths) >= len(changed) + 3  # this Python may be one of the three


def test_loads_as_any_local_model(built: Path) -> None:
    """The directory is what transformers reads, with its stop ids, and an existing one is not built again."""
    model = AutoModelForCausalLM.from_pretrained(built, dtype="bfloat16")
    assert (model.config.model_type, model.config.num_hidden_layers, model.config.vocab_size) == ("qwen3", 2, 384)
    assert model.generation_config.eos_token_id == [tiny.END_ID, tiny.ENDOFTEXT_ID]
    assert model.generation_config.pad_token_id == tiny.PAD_ID
    assert load_file(built / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    before = (built / "tiny.json").stat().st_mtime_ns
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEPSPEC_CACHE", str(built.parent.parent))
        assert tiny.ensure(progress=False, recipe=RECIPE) == built
    assert (built / "tiny.json").stat().st_mtime_ns == before


def test_provenance(built: Path) -> None:
    """tiny.json says how the target was made and how it writes."""
    facts = json.loads((built / "tiny.json").read_text(encoding="utf-8"))
    assert facts["recipe"] == dataclasses.asdict(RECIPE)
    assert facts["tokens"]["seen"] == 4 * 2 * 32
    assert facts["command"] and facts["versions"]["torch"] == torch.__version__
    assert facts["loss"]["held_out"] > 0 and 0 < facts["distinct_4gram_rate"] <= 1
    assert facts["seconds"].keys() == {"text", "train", "measure"}
    assert {p.name for p in built.parent.iterdir()} == {built.name, f".{built.name}.lock"}, "nothing else is left"


@pytest.mark.parametrize(
    "text", ["def f(x):\n\treturn x  # ünï ☃\n", "  leading", "a  b\r\n\n\n", "don't , stop .", "\x00\x7f"]
)
def test_tokens_round_trip(built: Path, text: str) -> None:
    """Every text decodes to itself, and none but a special token's own spelling gives a special id."""
    tokenizer = AutoTokenizer.from_pretrained(built)
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert min(ids) >= len(tiny.SPECIAL_TOKENS)


def test_special_tokens_and_template(built: Path) -> None:
    """Special ids are the constants; a chat is its turns between them, and a reply is a suffix."""
    tokenizer = AutoTokenizer.from_pretrained(built)
    assert tuple(tokenizer.convert_ids_to_tokens(list(range(6)))) == tiny.SPECIAL_TOKENS
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (tiny.END_ID, tiny.PAD_ID)
    assert tiny.MASK_ID not in (tiny.PAD_ID, tiny.END_ID, tiny.ENDOFTEXT_ID)
    chat = [{"role": "user", "content": "json"}, {"role": "assistant", "content": "Encode"}]
    asked = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(chat, return_dict=False)
    assert asked == [tiny.USER_ID, *tokenizer("json").input_ids, tiny.END_ID, tiny.ASSISTANT_ID]
    assert whole == [*asked, *tokenizer("Encode").input_ids, tiny.END_ID]


def test_held_out_text_is_not_trained_on(built: Path) -> None:
    """No held-out prompt occurs in the text the target learnt from, and no training prompt is anywhere else."""
    train, held_out = tiny.read_corpus(RECIPE)
    assert train and held_out and not train.keys() & held_out.keys()
    tokenizer = AutoTokenizer.from_pretrained(built)
    prompts = {kind: rows(built / f"prompts_{kind}.jsonl") for kind in ("train", "held_out")}
    assert (len(prompts["train"]), len(prompts["held_out"])) == (12, 10)
    for kind, documents, others in (("train", train, {}), ("held_out", held_out, train)):
        for row in prompts[kind]:
            text = tokenizer.decode(row["prompt_ids"])
            assert len(row["prompt_ids"]) == RECIPE.prompt_tokens and row["task"] == "tiny"
            assert any(text in document for document in documents.values())
            assert not any(text in document for document in others.values())
    ids = [row["id"] for kind in prompts for row in prompts[kind]]
    assert len(set(ids)) == len(ids)


def test_shared_paragraphs_stay_with_the_held_out() -> None:
    """Topics quote each other; a paragraph of some length that is held out is nowhere in the training text."""
    train, held_out = tiny.read_corpus(RECIPE)

    def paragraphs(documents: dict[str, str]) -> list[str]:
        normal = [" ".join(p.split()) for text in documents.values() for p in text.split("\n\n")]
        return [p for p in normal if len(p) >= 60]

    assert not set(paragraphs(train)) & set(paragraphs(held_out))
    assert len(set(paragraphs(train))) == len(paragraphs(train))


def test_interrupted_build_leaves_nothing_and_resumes_to_the_same_weights(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after two of four steps there is no target, only a checkpoint; the next build ends in the same bits."""
    monkeypatch.setenv("DEEPSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(training, "SAVE_SECONDS", 0.0)
    real, steps = training._batch, []

    def stop_at_two(tokens: torch.Tensor, step: int, recipe: tiny.Recipe) -> torch.Tensor:
        steps.append(step)
        if steps == [0, 1, 2]:
            raise KeyboardInterrupt
        return real(tokens, step, recipe)

    monkeypatch.setattr(training, "_batch", stop_at_two)
    path = tiny.target_dir(RECIPE)
    with pytest.raises(KeyboardInterrupt):
        tiny.ensure(progress=False, recipe=RECIPE)
    assert not path.exists()
    assert tiny.ensure(progress=False, recipe=RECIPE) == path
    assert steps == [0, 1, 2, 2, 3], "steps done before the interruption are not done again"
    once, twice = load_file(built / "model.safetensors"), load_file(path / "model.safetensors")
    assert once.keys() == twice.keys()
    assert all(torch.equal(once[name], twice[name]) for name in once)
    for name in ("prompts_train.jsonl", "prompts_held_out.jsonl", "tokenizer.json"):
        assert (built / name).read_bytes() == (path / name).read_bytes()


def test_checkpoint_of_other_text_is_not_used(tmp_path: Path) -> None:
    """A checkpoint made on other text (another Python) is passed over, not continued."""
    model = training.fresh(RECIPE)
    tokens = torch.arange(400) % 384
    part = tmp_path / "part.safetensors"
    parameters = dict(model.named_parameters())
    optimizers = [torch.optim.AdamW(parameters.values())]
    model(input_ids=tokens[None, :8], labels=tokens[None, :8]).loss.backward()
    optimizers[0].step()
    training._save(part, parameters, optimizers, {"step": 3, "seconds": 1.0, "loss": 2.0, "of": "this"})
    assert training._resume(part, parameters, optimizers, "this") == (3, 1.0, 2.0)
    assert training._resume(part, parameters, optimizers, "that") == (0, 0.0, 0.0)


def test_failure_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that fails in its last line has no directory that looks finished."""
    monkeypatch.setenv("DEEPSPEC_CACHE", str(tmp_path))

    def fail(path: Path, text: str) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(tiny, "write_text", fail)
    with pytest.raises(OSError, match="disk full"):
        tiny.ensure(progress=False, recipe=RECIPE)
    assert [p.name for p in (tmp_path / "tiny").iterdir() if not p.name.startswith(".")] == []
    assert list(tmp_path.rglob("model.safetensors")) == []


def test_second_builder_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once: one builds, the other waits and takes what the first made."""
    monkeypatch.setenv("DEEPSPEC_CACHE", str(tmp_path))
    path = tiny.target_dir(RECIPE)
    path.parent.mkdir(parents=True)
    with tiny._lock(path.with_name(f".{path.name}.lock")):
        other = multiprocessing.get_context("spawn").Process(target=tiny.ensure, args=(False, RECIPE))
        other.start()
        other.join(timeout=0.5)
        assert other.is_alive(), "it waits while the lock is held"
        path.mkdir()
        (path / "tiny.json").write_text("{}")
    other.join(timeout=60)
    assert other.exitcode == 0
    assert (path / "tiny.json").read_text() == "{}", "it did not build again"


def test_python_without_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python without its library as files is named, with what would be right."""
    monkeypatch.setattr(text.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(InputError, match=r"needs 200,000 characters .* holds 0; use a Python"):
        tiny.read_corpus(RECIPE)


def test_distinct_rate() -> None:
    """Within a row, averaged over rows; rows too short to have an n-gram do not count."""
    assert tiny.distinct_rate([[1, 2, 3, 4, 5]]) == 1.0
    assert tiny.distinct_rate([[1] * 7]) == 0.25
    assert tiny.distinct_rate([[1] * 7, [1, 2, 3, 4], [1, 2]]) == 0.625
    assert tiny.distinct_rate([]) == 0.0


@pytest.mark.parametrize("name", ["tiny", "smollm2_135m"])
def test_recipes_differ_in_the_drafter_only(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from any directory, the DFlash and DSpark recipes share target, data, steps and seed."""
    monkeypatch.chdir(tmp_path)
    root = Path(__file__).resolve().parents[1] / "config"
    dflash, dspark = (load_config(root / kind / f"{name}.py") for kind in ("dflash", "dspark"))
    assert dataclasses.replace(dflash, drafter=dspark.drafter, loss=dspark.loss, out=dspark.out) == dspark
    assert dflash.out != dspark.out and type(dflash.drafter) is not type(dspark.drafter)
    for field in dataclasses.fields(dflash.drafter):
        assert getattr(dflash.drafter, field.name) == getattr(dspark.drafter, field.name)
    if name == "tiny":
        assert dspark.drafter.mask_token_id == tiny.MASK_ID and dspark.drafter.target_layer_ids[-1] < tiny.RECIPE.layers
