"""Laws of the layers that have gradients of their own: they are their definitions, written out.

Letters: D width, H head dim; leading dimensions are free.
"""

import pytest
import torch
from torch import Tensor

from deepspec.modeling.layers import RMSNorm, rotate

LAYOUTS = {
    "rows": lambda D: torch.randn(5, D),
    "three": lambda D: torch.randn(2, 3, D),
    "turned": lambda D: torch.randn(3, 2, 4, D).transpose(0, 2),
    "columns": lambda D: torch.randn(D, 6).T,
    "part": lambda D: torch.randn(2, 5, 2 * D)[:, ::2, :D],
    "one": lambda D: torch.randn(D),
    "none": lambda D: torch.randn(0, 3, D),
}
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7}


def outcome(y: Tensor, weight: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """y and gradients of a weighted sum of it."""
    return [y.detach(), *torch.autograd.grad((y * weight).sum(), inputs)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_norm_is_its_definition(layout, offset, dtype):
    """Values and gradients of x and of the weight, in float64; however x and the gradient lie in memory, and neither is
    changed."""
    torch.manual_seed(0)
    D = 8
    norm = RMSNorm(D, 1e-2, offset)
    torch.nn.init.uniform_(norm.weight, -1, 2)
    x, weight = (3 * LAYOUTS[layout](D).to(dtype) for _ in "xy")
    before = x.clone(), weight.clone()
    found = outcome(norm(x.requires_grad_()), weight, [x, norm.weight])
    assert torch.equal(x, before[0]) and torch.equal(weight, before[1])
    assert [y.dtype for y in found] == [dtype, dtype, torch.float32]
    x, w = (y.detach().double().requires_grad_() for y in (x, norm.weight))
    y = x / (x.square().mean(-1, keepdim=True) + 1e-2).sqrt() * (w + offset)
    for ours, right in zip(found, outcome(y, weight.double(), [x, w]), strict=True):
        assert ours.shape == right.shape
        assert (ours - right).norm() <= TOLERANCE[dtype] * right.norm() + 1e-6 * float(right.numel() > 0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rotation_is_its_definition(layout, dtype):
    """The same of rotary positions: each pair (i, i + H / 2) is turned by its angle."""
    torch.manual_seed(0)
    H = 8
    x, weight = (LAYOUTS[layout](H).to(dtype) for _ in "xy")
    angle = (torch.rand(*x.shape[:-1], H // 2) * 6).to(dtype)
    cos, sin = (torch.cat([f, f], -1).to(dtype) for f in (angle.cos(), angle.sin()))
    found = outcome(rotate(x.requires_grad_(), (cos, sin)), weight, [x])
    x = x.detach().double().requires_grad_()
    left, right = x.chunk(2, -1)
    c, s = (f.double()[..., : H // 2] for f in (cos, sin))
    y = torch.cat([left * c - right * s, right * c + left * s], -1)
    for ours, correct in zip(found, outcome(y, weight.double(), [x]), strict=True):
        assert (ours - correct).norm() <= TOLERANCE[dtype] * correct.norm()
