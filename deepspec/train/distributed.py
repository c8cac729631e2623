"""One process or many: who takes part, what they add up, and how the drafter's weights are held.

A launcher (torchrun, accelerate launch) says by environment variables that there are several processes; accelerate
joins them. Every process holds the whole target and serves its own rows of each step.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ..checked import InputError
from ..modeling.devices import pick_device


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them."""

    rank: int
    size: int
    device: torch.device

    @staticmethod
    def join(device: str) -> World:
        """The processes a launcher started, or this one alone. `device` is 'auto', 'cpu', 'cuda' or, alone, one of
        several such as 'cuda:1'."""
        if "LOCAL_RANK" not in os.environ:
            return World(0, 1, pick_device(device))
        from accelerate import PartialState

        kind = pick_device(device)
        if kind.index is not None:
            raise InputError(f"train.device {device!r} names one device; under a launcher use {kind.type!r}")
        # gloo beside nccl: small objects of the host travel without the device
        state = PartialState(cpu=kind.type == "cpu", backend="gloo" if kind.type == "cpu" else "cpu:gloo,cuda:nccl")
        return World(state.process_index, state.num_processes, state.device)

    @property
    def main(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over processes, in place."""
        if self.size > 1:
            distributed.all_reduce(values)
        return values

    def gather(self, values: Sequence[Any]) -> list[Any]:
        """The lists of all processes in a row, in order of rank."""
        if self.size == 1:
            return list(values)
        lists: list[Any] = [None] * self.size
        distributed.all_gather_object(lists, list(values))
        return [x for part in lists for x in part]

    def wait(self) -> None:
        """Until every process is here."""
        if self.size > 1:
            distributed.barrier()


def leave() -> None:
    """Close the connections between processes, where there are any."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


class Wrapped:
    """A module whose gradients are averaged over processes in its last backward pass of a step."""

    def __init__(self, module: nn.Module, world: World, how: Literal["ddp", "fsdp"], *, unused: bool = False) -> None:
        """Without a launcher nothing is wrapped. ddp: every process holds all weights. fsdp: weights, gradients and
        optimiser are split over processes between steps, whole during one (FSDP2; drafters are few layers, so it is one
        group). unused: whether some parameters may get no gradient. Parameters change here: optimisers come after."""
        self.world = world
        self._shards: Any = None
        self._ddp: Any = None
        self.module: nn.Module = module
        if how == "fsdp" and distributed.is_initialized():
            mesh = init_device_mesh(world.device.type, (world.size,))
            self._shards = fully_shard(module, mesh=mesh, reshard_after_forward=False)
        elif world.size > 1:
            # buffers are constants; sent round in a step's first pass they would leave behind a process that runs out
            # of memory there and begins again (the argument that says so changes its name between versions)
            constants = [name for name, _ in module.named_buffers()]
            nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, constants)
            ids = [world.device] if world.device.type == "cuda" else None
            self._ddp = nn.parallel.DistributedDataParallel(
                module, device_ids=ids, gradient_as_bucket_view=True, find_unused_parameters=unused
            )
            self.module = self._ddp

    @contextlib.contextmanager
    def adding(self, *, last: bool) -> Iterator[None]:
        """Around a forward and backward pass: gradients add up here, and meet those of the others in the last one."""
        if self._shards is not None:
            self._shards.set_requires_gradient_sync(last)
            self._shards.set_reshard_after_backward(last)
        with contextlib.nullcontext() if last or self._ddp is None else self._ddp.no_sync():
            yield


def whole(x: Tensor) -> Tensor:
    """A tensor that may be split over processes, whole on each (all must ask)."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def local(x: Tensor) -> Tensor:
    """This process' part of a tensor that may be split."""
    return x.to_local() if isinstance(x, DTensor) else x


def like(value: Tensor, p: Tensor) -> Tensor:
    """`value`, whole on every process, split and placed as `p` is."""
    value = value.to(p.device)
    return (
        distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None) if isinstance(p, DTensor) else value
    )
