"""Devices and dtypes by name, and the dtype in which a machine computes quickly."""

from __future__ import annotations

from typing import Any

import torch

from ..checked import InputError


def pick_device(device: str) -> torch.device:
    """'auto' is CUDA where there is one. InputError for a device this machine lacks."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
        return torch.device(device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None


def dtype_of(dtype: str | torch.dtype) -> Any:
    """'auto', a dtype, or its name or usual short name -> 'auto' or the dtype."""
    short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    found = getattr(torch, short.get(dtype, dtype), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InputError(f"dtype {dtype!r} is unknown; use auto, float32, bfloat16 or float16")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """As files and reports have it: 'bfloat16'."""
    return str(dtype).removeprefix("torch.")


def quick_dtype(device: torch.device) -> torch.dtype:
    """bfloat16, but float32 on a CPU that has no instructions for bfloat16 products: it takes several times as long for
    them as for float32's, for some shapes a hundred times."""
    if device.type != "cpu":
        return torch.bfloat16
    # what torch's kernels use (ATEN_CPU_CAPABILITY may say less than the processor can), then what the processor has
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return torch.bfloat16 if wide and torch.cpu._is_avx512_bf16_supported() else torch.float32


def auto_dtype(own: torch.dtype, device: torch.device) -> torch.dtype:
    """What 'auto' makes of weights of a dtype of their `own`: that, or float32 on a CPU that is slow in it."""
    return torch.float32 if device.type == "cpu" and own.itemsize == 2 and own != quick_dtype(device) else own
