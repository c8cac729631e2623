"""Laws of a target's quicker norms: they are transformers' own up to rounding, wherever and however they are called."""

import copy

import pytest
import torch
from helpers import hf_model, target

from deepspec import Target
from deepspec.modeling.norms import QuickNorm

QUICK = ["qwen3", "llama", "qwen2", "mistral"]


def norms(tgt):
    return [part for part in tgt.model.modules() if type(part).__name__.endswith("RMSNorm")]


def own(norm):
    """The forward of transformers' class."""
    kind = next(kind for kind in type(norm).__mro__ if kind.__module__.startswith("transformers"))
    return lambda x: kind.forward(norm, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("family", QUICK)
def test_a_quick_norm_is_the_norm(family, scale, dtype):
    """All norms of a target, on inputs of any shape and stride, small enough for epsilon to count or large; the input
    stays as it was, in a copy of the target too."""
    tgt = Target(hf_model(family).to(dtype))
    found = norms(tgt) + norms(copy.deepcopy(tgt))
    assert len(found) >= 18 and all(isinstance(norm, QuickNorm) for norm in found)
    for norm in found:
        for x in (torch.randn(1, 7, len(norm.weight)), torch.randn(2, len(norm.weight), 3, 5).transpose(1, 3)):
            x = (x * scale).to(dtype)
            before = x.clone()
            with torch.no_grad():
                ours, theirs = norm(x), own(norm)(x)
            assert ours.dtype == dtype and torch.equal(x, before)
            torch.testing.assert_close(ours, theirs, atol=0, rtol=1e-6 if dtype == torch.float32 else 2**-7)


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_norms_that_compute_otherwise_are_left_alone(family):
    found = norms(target(family))
    assert found and not any(isinstance(norm, QuickNorm) for norm in found)


def test_gradients_and_other_dtypes_are_left_to_the_norm():
    """With gradients on, or where input and weight differ in dtype: bit by bit transformers' own."""
    for norm in norms(target("qwen3")):
        x = torch.randn(3, len(norm.weight), requires_grad=True)
        (ours,), (theirs,) = (torch.autograd.grad(f(x).square().sum(), x) for f in (norm, own(norm)))
        assert torch.equal(ours, theirs)
        with torch.no_grad():
            half = x.detach().bfloat16()
            assert torch.equal(norm(half), own(norm)(half)) and norm(half).dtype == own(norm)(half).dtype


def test_a_target_is_made_of_a_model_twice():
    """The second Target leaves what the first made."""
    model = hf_model("llama")
    kinds = [[type(norm) for norm in norms(Target(model))] for _ in range(2)]
    assert kinds[0] == kinds[1]
