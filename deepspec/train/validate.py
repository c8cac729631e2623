"""What training is for, measured while it runs: held-out prompts decoded with the drafter as it would be served.

The tokens, and so tau, are those of `python -m deepspec.eval` on the same drafter, prompts, seed and dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checked import InputError
from ..config import ValidateConfig
from ..data.chat import Thinking
from ..data.prompts import Prompt, load_prompts, take
from ..eval import stats
from ..eval.generate import Generation, generate
from ..modeling.drafter import Drafter
from ..modeling.target import Target
from ..sampling import Sampling


@dataclass(frozen=True)
class Validation:
    """Figures of one validation, as `deepspec.eval` defines them."""

    generations: Sequence[Generation]
    slots: int

    @property
    def tau(self) -> float | None:
        """Tokens committed a round; None where no round was needed."""
        return stats.tau(self.generations)

    def row(self) -> dict[str, Any]:
        """Its part of a line of metrics.jsonl: `val_tau`, its 95 % interval over prompts, `val_accept@g` (conditional).
        A figure that nothing was counted for is left out."""
        rates = stats.accept_rates(self.generations, self.slots).conditional
        interval = stats.tau_interval(self.generations)
        row: dict[str, Any] = {"val_tau": self.tau, "val_tau_interval": None if interval is None else list(interval)}
        row |= {f"val_accept@{g}": rate for g, rate in enumerate(rates)}
        return {name: value for name, value in row.items() if value is not None}


def read_prompts(config: ValidateConfig, tokenizer: Any, thinking: Thinking) -> list[tuple[Prompt, int]]:
    """The held-out prompts, each with its seed; as in `deepspec.eval` a file's prompt i is decoded with seed + i.

    InputError for a file that is missing or broken.
    """
    found: list[tuple[Prompt, int]] = []
    for path in config.path:
        prompts = take(load_prompts(path, tokenizer, thinking), config.prompts)
        found += [(prompt, config.seed + i) for i, prompt in enumerate(prompts)]
    return found


def overlap(prompts: Sequence[tuple[Prompt, int]], rows: Iterable[np.ndarray]) -> int:
    """How many of the prompts begin a training row [T] of token ids: those are not held out."""
    by_start: dict[tuple[int, ...], list[list[int]]] = {}
    width = min((len(p.prompt_ids) for p, _ in prompts), default=0)
    width = min(width, 16)
    for prompt, _ in prompts:
        by_start.setdefault(tuple(prompt.prompt_ids[:width]), []).append(prompt.prompt_ids)
    seen = set()
    for row in rows if prompts else ():
        for ids in by_start.get(tuple(row[:width].tolist()), ()):
            if row[: len(ids)].tolist() == ids:
                seen.add(tuple(ids))
    return sum(tuple(p.prompt_ids) in seen for p, _ in prompts)


class Validator:
    """Decodes this process' share of the prompts. Holds a copy of the drafter in the target's dtype, as served."""

    def __init__(
        self, config: ValidateConfig, target: Target, drafter: Drafter, prompts: Sequence[tuple[Prompt, int]]
    ) -> None:
        """InputError where the target cannot take a prompt."""
        self.config, self.target, self.prompts = config, target, prompts
        limit = target.spec.max_positions
        for prompt, _ in prompts:
            if len(prompt.prompt_ids) + config.max_new_tokens > limit:
                raise InputError(
                    f"validate: prompt {prompt.id} has {len(prompt.prompt_ids)} tokens; with validate.max_new_tokens="
                    f"{config.max_new_tokens} it passes the target's {limit} positions"
                )
        with torch.random.fork_rng(devices=[]):
            served = drafter.config.build(target.spec, drafter.vocab)
        self._served = served.to(device=target.device, dtype=target.dtype).eval()

    @torch.no_grad()
    def decode(
        self, weights: Iterable[tuple[str, Tensor]], rank: int = 0, size: int = 1
    ) -> list[tuple[int, Generation]]:
        """weights: the drafter's own tensors by name. Number and outcome of prompts rank, rank + size, ..."""
        own = self._served.state_dict()
        for name, value in weights:
            own[name].copy_(value)
        mine = list(range(len(self.prompts)))[rank::size]
        generations = generate(
            self.target,
            self._served,
            [self.prompts[i][0].prompt_ids for i in mine],
            max_new_tokens=self.config.max_new_tokens,
            sampling=Sampling(temperature=self.config.temperature),
            stop_ids=self.target.stop_ids,
            seeds=[self.prompts[i][1] for i in mine],
            concurrency=self.config.concurrency,
        )
        for generation in generations:
            generation.tokenizer = None  # it need not travel to other processes
        return list(zip(mine, generations))

    def together(self, parts: Sequence[tuple[int, Generation]]) -> Validation:
        """All processes' outcomes, in the order of the prompts."""
        return Validation([g for _, g in sorted(parts, key=lambda part: part[0])], self._served.num_slots)
