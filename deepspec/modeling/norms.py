"""Norms of a frozen target on a CPU, in fewer passes and calls than transformers makes. Letters: D channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class QuickNorm(nn.Module):
    """Before a norm's own class: weight * (x / root mean square), rounded before the weight as there. Its own where
    gradients are on, a compiler has its own, or away from a CPU."""

    weight: Tensor
    variance_epsilon: float
    _epsilon: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        if (
            torch.compiler.is_compiling()
            or torch.is_grad_enabled()
            or x.device.type != "cpu"
            or x.dtype != self.weight.dtype
        ):
            own: Tensor = super().forward(x)  # type: ignore[misc]
            return own
        exact = x.float()
        length = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
        scale = torch.addcmul(self._epsilon, length, length, value=1 / x.shape[-1]).rsqrt_()
        normed = exact * scale if exact is x else exact.mul_(scale).to(x.dtype)
        return normed.mul_(self.weight)


def quicken(module: nn.Module) -> None:
    """Let every norm in `module` whose class computes as Llama's (transformers' mark of those is `variance_epsilon`)
    compute as QuickNorm does; parameters and names stay."""
    made: dict[type, type] = {}
    for part in module.modules():
        kind: Any = type(part)
        if hasattr(part, "variance_epsilon") and not isinstance(part, QuickNorm):
            if kind not in made:
                made[kind] = type(kind.__name__, (QuickNorm, kind), {})
            part.__class__ = made[kind]
            part._epsilon = torch.tensor(part.variance_epsilon, device="cpu")
