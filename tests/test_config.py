"""Laws of settings: a mistake is one clear line with what would be right, found before anything is made."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import LAYERS, MASK, V, token_rows, write_run

import deepspec
from deepspec import (
    Config,
    ConfigError,
    DataConfig,
    DSparkConfig,
    InputError,
    LossConfig,
    TrainConfig,
    cli,
    load_config,
)
from deepspec.config import as_dict, parse
from deepspec.modeling.target import Target
from deepspec.train import __main__ as train


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a saved target, data and run.py."""
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    return folder


@pytest.fixture
def file(home):
    return home / "run.py"


# -- reading and overriding ----------------------------------------------------------------------------------------


def test_a_file_is_its_config(file):
    """load_config returns what the file defines, frozen; overrides change that one key and nothing else."""
    config = load_config(file)
    assert isinstance(config, Config) and config.train.max_steps == 6 and config.seed == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 4
    other = load_config(str(file), "train.lr=1e-4", "drafter.markov_head_type=rnn")
    assert other.train.lr == 1e-4 and other.drafter.markov_head_type == "rnn"
    undone = dataclasses.replace(
        other,
        train=dataclasses.replace(other.train, lr=config.train.lr),
        drafter=dataclasses.replace(other.drafter, markov_head_type="vanilla"),
    )
    assert undone == config and load_config(file) == config


