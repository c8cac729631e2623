"""Laws of the package as a whole: its names, what importing it costs, and its style where a machine can judge it."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import deepspec

ROOT = Path(deepspec.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

NAMES = [
    "Target",
    "load_drafter",
    "generate",
    "Generation",
    "Sampling",
    "verify_all",
    "threshold",
    "verify",
    "load_config",
    "fit",
    "DSparkConfig",
    "DFlashConfig",
    "Batch",
    "Objective",
    "LossConfig",
    "Proposal",
    "Drafter",
    "Config",
    "DataConfig",
    "TrainConfig",
    "ConfigError",
    "InputError",
]
"""Section 4 of the design; Eagle3Config joins when Eagle3 does."""


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_exists(name):
    """The names of the contract are attributes of the package, listed, and come with a docstring."""
    assert name in deepspec.__all__ and name in dir(deepspec)
    assert getattr(deepspec, name).__doc__


def test_no_other_name_is_public():
    """What the package lists exists; what it lacks is an AttributeError that names it."""
    for name in deepspec.__all__:
        assert getattr(deepspec, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        deepspec.no_such_name  # noqa: B018


METHODS = {
    "Target": ["load", "open", "features"],
    "Drafter": [
        "anchors",
        "hidden",
        "rows",
        "logits",
        "confidence",
        "new_state",
        "observe",
        "propose",
        "reset_rows",
        "save",
        "num_slots",
    ],
    "Batch": ["documents", "positions"],
    "Generation": ["tau", "text"],
}
ARGUMENTS = {
    "generate": ["target", "drafter", "prompts"],
    "verify": ["target_probs", "proposal", "lengths", "uniforms"],
    "load_drafter": ["path", "target"],
    "load_config": ["path", "overrides"],
    "fit": ["config"],
    "threshold": ["minimum"],
}
FIELDS = {
    "Batch": ["tokens", "loss_mask", "features", "hidden", "document", "position", "sample"],
    "Proposal": ["tokens", "probs", "confidence"],
    "Sampling": ["temperature", "top_k", "top_p", "min_p"],
    "Generation": ["tokens", "rounds"],
    "LossConfig": ["ce", "kl", "tv", "confidence", "slot_decay", "reduce"],
    "DSparkConfig": [
        "block_size",
        "target_layer_ids",
        "num_draft_layers",
        "mask_token_id",
        "markov_head_type",
        "markov_rank",
    ],
    "Config": ["target", "drafter", "loss", "data", "train", "out", "seed"],
}


def test_signatures_of_the_contract():
    """Methods, leading arguments and fields that other code is written against are there, under these names."""
    for owner, names in METHODS.items():
        assert not [n for n in names if not hasattr(getattr(deepspec, owner), n)]
    for function, names in ARGUMENTS.items():
        assert list(inspect.signature(getattr(deepspec, function)).parameters)[: len(names)] == names
    for owner, names in FIELDS.items():
        assert set(names) <= set(inspect.signature(getattr(deepspec, owner)).parameters)
    from deepspec.modeling.target import Scored, Session

    assert {"score", "rewind", "reset", "lengths"} <= {*dir(Session), *Session.__init__.__code__.co_names}
    assert {"logits", "features", "hidden"} <= {*Scored.__annotations__, *dir(Scored)}


def test_importing_is_quick_and_quiet():
    """In a fresh process `import deepspec` loads neither transformers nor datasets nor CUDA, opens no socket, prints
    nothing; reading a config and naming every public class but loading a model does not load transformers either."""
    program = """
import socket, sys
def refuse(*a, **k): raise OSError("no network at import")
socket.socket.connect = refuse
import deepspec
assert not {"transformers", "datasets", "accelerate", "matplotlib"} & set(sys.modules), "import deepspec"
for name in deepspec.__all__:
    getattr(deepspec, name)
heavy = {"transformers", "datasets", "accelerate", "matplotlib", "tensorboard"} & set(sys.modules)
assert not heavy, heavy
import torch
assert not torch.cuda.is_initialized()
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, cwd=ROOT.parent
    )
    assert done.returncode == 0, done.stderr
    assert not done.stdout and not done.stderr


def calls(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node


KINDS = {
    "DFlash",
    "DSpark",
    "Eagle3",
    "BlockDrafter",
    "DFlashConfig",
    "DSparkConfig",
    "Eagle3Config",
    "BlockConfig",
    "Drafter",
}
"""DrafterConfig, the base that settings are declared with, tells no drafter from another."""


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nobody_asks_which_drafter_it_has(path):
    """Outside modeling/ and hub/ no isinstance or issubclass names a kind of drafter, and no hasattr or getattr asks a
    drafter, its settings, a target's family or spec what it can do."""
    if path.relative_to(ROOT).parts[0] in ("modeling", "hub"):
        return
    for call in calls(ast.parse(path.read_text())):
        where = f"{path}:{call.lineno}"
        if call.func.id in ("isinstance", "issubclass"):
            named = {
                n.id if isinstance(n, ast.Name) else n.attr
                for n in ast.walk(call.args[1])
                if isinstance(n, ast.Name | ast.Attribute)
            }
            assert not named & KINDS, where
        if call.func.id in ("hasattr", "getattr") and not isinstance(call.args[0], ast.Call):
            asked = ast.unparse(call.args[0]).split(".")[-1]
            assert asked not in ("drafter", "d", "family", "spec", "batch", "proposal", "schedule"), where


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_style_of_a_file(path):
    """A file says what it is in its first line, and has no pickle, no print inside models, no import of transformers'
    modelling internals outside modeling/."""
    text = path.read_text()
    tree = ast.parse(text)
    where = path.relative_to(ROOT)
    assert ast.get_docstring(tree) and text.startswith('"""')
    for node in ast.walk(tree):
        modules = (
            [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and not node.level
            else []
        )
        for module in modules:
            assert module.split(".")[0] not in ("pickle", "dill", "joblib")
            assert not module.startswith("transformers.model") or where.parts[0] == "modeling"
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            called = ast.unparse(call.func)
            assert called not in ("torch.load", "torch.save")
            assert called != "print" or (
                where.parts[0] not in ("modeling", "hub") and where.name not in ("sampling.py", "objective.py")
            )


def test_no_file_is_long():
    """At most 350 lines a file."""
    assert not [str(p.relative_to(ROOT)) for p in FILES if len(p.read_text().splitlines()) > 350]
