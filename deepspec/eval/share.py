"""Processes, or GPUs, that share one evaluation: who takes what. torchrun and accelerate set the environment."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..checked import InputError

Item = TypeVar("Item")


@dataclass(frozen=True)
class Share:
    """This process among those that work together."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    """Among those on this machine: which GPU it takes."""

    @classmethod
    def from_environment(cls) -> "Share":
        """RANK, WORLD_SIZE and LOCAL_RANK; a process by itself where they are not set."""
        rank, world, local = (os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        if rank is None or world is None:
            return cls()
        return cls(int(rank), int(world), int(local or 0))

    def mine(self, items: Sequence[Item]) -> Sequence[Item]:
        """Every world-th of them."""
        return items[self.rank :: self.world]

    def device(self, wanted: str) -> str:
        """The device of this process where `wanted` leaves the choice."""
        if self.world == 1 or wanted not in ("auto", "cuda"):
            return wanted
        import torch

        return f"cuda:{self.local_rank}" if torch.cuda.is_available() else wanted

    def first(self, action: Callable[[], None]) -> None:
        """Rank 0 acts, the others wait until it has; an InputError there is an InputError everywhere."""
        if self.world == 1:
            return action()
        import torch.distributed as dist

        dist.init_process_group("gloo", rank=self.rank, world_size=self.world)
        try:
            said: list[str | None] = [None]
            if self.rank == 0:
                try:
                    action()
                except InputError as error:
                    said = [str(error)]
            dist.broadcast_object_list(said, src=0)
        finally:
            dist.destroy_process_group()
        if said[0] is not None:
            raise InputError(said[0])
