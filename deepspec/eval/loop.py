"""One run of the decoding loop: rows are filled, drafted for, verified, committed and refilled.

Letters: B rows, G slots, S scored positions, V vocabulary.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ..modeling.cache import on_device
from ..modeling.drafter import Drafter, Proposal
from ..modeling.target import Scored, Session, Target
from ..sampling import ACCEPT, DRAFT, TARGET, Sampling, likeliest, slot_streams, uniforms
from .backlog import Backlog
from .schedule import Choosy, Learning, Schedule
from .verify import Rule, Verdict, agree, verify

OnRound = Callable[[Sequence[int], Sequence[int]], object]
"""Drafts verified and tokens committed, of each row; none of a row that is idle or whose prompt is being read."""


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


@dataclass
class Request:
    """One answer to be written."""

    index: int
    prompt: Sequence[int]
    seed: int
    budget: int
    """New tokens it may have."""
    out: Generation
    began: float = 0.0


@dataclass(frozen=True)
class Settings:
    """How all requests of a run are decoded."""

    sampling: Sampling
    drafting: Sampling
    """Of the drafter's tokens: greedy drafts are exact at any temperature."""
    schedule: Schedule
    rule: Rule
    stop_ids: frozenset[int]
    rows: int
    """Requests in flight."""
    record: bool
    clock: Any
    on_round: OnRound | None = None


