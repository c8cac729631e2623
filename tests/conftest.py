"""What every test shares: one thread, no network, no cache of the user's."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before huggingface_hub is imported

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def apart(monkeypatch, tmp_path_factory):
    """No test reads or writes the user's cache, and none depends on the random state another left behind."""
    monkeypatch.setenv("DEEPSPEC_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def undrawn():
    """Pictures are most of a small evaluation's time, and say what results.json says."""
    from deepspec.eval import plots

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "available", lambda: False)
        yield
