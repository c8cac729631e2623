"""torch.compile of what training repeats, the drafter's layers and the objective's blocks; how often it compiled."""

from __future__ import annotations

import shutil
from typing import Literal

import torch

from ..checked import ConfigError
from ..config import LossConfig
from ..modeling.drafter import Drafter
from ..modeling.layers import Block
from .divergence import block_terms
from .objective import Objective

Setting = Literal["auto", "on", "off"]


def wanted(setting: Setting, device: torch.device) -> bool:
    """Whether to compile on this device. ConfigError where 'on' has no compiler to work with."""
    if setting == "off" or (setting == "auto" and device.type != "cuda"):
        return False
    if device.type == "cpu" and not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        raise ConfigError("train.compile=on needs a C++ compiler (g++ or clang++) on a CPU; leave it 'auto'")
    return True


def objective(
    drafter: Drafter, config: LossConfig, setting: Setting, device: torch.device, backend: str = "inductor"
) -> Objective:
    """The objective of a drafter; its blocks, and the drafter's layers, compiled where that is wanted.

    Alike layers share a graph. On CUDA a graph is of one shape, and rows are padded to few of them (`width`); on a CPU
    the second shape makes the graph one for all. `backend` is torch.compile's.
    """
    if not wanted(setting, device):
        return Objective(drafter, config)
    for module in drafter.modules():
        if isinstance(module, Block):
            module.compile(dynamic=False if device.type == "cuda" else None, backend=backend)
    return Objective(drafter, config, torch.compile(block_terms, dynamic=True, backend=backend))


def width(longest: int, most: int) -> int:
    """To which of few lengths a row of `longest` positions is padded, where none has more than `most`."""
    return min(max(256, 1 << (longest - 1).bit_length()), -(-most // 128) * 128)


def graphs() -> int:
    """Graphs compiled in this process so far: it stands still once a run has seen all its shapes."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
