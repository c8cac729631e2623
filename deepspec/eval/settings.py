"""How an evaluation is made."""

import contextlib
from dataclasses import dataclass
from typing import Literal

from ..checked import Checked, InputError, require
from ..sampling import Sampling
from .schedule import Schedule, threshold, verify_all


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Checked):
    """How a run is made. The same for the baseline and all drafters."""

    max_new_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0,)
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    schedule: str = "verify_all"
    """'verify_all' or 'threshold:X'."""
    concurrency: int = 1
    """Requests in flight."""
    seed: int = 0
    """Prompt i of a task is decoded with seed + i, whatever the contender."""
    limit: int | None = None
    """Prompts of each task; None takes all."""
    equality: int | None = None
    """Prompts of each task whose greedy float32 output is compared with the baseline's; None takes all, 0 none."""
    repeats: int = 1
    """How often each timing is taken; the tokens come from the first."""
    warmup: int = 2
    """Prompts each contender decodes before its timings."""
    thinking: Literal["on", "off", "auto"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_new_tokens", "concurrency", "repeats"):
            require(getattr(self, name) >= 1, f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("equality", "warmup"):
            require((getattr(self, name) or 0) >= 0, f"{name} must be >= 0, got {getattr(self, name)}")
        require(self.limit is None or self.limit >= 1, f"limit must be >= 1, got {self.limit}")
        require(len(self.temperatures) > 0, "at least one temperature is needed")
        once = len(set(self.temperatures)) == len(self.temperatures)
        require(once, f"a temperature is given twice: {self.temperatures}")
        for temperature in self.temperatures:
            self.sampling(temperature)
        self.fresh_schedule()

    def sampling(self, temperature: float) -> Sampling:
        return Sampling(temperature=temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)

    def fresh_schedule(self) -> Schedule:
        """A schedule may remember, so every call of `stream` gets its own."""
        kind, _, level = self.schedule.partition(":")
        if self.schedule == "verify_all":
            return verify_all()
        with contextlib.suppress(ValueError):  # an InputError is one too
            if kind == "threshold":
                return threshold(float(level))
        raise InputError(f"schedule {self.schedule!r} must be verify_all or threshold:X with X in [0, 1]")