@pytest.mark.parametrize(
    "override, get, value",
    [
        ("train.lr=1", lambda c: c.train.lr, 1.0),
        ("train.lr = 2e-3 ", lambda c: c.train.lr, 2e-3),
        ("train.max_steps=None", lambda c: c.train.max_steps, None),
        ("train.max_steps=none", lambda c: c.train.max_steps, None),
        ("train.max_steps=7", lambda c: c.train.max_steps, 7),
        ("drafter.target_layer_ids=1,3", lambda c: c.drafter.target_layer_ids, (1, 3)),
        ("drafter.target_layer_ids=(1,3)", lambda c: c.drafter.target_layer_ids, (1, 3)),
        ("drafter.target_layer_ids=[1, 3]", lambda c: c.drafter.target_layer_ids, (1, 3)),
        ("drafter.target_layer_ids=2", lambda c: c.drafter.target_layer_ids, (2,)),
        ("train.betas=0.9,0.99", lambda c: c.train.betas, (0.9, 0.99)),
        ("train.betas=0,0", lambda c: c.train.betas, (0.0, 0.0)),
        ("data.path=a.jsonl", lambda c: c.data.path, ("a.jsonl",)),
        ("data.path=a.jsonl,b/c.jsonl", lambda c: c.data.path, ("a.jsonl", "b/c.jsonl")),
        ("data.path=('a.jsonl','b.jsonl')", lambda c: c.data.path, ("a.jsonl", "b.jsonl")),
        ("drafter.confidence_with_markov=False", lambda c: c.drafter.confidence_with_markov, False),
        ("loss.reduce=document", lambda c: c.loss.reduce, "document"),
        ("out=some/where", lambda c: c.out, Path("some/where")),
        ("data.path=~/a.jsonl,b.jsonl", lambda c: c.data.path, (str(Path.home() / "a.jsonl"), "b.jsonl")),
        ("data.path=['~/a.jsonl']", lambda c: c.data.path, (str(Path.home() / "a.jsonl"),)),
        ("validate.path=~/a.jsonl", lambda c: c.validate.path, (str(Path.home() / "a.jsonl"),)),
        ("data.features=~/f", lambda c: c.data.features, str(Path.home() / "f")),
        ("out=~/runs/x", lambda c: c.out, Path.home() / "runs" / "x"),
        ("target=123", lambda c: c.target, "123"),
        ("target=a=b", lambda c: c.target, "a=b"),
        ("target_revision=None", lambda c: c.target_revision, None),
        ("target_revision=main", lambda c: c.target_revision, "main"),
        ("target_revision=1234567", lambda c: c.target_revision, "1234567"),
        ("target_revision=1e10", lambda c: c.target_revision, "1e10"),
        ("seed=-5", lambda c: c.seed, -5),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_overrides_are_read_by_the_fields_type(file, override, get, value):
    """Text becomes the field's own type: int -> float, one or several -> tuple, none -> None, digits -> str where a
    string is wanted, the right-hand side may hold '='."""
    found = get(load_config(file, override))
    assert found == value and type(found) is type(value)


def test_later_overrides_win_and_may_depend_on_each_other(file):
    """Overrides are one change: settings that fit together only when all are applied are accepted in any order."""
    assert load_config(file, "train.lr=1", "train.lr=2").train.lr == 2.0
    for order in (("train.batch_size=9", "train.micro_batch=3"), ("train.micro_batch=3", "train.batch_size=9")):
        config = load_config(file, *order)
        assert (config.train.batch_size, config.train.micro_batch) == (9, 3)
    for order in (
        ("loss.confidence=0", "drafter.confidence_head=False"),
        ("drafter.confidence_head=False", "loss.confidence=0"),
    ):
        assert not load_config(file, *order).drafter.has_confidence


BAD_OVERRIDES = {
    f"seed={2**64}": ("seed must fit into 64 bits",),
    f"validate.seed={2**62}": ("validate.seed must be between",),
    "validate.temperature=1e999": ("validate.temperature must be >= 0",),
    "train.Ir=1": ("train.Ir", "did you mean 'lr'"),
    "train.warm_up=0.1": ("train.warm_up", "did you mean 'warmup'"),
    "drafter.markov_ranks=4": ("drafter.markov_ranks", "did you mean 'markov_rank'"),
    "sed=1": ("sed", "did you mean 'seed'"),
    "zzz=1": ("zzz", "it has: data, drafter"),
    "train.lr.x=1": ("train.lr.x", "'x'"),
    "train.lr=fast": ("train.lr", "float", "'fast'"),
    "train.lr=-1": ("train.lr", "> 0", "-1"),
    "train.epochs=True": ("train.epochs", "int", "'True'"),
    "train.epochs=1.5": ("train.epochs", "int", "'1.5'"),
    "train.max_steps=0": ("train.max_steps", ">= 1", "0"),
    "train.micro_batch=3": ("train.micro_batch", "divide", "4"),
    "train.precision=fp16": ("train.precision", "'bf16', 'fp32'", "'fp16'"),
    "drafter.markov_head_type=lstm": ("drafter.markov_head_type", "'vanilla', 'gated', 'rnn'", "'lstm'"),
    "drafter.target_layer_ids=4,2": ("drafter.target_layer_ids", "increasing", "(4, 2)"),
    "drafter.target_layer_ids=-1,2": ("drafter.target_layer_ids", ">= 0", "(-1, 2)"),
    "drafter.target_layer_ids=a,b": ("drafter.target_layer_ids", "tuple of int", "'a,b'"),
    "drafter.target_layer_ids=": ("drafter.target_layer_ids",),
    "drafter.confidence_head=1": ("drafter.confidence_head", "bool", "'1'"),
    "loss.ce=nan": ("loss.ce",),
    "loss.tv=-1": ("loss.tv", ">= 0", "-1"),
    "loss.weight=1": ("loss.weight", "LossConfig"),
    "train": ("'train'", "dotted.key=value"),
    "train=1": ("train is a section", "train.lr"),
    "drafter=x": ("drafter is a section", "drafter."),
    "data.max_length=1": ("data.max_length", ">= 2"),
    "=5": ("''",),
}


@pytest.mark.parametrize("override", BAD_OVERRIDES)
def test_a_bad_override_says_what_and_what_would_be_right(file, override):
    """ConfigError of one line with the key, the value, and the nearest key or the type that would do."""
    with pytest.raises(ConfigError) as caught:
        load_config(file, override)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    for word in BAD_OVERRIDES[override]:
        assert word in message


BAD_FILES = {
    "unknown key": (
        "loss=deepspec.LossConfig(",
        "loss=deepspec.LossConfig(slot_decy=1, ",
        ("LossConfig", "slot_decy", "did you mean 'slot_decay'"),
    ),
    "unknown key of the drafter": (
        "markov_rank=4",
        "markov_rnak=4",
        ("DSparkConfig", "markov_rnak", "did you mean 'markov_rank'"),
    ),
    "unknown key at the top": ("seed=3", "sede=3", ("Config", "sede", "did you mean 'seed'")),
    "key that is missing": ("target=", "target_revision=", ("target",)),
    "wrong type": ("lr=3e-3", "lr='3e-3'", ("lr", "float", "'3e-3'")),
    "section of another kind": (
        "loss=deepspec.LossConfig(ce=0.1, tv=0.9, confidence=1.0, slot_decay=0.8, chunk=32)",
        "loss=deepspec.TrainConfig()",
        ("loss", "LossConfig"),
    ),
    "value out of range": ("slot_decay=0.8", "slot_decay=1.5", ("loss.slot_decay", "1.5")),
    "unsorted layers": ("(0, 2)", "(2, 0)", ("drafter.target_layer_ids", "(2, 0)")),
    "negative layer": ("(0, 2)", "(-1, 2)", ("drafter.target_layer_ids", "(-1, 2)")),
    "syntax": ("config = ", "config = = ", ("line 4",)),
    "no config": ("config = ", "konfig = ", ("must define `config", "NoneType")),
    "another config": ("config = ", "config = 5; rest = ", ("must define `config", "int")),
    "unknown class": ("deepspec.DSparkConfig", "deepspec.DSparkConfg", ("DSparkConfg",)),
    "unknown name": ("seed=3", "seed=three", ("three",)),
    "failed import": ("import deepspec", "import deepspec, no_such_module", ("no_such_module",)),
    "exception of its own": ("import deepspec", "import deepspec; [][1]", ("index",)),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_a_bad_file_says_what_and_where(file, what, tmp_path):
    """ConfigError of one line that begins with the file and names the fault."""
    old, new, words = BAD_FILES[what]
    text = file.read_text()
    assert text.count(old) == 1
    bad = tmp_path / "bad.py"
    bad.write_text(text.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        load_config(bad)
    message = str(caught.value)
    assert len(message.splitlines()) == 1 and message.startswith(str(bad))
    for word in words:
        assert word in message


def test_a_missing_file_is_named(tmp_path):
    """A config file that is not there, or is a directory."""
    for path in (tmp_path / "no.py", tmp_path):
        with pytest.raises(ConfigError, match=path.name):
            load_config(path)


def test_a_recipe_builds_on_another(file, tmp_path, monkeypatch):
    """A file may load its neighbour relative to itself and change it, from any working directory; overrides come
    last."""
    (file.parent / "child.py").write_text(
        "from pathlib import Path\nimport dataclasses, deepspec\n"
        "base = deepspec.load_config(Path(__file__).parent / 'run.py', 'seed=8')\n"
        "config = dataclasses.replace(base, target_revision='abc')\n"
    )
    monkeypatch.chdir(tmp_path)
    config = load_config(file.parent / "child.py", "train.lr=5")
    assert (config.seed, config.target_revision, config.train.lr) == (8, "abc", 5.0)


def test_every_shipped_recipe_loads_anywhere(tmp_path, monkeypatch):
    """All files under config/ define a Config, from any working directory."""
    recipes = sorted((Path(deepspec.__file__).parents[1] / "config").rglob("*.py"))
    assert len(recipes) >= 6
    monkeypatch.chdir(tmp_path)
    for recipe in recipes:
        config = load_config(recipe)
        assert recipe.parent.name == type(config.drafter).__name__.removesuffix("Config").lower()


# -- the sections themselves ---------------------------------------------------------------------------------------


def test_values_are_converted_or_refused():
    """int -> float, str -> Path, list -> tuple; nothing else is guessed: no bool for int, no str for int, no float for
    int, no None where it is not allowed."""
    assert TrainConfig(lr=1).lr == 1.0 and isinstance(TrainConfig(lr=1).lr, float)
    assert DSparkConfig(target_layer_ids=[1, 2], mask_token_id=3).target_layer_ids == (1, 2)
    assert DataConfig(path="x.jsonl").path == ("x.jsonl",) == DataConfig(path=Path("x.jsonl")).path
    for bad in (
        dict(lr=True),
        dict(epochs=True),
        dict(epochs="3"),
        dict(epochs=3.0),
        dict(lr=None),
        dict(betas=0.9),
        dict(device=1),
    ):
        with pytest.raises(ConfigError, match=f"TrainConfig.{next(iter(bad))}"):
            TrainConfig(**bad)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: LossConfig(), "one of loss.ce"),
        (lambda: LossConfig(ce=float("nan")), "loss.ce"),
        (lambda: LossConfig(ce=float("inf")), "loss.ce"),
        (lambda: LossConfig(ce=1, slot_decay=0), "slot_decay"),
        (lambda: LossConfig(ce=1, chunk=0), "chunk"),
        (lambda: LossConfig(ce=1, reduce="block"), "reduce"),
        (lambda: TrainConfig(lr=float("nan")), "lr"),
        (lambda: TrainConfig(lr=float("inf")), "lr"),
        (lambda: TrainConfig(clip=0), "clip"),
        (lambda: TrainConfig(warmup=1), "warmup"),
        (lambda: TrainConfig(betas=(0.9,)), "betas"),
        (lambda: TrainConfig(weight_decay=-1), "weight_decay"),
        (lambda: DataConfig(path=()), "data.path"),
        (lambda: DataConfig(path=("a",), min_supervised=1), "min_supervised"),
    ],
)
def test_values_out_of_range_are_refused(make, words):
    """Each section refuses what cannot be when it is made, NaN and infinities included, and names the key."""
    with pytest.raises(ConfigError, match=words):
        make()


def test_plain_values():
    """as_dict is JSON that says which drafter it is, and equal for equal configs."""
    config = Config(
        target="t",
        drafter=DSparkConfig(target_layer_ids=(1,), mask_token_id=0),
        loss=LossConfig(ce=1.0),
        data=DataConfig(path="x"),
        out="o",
    )
    plain = as_dict(config)
    assert json.loads(json.dumps(plain)) == plain
    assert (
        plain["drafter"]["kind"] == "DSparkConfig"
        and plain["out"] == "o"
        and plain["drafter"]["target_layer_ids"] == [1]
    )


def test_parse_never_runs_code(tmp_path):
    """An override is data: a call in it is text."""
    assert parse(f"__import__('os').mkdir('{tmp_path}/x')", str, "k").startswith("__import__")
    with pytest.raises(ConfigError):
        parse(f"__import__('os').mkdir('{tmp_path}/x')", int, "k")
    assert not list(tmp_path.iterdir())
    for odd in ("{[]: 1}", "(" * 500, "\x00", "1" * 5000):
        with pytest.raises(ConfigError):
            parse(odd, int, "k")


# -- what is found only with the target, through fit ---------------------------------------------------------------


@pytest.fixture
def unloaded(monkeypatch):
    """Fails where a model's weights would be read: mistakes are to be found before."""

    def load(*args, **kwargs):
        raise AssertionError("the model was loaded first")

    monkeypatch.setattr(Target, "load", load)


def tree(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def target_like(home, folder, **changes) -> Path:
    """A target directory whose config says something else."""
    folder.mkdir()
    for p in (home / "target").iterdir():
        (folder / p.name).symlink_to(p)
    (folder / "config.json").unlink()
    raw = json.loads((home / "target" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **changes}))
    return folder


def bad_runs(home, tmp):
    """Name -> (overrides, words the message must have)."""
    rows = token_rows(3)
    jsonl = lambda name, text: (tmp / name).write_text(text) and f"data.path={tmp / name}"  # noqa: E731
    good = json.dumps(rows[0])
    return {
        "layer out of range": (["drafter.target_layer_ids=1,4"], ("drafter.target_layer_ids", "4", "0 to 3")),
        "mask outside the vocabulary": ([f"drafter.mask_token_id={V}"], ("drafter.mask_token_id", str(V))),
        "mask is eos": ([f"target={target_like(home, tmp / 'eos', eos_token_id=[5, MASK])}"], ("mask_token_id", "eos")),
        "mask is pad": ([f"target={target_like(home, tmp / 'pad', pad_token_id=MASK)}"], ("mask_token_id", "pad")),
        "no target": ([f"target={tmp / 'nowhere'}"], ("nowhere",)),
        "target without config": ([f"target={tmp}"], ("config.json",)),
        "unknown family": ([f"target={target_like(home, tmp / 'gpt', model_type='gpt2')}"], ("families/gpt2.py",)),
        "no data": (["data.path=no.jsonl"], ("no.jsonl",)),
        "empty data": ([jsonl("empty.jsonl", "\n")], ("empty.jsonl, line 1",)),
        "malformed line": ([jsonl("bad.jsonl", good + "\n{oops\n")], ("bad.jsonl, line 2",)),
        "id outside the vocabulary": (
            [jsonl("id.jsonl", good + '\n{"prompt_ids": [1], "answer_ids": [99, 1, 1, 1]}\n')],
            ("id.jsonl, line 2", "99"),
        ),
        "all masked": (
            [jsonl("masked.jsonl", '{"prompt_ids": [1, 2], "answer_ids": [3]}\n')],
            ("masked.jsonl", "fewer than"),
        ),
        "chat without a tokenizer": (
            [
                jsonl(
                    "chat.jsonl",
                    '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}\n',
                )
            ],
            ("chat.jsonl, line 1", "tokenizer"),
        ),
        "no such device": (["train.device=quantum"], ("quantum",)),
        "confidence loss without a head": (["drafter.confidence_head=False"], ("confidence",)),
    }


RUNS = [
    "layer out of range",
    "mask outside the vocabulary",
    "mask is eos",
    "mask is pad",
    "no target",
    "target without config",
    "unknown family",
    "no data",
    "empty data",
    "malformed line",
    "id outside the vocabulary",
    "all masked",
    "chat without a tokenizer",
    "no such device",
    "confidence loss without a head",
]


@pytest.mark.parametrize("what", RUNS)
def test_a_run_that_cannot_be_is_refused_before_the_model_loads(
    what, home, file, tmp_path, unloaded, monkeypatch, capsys
):
    """python -m deepspec.train with a mistake that only target or data show: exit code 2, exactly one line on stderr
    with the fault, no model loaded, and nothing left behind, not even the output directory."""
    cases = bad_runs(home, tmp_path)
    assert set(cases) == set(RUNS)
    overrides, words = cases[what]
    before = tree(tmp_path)
    argv = ["deepspec.train", "--config", str(file), "--set", f"out={tmp_path / 'new' / 'run'}", *overrides]
    monkeypatch.setattr(sys, "argv", argv)
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        cli.main(train.command)
    err = capsys.readouterr().err
    assert caught.value.code == 2, err
    assert len(err.splitlines()) == 1 and err.startswith("error: ")
    for word in words:
        assert word in err
    assert tree(tmp_path) == before


def test_an_output_that_cannot_be_written_is_found_first(file, tmp_path, unloaded):
    """Below a plain file, or where something else is: InputError with the path before the target is read."""
    (tmp_path / "plain").write_text("x")
    for out in (tmp_path / "plain", tmp_path / "plain" / "run"):
        with pytest.raises(InputError, match="plain"):
            deepspec.fit(load_config(file, f"out={out}", f"target={tmp_path / 'nowhere'}"))
    assert tree(tmp_path) == ["plain"]


# -- the command itself --------------------------------------------------------------------------------------------


def run(*argv, cwd):
    return subprocess.run(
        [sys.executable, "-m", "deepspec.train", *argv], capture_output=True, text=True, cwd=cwd, env=environment()
    )


def environment():
    import os

    root = str(Path(deepspec.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": root, "PYTHONWARNINGS": "ignore"}


def test_the_command_says_one_line_and_exits_with_two(file, tmp_path):
    """A real process, transformers and all: one line on stderr, exit code 2, nothing left behind."""
    done = run("--config", str(file), "--set", f"drafter.mask_token_id={V}", f"out={tmp_path / 'o'}", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1 and f"mask_token_id {V}" in done.stderr
    assert not list(tmp_path.iterdir())


def test_exit_codes(capsys):
    """0 and the command's own code, 2 with one line for InputError, 130 for Ctrl-C; a bug keeps its traceback."""
    for raised, code in ((InputError("what: where"), 2), (KeyboardInterrupt(), 130)):

        def command(raised=raised):
            raise raised

        with pytest.raises(SystemExit) as caught:
            cli.main(command)
        assert caught.value.code == code and len(capsys.readouterr().err.splitlines()) == 1
    for returned, code in ((None, 0), (0, 0), (3, 3)):
        with pytest.raises(SystemExit) as caught:
            cli.main(lambda returned=returned: returned)
        assert caught.value.code == code

    def bug():
        raise KeyError("x")

    with pytest.raises(KeyError):
        cli.main(bug)


def test_layers_and_mask_fit_the_tiny_target():
    """The settings of these tests are what they claim to be."""
    assert MASK == V - 1 and LAYERS == (0, 2) and torch.get_num_threads() == 1
