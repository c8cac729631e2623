"""Speculative decoding of prompts. It knows nothing about which drafter or target it runs.

Letters: B rows, G slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

from ..checked import InputError
from ..modeling.drafter import Drafter
from ..modeling.target import Target
from ..sampling import Sampling
from .loop import Generation, Loop, OnRound, Request, Settings
from .schedule import Schedule, verify_all
from .verify import Rule

DEFAULT_CONCURRENCY = 16


def generate(
    target: Target, drafter: Drafter | None, prompts: Sequence[Sequence[int]], **settings: Any
) -> list[Generation]:
    """Decode prompts (token-id lists); one Generation each, in order. `settings` are those of `stream`."""
    done = dict(stream(target, drafter, prompts, **settings))
    return [done[i] for i in range(len(prompts))]


def stream(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int] = 256,
    sampling: Sampling | None = None,
    schedule: Schedule | None = None,
    stop_ids: Sequence[int] = (),
    seed: int = 0,
    seeds: Sequence[int] | None = None,
    concurrency: int | None = None,
    verify: Rule = "token",
    draft: Literal["sample", "greedy"] = "sample",
    record: bool = False,
    clock: Any = None,
    on_round: OnRound | None = None,
) -> Iterator[tuple[int, Generation]]:
    """Yield (index of the prompt, Generation) as requests finish; finished rows are refilled with the next request.

    drafter None is plain autoregressive decoding: the same loop with empty proposals. Request i draws with seed + i, or
    with seeds[i], and writes max_new_tokens, or max_new_tokens[i], at most. `concurrency` requests are in flight at
    once (None: 16). `verify` is the rule of verification: token by token, or the block as a whole. With `draft` greedy
    the drafter proposes its likeliest tokens (as a law: one-hot) whatever the temperature; both are exact. `record`
    keeps the confidences. `clock.part(name)` is a context manager that times 'prefill', 'draft' and 'verify'; a prompt
    that joins other requests is read in the pass that verifies their drafts, and prefill is what reads prompts alone.
    `on_round` is called after each round with the drafts verified and the tokens committed of each row (none: the row
    is idle, or its prompt was read); what it raises ends the run. InputError for prompts the target cannot take.
    """
    budgets = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else [int(n) for n in max_new_tokens]
    if concurrency is not None and concurrency < 1:
        raise InputError(f"concurrency must be >= 1, got {concurrency}")
    seed_list = [seed + i for i in range(len(prompts))] if seeds is None else [int(s) for s in seeds]
    for name, values in (("seeds", seed_list), ("max_new_tokens", budgets)):
        if len(values) != len(prompts):
            raise InputError(f"{name} must hold one number a prompt: {len(prompts)} prompts, {len(values)} {name}")
    for name, value, known in (("verify", verify, get_args(Rule)), ("draft", draft, ("sample", "greedy"))):
        if value not in known:
            raise InputError(f"{name} must be {' or '.join(known)}, got {value!r}")
    _check_prompts(target, prompts, budgets)
    sampling = sampling or Sampling()
    rows = min(concurrency or DEFAULT_CONCURRENCY, max(1, len(prompts)))
    settings = Settings(
        sampling, sampling if draft == "sample" else Sampling(), schedule or verify_all(), verify, frozenset(stop_ids),
        rows, record, clock, on_round,
    )  # fmt: skip
    requests = (
        Request(i, prompt, seed_list[i], budgets[i], Generation(tokenizer=target.tokenizer))
        for i, prompt in enumerate(prompts)
    )
    longest = max((len(p) + n for p, n in zip(prompts, budgets)), default=1)
    return Loop(target, drafter, requests, longest, settings).run()


def _check_prompts(target: Target, prompts: Sequence[Sequence[int]], budgets: Sequence[int]) -> None:
    limit = target.spec.max_positions
    for i, (prompt, budget) in enumerate(zip(prompts, budgets)):
        if budget < 1:
            raise InputError(f"max_new_tokens must be >= 1, got {budget} for prompt {i}")
        if not len(prompt):
            raise InputError(f"prompt {i} is empty; a prompt needs at least one token")
        if not 0 <= min(prompt) <= max(prompt) < target.vocab.size:
            raise InputError(f"prompt {i} holds a token id outside 0 to {target.vocab.size - 1}")
        if len(prompt) + budget > limit:
            raise InputError(
                f"prompt {i} has {len(prompt)} tokens; with max_new_tokens={budget} "
                f"it passes the target's {limit} positions"
            )
