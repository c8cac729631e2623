"""The speculative decoding loop: batched, with refill. It knows nothing about which drafter or target it runs.

Letters: B rows, G slots, S scored positions, V vocabulary.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..checked import InputError
from ..modeling.cache import on_device
from ..modeling.drafter import Drafter, Proposal
from ..modeling.target import Session, Target
from ..sampling import ACCEPT, DRAFT, TARGET, Sampling, likeliest, uniforms
from .schedule import Choosy, Schedule, verify_all
from .verify import Rule, Verdict, agree
from .verify import verify as judge

DEFAULT_CONCURRENCY = 16


@dataclass
class Generation:
    """What one request produced."""

    tokens: list[int] = field(default_factory=list)
    """New tokens only, trimmed at the stop id (kept) and the budget."""
    rounds: list[tuple[int, int]] = field(default_factory=list)
    """(verified, accepted) drafts a round, trimmed to what was kept; the token drawn from the prefill is in none."""
    finish: Literal["stop", "length"] = "length"
    confidence: list[list[float]] = field(default_factory=list)
    """With `record`: the drafter's confidence in each of the G slots, a round; all 0 where nothing was drafted."""
    seconds: float = field(default=0.0, compare=False)
    """Wall time in flight, from before its prefill to its last token."""
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
    verify: Rule = "token",
    draft: Literal["sample", "greedy"] = "sample",
    record: bool = False,
    clock: Any = None,
) -> Iterator[tuple[int, Generation]]:
    """Yield (index of the prompt, Generation) as requests finish; finished rows are refilled with the next request.

    drafter None is plain autoregressive decoding: the same loop with empty proposals. Request i draws with seed + i, or
    with seeds[i]. `concurrency` requests are in flight at once (None: 16). `verify` is the rule of verification, token
    by token or the block as a whole. `draft` greedy lets the drafter propose its likeliest tokens (as a law: one-hot)
    whatever the temperature; both are exact. `record` keeps the confidences. `clock.part(name)` is a context manager
    that times 'prefill', 'draft' and 'verify'. InputError for prompts the target cannot take.
    """
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens must be >= 1, got {max_new_tokens}")
    if concurrency is not None and concurrency < 1:
        raise InputError(f"concurrency must be >= 1, got {concurrency}")
    seed_list = [seed + i for i in range(len(prompts))] if seeds is None else [int(s) for s in seeds]
    if len(seed_list) != len(prompts):
        raise InputError(f"seeds must hold one seed a prompt: {len(prompts)} prompts, {len(seed_list)} seeds")
    for name, value, known in (("verify", verify, get_args(Rule)), ("draft", draft, ("sample", "greedy"))):
        if value not in known:
            raise InputError(f"{name} must be {' or '.join(known)}, got {value!r}")
    _check_prompts(target, prompts, max_new_tokens)
    sampling = sampling or Sampling()
    loop = _Loop(
        target, drafter, prompts, seed_list, max_new_tokens, sampling, schedule or verify_all(),
        frozenset(stop_ids), min(concurrency or DEFAULT_CONCURRENCY, max(1, len(prompts))), clock,
        verify, sampling if draft == "sample" else Sampling(), record,
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
    began: float


class _Loop:
    """State of one run."""

    def __init__(
        self, target: Target, drafter: Drafter | None, prompts: Sequence[Sequence[int]], seeds: list[int],
        budget: int, sampling: Sampling, schedule: Schedule, stop_ids: frozenset[int], rows: int, clock: Any,
        rule: Rule, drafting: Sampling, record: bool,
    ) -> None:  # fmt: skip
        self.target, self.drafter, self.prompts, self.seeds = target, drafter, prompts, seeds
        self.budget, self.sampling, self.schedule, self.stop_ids = budget, sampling, schedule, stop_ids
        self.rows, self.clock, self.device = rows, clock, target.device
        self.rule, self.drafting, self.record = rule, drafting, record
        self.choosy = schedule if isinstance(schedule, Choosy) else None
        self.slots = 0 if drafter is None else drafter.num_slots
        # a round may run past the budget by its drafts; they are trimmed
        self.max_length = max((len(p) for p in prompts), default=1) + budget + self.slots + 1
        self.waiting = iter(range(len(prompts)))
        self.flight: list[_Request | None] = [None] * rows
        empty = torch.zeros(rows, 0, device=self.device)
        # the proposal of plain decoding
        self.nothing = Proposal(empty.long(), empty[..., None].expand(-1, -1, target.vocab.size), empty)
        self.chance = torch.zeros(3, rows, self.max_length + self.slots + 2, dtype=torch.float64, device=self.device)

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
                    out = Generation(tokenizer=self.target.tokenizer)
                    self.flight[row] = _Request(index, out, self.prompts[index], time.perf_counter())
                    new.append(row)
            if not new:
                return
            counts = [len(r.prompt) if r is not None and row in new else 0 for row, r in enumerate(self.flight)]
            width = max(counts)
            flat = [[*r.prompt, *[0] * (width - n)] if n and r else [0] * width for n, r in zip(counts, self.flight)]
            tokens = on_device([token for row in flat for token in row], self.device).view(self.rows, width)
            place = torch.arange(self.chance.shape[2], device=self.device)
            at = on_device(new, self.device)
            seeds = on_device([self.seeds[self._request(row).index] for row in new], self.device)[:, None]
            for s in (DRAFT, ACCEPT, TARGET):
                self.chance[s, at] = uniforms(seeds, place, s)
            with self._timed("prefill"):
                self.session.reset(new)
                scored = self.session.score(tokens, counts, last_only=True)
                last = on_device(counts, self.device).sub(1).clamp(min=0)
                chance = self.chance[TARGET].gather(1, last[:, None])[:, 0]
                first = self.sampling.token(scored.logits[:, 0], chance)
                self.anchors = torch.where(on_device(counts, self.device) > 0, first, self.anchors)
                if self.drafter is not None:
                    self.drafter.reset_rows(self.state, new)
                    following = torch.cat([tokens[:, 1:], tokens[:, :1]], 1).scatter(1, last[:, None], first[:, None])
                    self.drafter.observe(self.state, scored.features, following, counts)
            drawn = first.tolist()
            for row in new:
                yield from self._commit(row, [drawn[row]], None)

    def _round(self) -> Iterator[tuple[int, Generation]]:
        """Draft, verify and commit once for every row in flight."""
        lengths = self.session.lengths
        on = [r is not None for r in self.flight]
        active = torch.tensor(on)
        start = on_device(lengths, self.device)
        with self._timed("draft"):
            proposal, admitted = self._draft(active, start)
        G = proposal.tokens.shape[1]
        with self._timed("verify"):
            drafts = admitted.tolist()
            counts = [n + 1 if here else 0 for n, here in zip(drafts, on)]
            tokens = torch.cat([self.anchors[:, None], proposal.tokens], 1)[:, : max(counts)]
            scored = self.session.score(tokens, counts)
            verdict = self._verdict(scored.logits, proposal, on_device(drafts, self.device), start)
            following = verdict.next_token[:, None]
            if G:
                drafts = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
                following = drafts.scatter(1, verdict.accepted[:, None], following)
            host = torch.cat([verdict.accepted[:, None], following], 1).tolist()  # the round's one read back
            kept = [row[0] + 1 if here else 0 for row, here in zip(host, on)]
            self.session.rewind([n + k for n, k in zip(lengths, kept)])
            self.anchors = torch.where(on_device(on, self.device) > 0, verdict.next_token, self.anchors)
        if self.drafter is not None:
            with self._timed("draft"):
                width = max(kept)
                self.drafter.observe(self.state, scored.features[:, :width], following[:, :width], kept)
        confidence = proposal.confidence.tolist() if self.record and G else [[0.0] * self.slots] * self.rows
        for row in range(self.rows):
            if on[row]:
                if self.record:
                    self._request(row).out.confidence.append(confidence[row])
                yield from self._commit(row, host[row][1 : kept[row] + 1], (counts[row] - 1, kept[row] - 1))

    def _verdict(self, logits: Tensor, proposal: Proposal, lengths: Tensor, start: Tensor) -> Verdict:
        """What is kept of the drafts, and the next token; logits [B, S, V], lengths [B], anchors at start [B]."""
        if self.sampling.temperature == 0:
            return agree(likeliest(logits), proposal.tokens, lengths)
        own = self.chance[TARGET].gather(1, start[:, None])
        coins = torch.cat([self.chance[ACCEPT].gather(1, self._ahead(start)), own], 1)
        return judge(self.sampling.probs(logits), proposal, lengths, coins, self.rule)

    def _ahead(self, start: Tensor) -> Tensor:
        """[B, G] positions after the anchors at start [B]."""
        return start[:, None] + torch.arange(1, self.slots + 1, device=self.device)

    def _draft(self, active: Tensor, start: Tensor) -> tuple[Proposal, Tensor]:
        """A proposal for the rows that the schedule wants one for, none at all where there are none; lengths [B]."""
        wanted = active if self.choosy is None else self.choosy.wants(active) & active
        rows = wanted.nonzero()[:, 0].tolist()
        if self.drafter is None or not rows:
            return self.nothing, torch.zeros(self.rows, dtype=torch.long)
        chance = self.chance[DRAFT].gather(1, self._ahead(start))
        proposal = self.drafter.propose(self.state, self.drafting, chance, rows)
        room = torch.tensor([self.max_length - n - 1 if w else 0 for n, w in zip(self.session.lengths, wanted)])
        return proposal, self.schedule(proposal.confidence, active, room)

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
            out.seconds = time.perf_counter() - request.began
            self.flight[row] = None
            self.session.reset([row])
            if self.drafter is not None:
                self.drafter.reset_rows(self.state, [row])
            yield request.index, out

    def _request(self, row: int) -> _Request:
        request = self.flight[row]
        assert request is not None
        return request
