"""How features are stored, and the checksums that go with them. Letters: D hidden, K scales, ceil(D / 64) of a vector.

bfloat16 and float32 as they are; int8 in groups of 64 channels with one bfloat16 scale each, because channels of a
transformer's residual stream differ by orders of magnitude: with one scale for all, most would have a few levels. The
last hidden state is bfloat16 then: the teacher's distribution comes from it, and it is one part in L + 1. Beside it
stands the log Z of that distribution, in float32, so that its sum over all tokens is never formed again.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..modeling.vocab import Vocab

Stored = Literal["bfloat16", "float32", "int8"]
GROUP = 64


def bytes_per_token(layers: int, dim: int, stored: Stored, supervised: float = 1.0) -> float:
    """Of a cache in which this share of the positions supervises."""
    each = {"bfloat16": 2.0 * dim, "float32": 4.0 * dim, "int8": dim + 2.0 * -(-dim // GROUP)}[stored]
    return layers * each + supervised * (4.0 + (2.0 * dim if stored == "int8" else each))


def part_names(stored: Stored) -> list[str]:
    """The tensors that hold features and hidden states."""
    return ["features", "hidden"] + (["features.scales"] if stored == "int8" else [])


def encode_row(features: Tensor, hidden: Tensor, stored: Stored) -> dict[str, Tensor]:
    """Features [N, L, D] and hidden [H, D] as they are stored, by part name, on the CPU."""
    if stored == "int8":
        whole, scales = quantize(features)
        parts = {"features": whole, "hidden": hidden.bfloat16(), "features.scales": scales}
    else:
        kind = getattr(torch, stored)
        parts = {"features": features.to(kind), "hidden": hidden.to(kind)}
    return {name: part.cpu().contiguous() for name, part in parts.items()}


def decode(parts: dict[str, Tensor]) -> Tensor:
    """The features that `encode_row` was given; int8 as bfloat16, whose rounding is finer."""
    x = parts["features"]
    if x.dtype != torch.int8:
        return x
    return x.to(torch.bfloat16) * parts["features.scales"].repeat_interleave(GROUP, -1)[..., : x.shape[-1]]


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., D] -> int8 [..., D] and scales [..., K]."""
    groups = F.pad(x.float(), (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    scales = (groups.abs().amax(-1, keepdim=True) / 127).bfloat16()
    divisor = scales.float().clamp(min=torch.finfo(torch.float32).tiny)
    whole = (groups / divisor).round_().clamp_(-127, 127).to(torch.int8)
    return whole.flatten(-2)[..., : x.shape[-1]].contiguous(), scales[..., 0].contiguous()


def crc(tensors: Iterable[Tensor], value: int = 0) -> int:
    """CRC-32 of the bytes of tensors one after the other, whatever they hold."""
    for tensor in tensors:
        value = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data, value)
    return value


def fingerprint(vocab: Vocab) -> str:
    """A hash of some of the target's embedding rows and of some of its head's, in bfloat16 whatever their dtype."""
    step = max(1, vocab.size // 256)
    return f"{crc(weight.detach()[::step].bfloat16().cpu() for weight in (vocab.embedding, vocab.head)):08x}"
