"""bfloat16 products on a CPU with weights laid out as oneDNN wants them: the same sums, without a new layout each call.

Letters: N rows, I inputs, O outputs.
"""

import functools
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .sizes import few

ROWS = 8
"""Rows of the products the layout is made for; it serves any number."""


class Packed:
    """A weight's other layout: made at the first product that can use it, and again when the weight has changed. It
    takes the weight's memory a second time."""

    def __init__(self) -> None:
        self._made: tuple[Tensor, int, Tensor] | None = None
        """The weight it was made of, kept so that no other takes its address; that weight's version; the layout. One
        value, so that threads that meet here see all of it or nothing."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """F.linear: x [..., I], weight [O, I], bias [O] -> [..., O]. Plain where gradients are on or a compiler
        has its own."""
        if torch.compiler.is_compiling() or not (
            weight.dtype == x.dtype == torch.bfloat16
            and weight.device.type == "cpu"
            and not torch.is_grad_enabled()
            and x.numel()
            and supported()
        ):
            return F.linear(x, weight, bias)
        source, version, layout = self._made or (None, -1, None)
        if source is None or source.data_ptr() != weight.data_ptr() or version != weight._version:
            with torch.inference_mode(False):
                source, version = weight.detach(), weight._version
                layout = torch.ops.mkldnn._reorder_linear_weight(source, ROWS)
            self._made = source, version, cast(Tensor, layout)
        rows = x.numel() // x.shape[-1]
        more = few(rows) - rows  # few numbers of rows, for each of which oneDNN makes a kernel
        if not more:
            return torch.ops.mkldnn._linear_pointwise(x, layout, bias, "none", [], "")
        padded = F.pad(x.reshape(rows, -1), (0, 0, 0, more))
        y = torch.ops.mkldnn._linear_pointwise(padded, layout, bias, "none", [], "")
        return y[:rows].view(*x.shape[:-1], -1)

    def __deepcopy__(self, memo: object) -> "Packed":
        return Packed()


class PackedLinear(nn.Linear):
    """nn.Linear through `Packed`."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias)
        self.packed = Packed()

    def forward(self, x: Tensor) -> Tensor:
        return self.packed(x, self.weight, self.bias)


def pack(module: nn.Module) -> None:
    """Let every plain nn.Linear in `module` compute as PackedLinear does; parameters and names stay."""
    for part in module.modules():
        if type(part) is nn.Linear:
            part.__class__ = PackedLinear
            cast(PackedLinear, part).packed = Packed()


@functools.cache
def supported() -> bool:
    """Whether this CPU and build have such products."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
