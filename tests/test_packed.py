"""Laws of packed products: the same sums as F.linear, of the weight as it is now.

Letters: I inputs, O outputs.
"""

import copy
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from deepspec.modeling.packed import PackedLinear, pack, supported

I, O = 64, 48
needs = pytest.mark.skipif(not supported(), reason="no bfloat16 products of oneDNN here")


def made(bias: bool, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(I, O, bias=bias)).to(dtype)
    pack(module)
    return module


def inputs():
    g = torch.Generator().manual_seed(1)
    yield from (
        torch.randn(*shape, I, generator=g).bfloat16() for shape in ((1,), (3,), (2, 5), (2, 3, 4), (0,), (40,))
    )
    yield torch.randn(2, 7, 2 * I, generator=g).bfloat16()[..., ::2]
    yield torch.randn(I, 6, generator=g).bfloat16().T


@needs
@pytest.mark.parametrize("bias", [False, True])
def test_the_sums_are_those_of_linear(bias):
    """Of any shape, contiguous or not, with and without a bias, to the rounding of bfloat16; under no_grad and in
    inference mode alike, whichever came first."""
    module = made(bias)
    linear = module[0]
    assert type(linear) is PackedLinear and list(dict(module.named_parameters())) == ["0.weight", "0.bias"][: 1 + bias]
    for x in inputs():
        want = F.linear(x.float(), linear.weight.float(), None if linear.bias is None else linear.bias.float())
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                torch.testing.assert_close(module(x).float(), want.detach(), rtol=1e-2, atol=1e-2)


@needs
def test_a_changed_weight_is_packed_anew():
    """After a change in place, a load and a move to another tensor the products are the new weight's; a copy of the
    module has a layout of its own."""
    module, x = made(False), torch.randn(5, I).bfloat16()
    with torch.no_grad():
        before = module(x)
        twin = copy.deepcopy(module)
        module[0].weight.mul_(2)
        torch.testing.assert_close(module(x), 2 * before)
        torch.testing.assert_close(twin(x), before)
        module.load_state_dict({"0.weight": torch.zeros(O, I)})
        assert not module(x).any()
        module[0].weight.data = torch.ones(O, I).bfloat16()
        torch.testing.assert_close(module(x), x.float().sum(-1, keepdim=True).expand(-1, O).bfloat16())
        assert not torch.equal(module.float()(x.float()), twin(x).float())


def test_gradients_flow_where_they_are_wanted():
    """With gradients enabled, in float32 and in autocast it is F.linear itself."""
    for dtype in (torch.bfloat16, torch.float32):
        module = made(False, dtype)
        x = torch.randn(5, I, dtype=dtype, requires_grad=True)
        out = module(x)
        assert torch.equal(out, F.linear(x, module[0].weight))
        out.sum().backward()
        assert x.grad is not None and module[0].weight.grad is not None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x), F.linear(x, module[0].weight)) and module(x).dtype == torch.bfloat16


@needs
def test_threads_that_meet_at_a_new_weight_agree():
    """Whoever comes second must not see a layout that is not there yet."""
    torch.manual_seed(2)
    x, n = torch.randn(8, 512).bfloat16(), 4
    with ThreadPoolExecutor(n) as pool:
        for _ in range(8):
            module = nn.Sequential(nn.Linear(512, 4096, bias=False)).bfloat16()
            pack(module)
            together = Barrier(n)

            def ask(number: int, module: nn.Module = module, together: Barrier = together) -> torch.Tensor:
                together.wait()
                with torch.no_grad():
                    return module(x)

            first, *others = pool.map(ask, range(n))
            assert first.shape == (8, 4096) and all(torch.equal(first, y) for y in others)
