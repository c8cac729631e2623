"""The speculative decoding loop: batched, with refill. It knows nothing about which drafter or target it runs.

Letters: B rows, G slots, S scored positions, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ..checked import InputError
from ..modeling.drafter import Drafter, Proposal
from ..modeling.target import Session, Target
from ..sampling import ACCEPT, DRAFT, TARGET, Sampling, slot_streams, uniforms
from .schedule import Schedule, verify_all
from .verify import Verdict, verify

DEFAULT_CONCURRENCY = 16


@dataclass
class Generation:
    """What one request produced."""

    tokens: list[int] = field(default_factory=list)
    """New tokens only, trimmed at the stop id (kept) and the budget."""
    rounds: list[tuple[int, int]] = field(default_factory=list)
    """(verified, accepted) drafts a round, trimmed to what was kept; the token drawn from the prefill is in none."""
    finish: Literal["stop", "length"] = "length"
    tokenizer: Any = field(default=None, repr=False, compare=False)

    @property
    def tau(self) -> float:
        """Tokens committed a round, bonus token included; NaN before the first round."""
        return (len(self.tokens) - 1) / len(self.rounds) if self.rounds else float("nan")

    @property
    def text(self) -> str:
        """Decoded tokens. ValueError where the target came without a tokenizer."""
        if self.tokenizer is None:
            raise ValueError("this target has no tokenizer; use .tokens")
        return self.tokenizer.decode(self.tokens, skip_special_tokens=True)


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
    max_new_tokens: int = 256,
    sampling: Sampling | None = None,
    schedule: Schedule | None = None,
    stop_ids: Sequence[int] = (),
    seed: int = 0,
    seeds: Sequence[int] | None = None,
    concurrency: int | None = None,
    clock: Any = None,
) -> Iterator[tuple[int, Generation]]:
    """Yield (index of the prompt, Generation) as requests finish; finished rows are refilled with the next request.

    drafter None is plain autoregressive decoding: the same loop with empty proposals. Request i draws with seed + i, or
    with seeds[i]. `concurrency` requests are in flight at once (None: 16). `clock.part(name)` is a context manager that
    times 'prefill', 'draft' and 'verify'. InputError for prompts the target cannot take.
    """
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens must be >= 1, got {max_new_tokens}")
    if concurrency is not None and concurrency < 1:
        raise InputError(f"concurrency must be >= 1, got {concurrency}")
    seed_list = [seed + i for i in range(len(prompts))] if seeds is None else [int(s) for s in seeds]
    if len(seed_list) != len(prompts):
        raise InputError(f"seeds must hold one seed a prompt: {len(prompts)} prompts, {len(seed_list)} seeds")
    _check_prompts(target, prompts, max_new_tokens)
    loop = _Loop(
        target, drafter, prompts, seed_list, max_new_tokens, sampling or Sampling(), schedule or verify_all(),
        frozenset(stop_ids), min(concurrency or DEFAULT_CONCURRENCY, max(1, len(prompts))), clock,
    )  # fmt: skip
    return loop.run()


def _check_prompts(target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    limit = target.spec.max_positions
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise InputError(f"prompt {i} is empty; a prompt needs at least one token")
        if not 0 <= min(prompt) <= max(prompt) < target.vocab.size:
            raise InputError(f"prompt {i} holds a token id outside 0 to {target.vocab.size - 1}")
        if len(prompt) + max_new_tokens > limit:
            raise InputError(
                f"prompt {i} has {len(prompt)} tokens; with max_new_tokens={max_new_tokens} "
                f"it passes the target's {limit} positions"
            )


@dataclass
class _Request:
    index: int
    out: Generation
    prompt: Sequence[int]


class _Loop:
    """State of one run."""

    def __init__(
        self, target: Target, drafter: Drafter | None, prompts: Sequence[Sequence[int]], seeds: list[int],
        budget: int, sampling: Sampling, schedule: Schedule, stop_ids: frozenset[int], rows: int, clock: Any,
    ) -> None:  # fmt: skip
        self.target, self.drafter, self.prompts, self.seeds = target, drafter, prompts, seeds
        self.budget, self.sampling, self.schedule, self.stop_ids = budget, sampling, schedule, stop_ids
        self.rows, self.clock, self.device = rows, clock, target.device
        self.slots = 0 if drafter is None else drafter.num_slots
        # a round may run past the budget by its drafts; they are trimmed
        self.max_length = max((len(p) for p in prompts), default=1) + budget + self.slots + 1
        self.waiting = iter(range(len(prompts)))
        self.flight: list[_Request | None] = [None] * rows
        self.every = torch.arange(rows, device=self.device)
        self.none = torch.zeros(rows, dtype=torch.long, device=self.device)
        empty = torch.zeros(rows, 0, device=self.device)
        # the proposal of plain decoding
        self.nothing = Proposal(empty.long(), empty[..., None].expand(-1, -1, target.vocab.size), empty)
        self.streams = torch.cat(
            [torch.tensor([TARGET]), slot_streams(DRAFT, self.slots), slot_streams(ACCEPT, self.slots)]
        ).to(self.device)
        self.chance = torch.zeros(rows, self.max_length + 1, len(self.streams), dtype=torch.float64, device=self.device)
        """Every uniform a row can need, by the place of the anchor: the target's own token, then a draft and a coin a
        slot."""

    def _timed(self, part: str) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.clock is None else self.clock.part(part)

    @torch.inference_mode()
    def run(self) -> Iterator[tuple[int, Generation]]:
        layer_ids = () if self.drafter is None else self.drafter.config.target_layer_ids
        self.session: Session = self.target.open(self.rows, self.max_length, layer_ids)
        self.state = None if self.drafter is None else self.drafter.new_state(self.rows, self.max_length)
        self.anchors = torch.zeros(self.rows, dtype=torch.long, device=self.device)
        while True:
            yield from self._admit()
            if not any(self.flight):
                return
            yield from self._round()

    def _admit(self) -> Iterator[tuple[int, Generation]]:
        """Fill free rows with waiting requests: prefill, first token. A request may end right here."""
        while True:
            new = []
            for row in range(self.rows):
                if self.flight[row] is None and (index := next(self.waiting, None)) is not None:
                    self.flight[row] = _Request(index, Generation(tokenizer=self.target.tokenizer), self.prompts[index])
                    new.append(row)
            if not new:
                return
            counts = [len(r.prompt) if r is not None and row in new else 0 for row, r in enumerate(self.flight)]
            width = max(counts)
            tokens = torch.tensor(
                [
                    [*r.prompt, *[0] * (width - n)] if n and r is not None else [0] * width
                    for n, r in zip(counts, self.flight)
                ],
                device=self.device,
            )
            place = torch.arange(self.chance.shape[1], device=self.device)
            at = torch.tensor(new, device=self.device)
            seeds = torch.tensor([self.seeds[self._request(row).index] for row in new], device=self.device)
            self.chance[at] = uniforms(seeds[:, None, None], place[:, None], self.streams)
            with self._timed("prefill"):
                self.session.reset(new)
                scored = self.session.score(tokens, counts, last_only=True)
                last = torch.tensor(counts, device=self.device).sub(1).clamp(min=0)
                chance = self.chance[self.every, last, 0]
                first = self.sampling.token(scored.logits[:, 0], chance)
                self.anchors = torch.where(
                    torch.tensor([n > 0 for n in counts], device=self.device), first, self.anchors
                )
                if self.drafter is not None:
                    self.drafter.reset_rows(self.state, new)
                    following = torch.cat([tokens[:, 1:], tokens[:, :1]], 1).scatter(1, last[:, None], first[:, None])
                    self.drafter.observe(self.state, scored.features, following, counts)
            drawn = first.tolist()
            for row in new:
                yield from self._commit(row, [drawn[row]], None)

    def _round(self) -> Iterator[tuple[int, Generation]]:
        """Draft, verify and commit once for every row in flight."""
        B, G, lengths = self.rows, self.slots, self.session.lengths
        on = [r is not None for r in self.flight]
        active = torch.tensor(on)
        room = torch.tensor([self.max_length - n - 1 for n in lengths])
        start = torch.tensor(lengths, device=self.device)
        chance = self.chance[self.every, start]
        with self._timed("draft"):
            if self.drafter is None:
                proposal = self.nothing
            else:
                proposal = self.drafter.propose(self.state, self.sampling, chance[:, 1 : G + 1])
            admitted = self.schedule(proposal.confidence, active, room)
        with self._timed("verify"):
            counts = [n + 1 if here else 0 for n, here in zip(admitted.tolist(), on)]
            tokens = torch.cat([self.anchors[:, None], proposal.tokens], 1)[:, : max(counts)]
            scored = self.session.score(tokens, counts)
            own = chance[:, :1]
            if G:
                coins = torch.cat([chance[:, G + 1 :], own], 1)
                verdict = verify(self.sampling.probs(scored.logits), proposal, admitted.to(self.device), coins)
            else:  # nothing to accept: the target's own token
                verdict = Verdict(self.none, self.sampling.token(scored.logits[:, 0], own[:, 0]))
            following = verdict.next_token[:, None]
            if G:
                drafts = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
                following = drafts.scatter(1, verdict.accepted[:, None], following)
            host = torch.cat([verdict.accepted[:, None], following], 1).tolist()  # the round's one read back
            kept = [row[0] + 1 if here else 0 for row, here in zip(host, on)]
            self.session.rewind([n + k for n, k in zip(lengths, kept)])
            self.anchors = torch.where(active.to(self.device), verdict.next_token, self.anchors)
        if self.drafter is not None:
            with self._timed("draft"):
                width = max(kept)
                self.drafter.observe(self.state, scored.features[:, :width], following[:, :width], kept)
        for row in range(B):
            if on[row]:
                yield from self._commit(row, host[row][1 : kept[row] + 1], (counts[row] - 1, kept[row] - 1))

    def _commit(self, row: int, new: list[int], record: tuple[int, int] | None) -> Iterator[tuple[int, Generation]]:
        """Take over new tokens up to a stop id or the budget; yield and free the row when the request is done."""
        request = self._request(row)
        out = request.out
        keep = min(len(new), self.budget - len(out.tokens))
        for i, token in enumerate(new[:keep]):
            if token in self.stop_ids:
                keep, out.finish = i + 1, "stop"
                break
        out.tokens += new[:keep]
        if record is not None:  # where drafts were trimmed, all that is left of the round was accepted
            out.rounds.append(record if keep == len(new) else (keep, keep))
        if out.finish == "stop" or len(out.tokens) == self.budget:
            self.flight[row] = None
            self.session.reset([row])
            if self.drafter is not None:
                self.drafter.reset_rows(self.state, [row])
            yield request.index, out

    def _request(self, row: int) -> _Request:
        request = self.flight[row]
        assert request is not None
        return request