class Loop:
    """State of one run."""

    def __init__(
        self, target: Target, drafter: Drafter | None, requests: Iterator[Request], max_length: int, settings: Settings
    ) -> None:
        """max_length: tokens that prompt and answer of a request have at most."""
        self.target, self.drafter, self.waiting, self.settings = target, drafter, requests, settings
        self.sampling, self.rows, self.device = settings.sampling, settings.rows, target.device
        self.choosy = settings.schedule if isinstance(settings.schedule, Choosy) else None
        self.learning = settings.schedule if isinstance(settings.schedule, Learning) else None
        self.slots = 0 if drafter is None else drafter.num_slots
        # a round may run past the budget by its drafts; they are trimmed
        self.max_length = max_length + self.slots + 1
        self.flight: list[Request | None] = [None] * self.rows
        empty = torch.zeros(self.rows, 0, device=self.device)
        # the proposal of plain decoding
        self.nothing = Proposal(empty.long(), empty[..., None].expand(-1, -1, target.vocab.size), empty)
        self.every = torch.arange(self.rows, device=self.device)
        streams = [torch.tensor([TARGET]), slot_streams(DRAFT, self.slots), slot_streams(ACCEPT, self.slots)]
        self.streams = torch.cat(streams).to(self.device)
        places = self.max_length + 1
        self.chance = torch.zeros(self.rows, places, len(self.streams), dtype=torch.float64, device=self.device)
        """Every uniform a row can need, by the place of the anchor: the target's own token, then a draft and a coin a
        slot."""

    def _timed(self, part: str) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.settings.clock is None else self.settings.clock.part(part)

    @torch.inference_mode()
    def run(self) -> Iterator[tuple[int, Generation]]:
        layer_ids = () if self.drafter is None else self.drafter.config.target_layer_ids
        self.session: Session = self.target.open(self.rows, self.max_length, layer_ids)
        self.state = None if self.drafter is None else self.drafter.new_state(self.rows, self.max_length)
        self.backlog = Backlog(self.rows)
        self.drafting = True
        """Whether the schedule wanted drafts for everybody when it was asked last: then the drafter reads at once."""
        self.anchors = torch.zeros(self.rows, dtype=torch.long, device=self.device)
        while True:
            new = self._join()
            if not any(self.flight):
                return
            yield from self._round(new)

    def _join(self) -> list[int]:
        """Fill free rows with waiting requests; returns those rows."""
        new = []
        for row in range(self.rows):
            if self.flight[row] is None and (request := next(self.waiting, None)) is not None:
                request.began = time.perf_counter()
                self.flight[row] = request
                new.append(row)
        if new:
            place = torch.arange(self.chance.shape[1], device=self.device)
            seeds = on_device([self._request(row).seed for row in new], self.device)
            drawn = uniforms(seeds[:, None, None], place[:, None], self.streams)
            self.chance[on_device(new, self.device)] = drawn
        return new

    def _round(self, new: Sequence[int]) -> Iterator[tuple[int, Generation]]:
        """Draft, verify and commit once for every row in flight. Prompts of `new` rows are in the same pass: their
        first tokens are drawn from it. (Passes of one shape hold no prompt: there the others wait.)"""
        lengths = self.session.lengths
        prompts = {row: self._request(row).prompt for row in new}
        apart = bool(new) and self.session.fixed
        on = [r is not None and row not in prompts and not apart for row, r in enumerate(self.flight)]
        places = [len(prompts[row]) - 1 if row in prompts else n for row, n in enumerate(lengths)]
        chance = self.chance[self.every, on_device(places, self.device)]
        proposal, admitted = self.nothing, [0] * self.rows
        if any(on):
            with self._timed("draft"):
                proposal, admitted = self._draft(torch.tensor(on), chance[:, 1 : self.slots + 1])
        counts = [n + 1 if here else len(prompts.get(row, ())) for row, (n, here) in enumerate(zip(admitted, on))]
        with self._timed("verify" if any(on) else "prefill"):
            tokens = self._tokens(proposal.tokens, prompts, max(counts))
            last = [1 if row in prompts else n for row, n in enumerate(counts)] if new else None
            scored = self.session.score(tokens, counts, last=last)
            verdict = self._verdict(scored, proposal, on_device(admitted, self.device), chance)
            next_token = verdict.next_token[:, None]
            # the round's one read back
            host = torch.cat([verdict.accepted[:, None], next_token, proposal.tokens], 1).tolist()
            kept = [row[0] + 1 if here else n for row, here, n in zip(host, on, counts)]
            self.session.rewind([n + k for n, k in zip(lengths, kept)])
            self.anchors = torch.where(on_device(kept, self.device) > 0, verdict.next_token, self.anchors)
        if self.drafter is not None:
            with self._timed("draft" if any(on) else "prefill"):
                ends = on_device([max(k - 1, 0) for k in kept], self.device)[:, None]
                following = torch.cat([tokens[:, 1:], tokens[:, :1]], 1).scatter(1, ends, next_token)
                width = max(kept)
                self._observe(scored.features[:, :width], following[:, :width], kept)
        drafted = proposal.tokens.shape[1] > 0
        if self.learning is not None and drafted:
            self.learning.settle([k - 1 if here else 0 for k, here in zip(kept, on)])
        if self.settings.on_round is not None and any(on):
            self.settings.on_round(admitted, [k if here else 0 for k, here in zip(kept, on)])
        unseen = [[0.0] * self.slots] * self.rows
        confidence = proposal.confidence.tolist() if self.settings.record and drafted else unseen
        for row, (accepted, own, *drafts) in enumerate(host):
            if on[row]:
                if self.settings.record:
                    self._request(row).out.confidence.append(confidence[row])
                yield from self._commit(row, [*drafts[:accepted], own], (admitted[row], accepted))
            elif row in prompts:
                yield from self._commit(row, [own], None)

    def _tokens(self, drafts: Tensor, prompts: Mapping[int, Sequence[int]], width: int) -> Tensor:
        """What the pass reads [B, width]: anchors and drafts [B, G], or a row's prompt."""
        tokens = torch.cat([self.anchors[:, None], drafts], 1)
        if not prompts:
            return tokens if self.session.fixed else tokens[:, :width]
        grid = tokens.new_zeros(self.rows, width)
        grid[:, : tokens.shape[1]] = tokens[:, :width]
        flat = [token for p in prompts.values() for token in (*p, *[0] * (width - len(p)))]
        grid[on_device(list(prompts), self.device)] = on_device(flat, self.device).view(-1, width)
        return grid

    def _verdict(self, scored: Scored, proposal: Proposal, lengths: Tensor, chance: Tensor) -> Verdict:
        """What is kept of the drafts, and the next token; lengths [B], the anchors' chance. Idle rows: whatever."""
        if self.sampling.temperature == 0:
            own = scored.places.unpack(likeliest(scored.packed), scored.width)
            return agree(own, proposal.tokens, lengths)
        coins = torch.cat([chance[:, self.slots + 1 :], chance[:, :1]], 1)
        laws = self.sampling.probs(scored.packed)
        return verify(laws, proposal, lengths, coins, self.settings.rule, scored.places)

    def _draft(self, active: Tensor, chance: Tensor) -> tuple[Proposal, list[int]]:
        """A proposal for the rows that the schedule wants one for, none at all where there are none; lengths [B]."""
        wanted = active if self.choosy is None else self.choosy.wants(active) & active
        rows = wanted.nonzero()[:, 0].tolist()
        self.drafting = torch.equal(wanted, active)
        if self.drafter is None or not rows:
            return self.nothing, [0] * self.rows
        self._catch_up(rows)
        proposal = self.drafter.propose(self.state, self.settings.drafting, chance, rows)
        room = torch.tensor([self.max_length - n - 1 if w else 0 for n, w in zip(self.session.lengths, wanted)])
        return proposal, self.settings.schedule(proposal.confidence, active, room).tolist()

    def _observe(self, features: Tensor, following: Tensor, counts: list[int]) -> None:
        """Let the drafter read what is verified: now, or when something is drafted again."""
        assert self.drafter is not None
        if self.drafting:
            self.drafter.observe(self.state, features, following, counts)
            return
        self.backlog.add(features, following, counts)
        if self.backlog.full:
            self._catch_up(range(self.rows))

    def _catch_up(self, rows: Sequence[int]) -> None:
        """Let the drafter read what waits for these rows."""
        assert self.drafter is not None
        if (waiting := self.backlog.take(rows)) is not None:
            self.drafter.observe(self.state, *waiting)

    def _commit(self, row: int, new: list[int], record: tuple[int, int] | None) -> Iterator[tuple[int, Generation]]:
        """Take over new tokens up to a stop id or the budget; yield and free the row when the request is done."""
        request = self._request(row)
        out = request.out
        keep = min(len(new), request.budget - len(out.tokens))
        for i, token in enumerate(new[:keep]):
            if token in self.settings.stop_ids:
                keep, out.finish = i + 1, "stop"
                break
        out.tokens += new[:keep]
        if record is not None:  # where drafts were trimmed, all that is left of the round was accepted
            out.rounds.append(record if keep == len(new) else (keep, keep))
        if out.finish == "stop" or len(out.tokens) == request.budget:
            out.seconds = time.perf_counter() - request.began
            self.flight[row] = None
            self.session.reset([row])
            if self.drafter is not None:
                self.drafter.reset_rows(self.state, [row])
                self.backlog.drop([row])
            yield request.index, out

    def _request(self, row: int) -> Request:
        request = self.flight[row]
        assert request is not None
        return request
