"""Sequential heads: how a block-parallel drafter lets slot g know which token slot g - 1 drew.

Letters: B rows, G slots, D hidden, V vocabulary, R rank; leading dimensions are free in training.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn


class SequentialHead(nn.Module, ABC):
    """A low-rank addition to the logits, w2 @ row, where the row is computed slot by slot."""

    def __init__(self, vocab: int, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, vocab, bias=False)

    @abstractmethod
    def step(self, state: Tensor, prev: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """state [..., R], embedding of the token before [..., R], slot state [..., D] -> next state, row [..., R]."""

    def start(self, hidden: Tensor) -> Tensor:
        """The state before slot 0: zeros [..., R] for slots hidden [..., G, D]."""
        return hidden.new_zeros(*hidden.shape[:-2], self.rank)

    @abstractmethod
    def rows(self, hidden: Tensor, prev: Tensor) -> Tensor:
        """Teacher-forced rows of all slots: [..., G, D], tokens [..., G] -> [..., G, R]."""


class MarkovHead(SequentialHead):
    """First order: the row depends on the previous token, optionally gated by the slot's state (`gated`)."""

    def __init__(self, dim: int, vocab: int, rank: int, *, gated: bool = False) -> None:
        super().__init__(vocab, rank)
        self.gate_proj = nn.Linear(dim + rank, rank) if gated else None

    def step(self, state: Tensor, prev: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if self.gate_proj is None:
            return state, prev
        return state, prev * torch.sigmoid(self.gate_proj(torch.cat([hidden, prev], -1)))

    def rows(self, hidden: Tensor, prev: Tensor) -> Tensor:
        return self.step(hidden, self.markov_w1(prev), hidden)[1]  # no state: every slot at once


class RNNHead(SequentialHead):
    """Whole prefix: a gated recurrent state carries every earlier token of the block."""

    def __init__(self, dim: int, vocab: int, rank: int) -> None:
        super().__init__(vocab, rank)
        self.joint_proj = nn.Linear(2 * rank + dim, 3 * rank)

    def step(self, state: Tensor, prev: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        gate, candidate, out = self.joint_proj(torch.cat([state, prev, hidden], -1)).chunk(3, -1)
        gate = gate.sigmoid()
        return gate * state + (1 - gate) * candidate.tanh(), out.tanh()

    def rows(self, hidden: Tensor, prev: Tensor) -> Tensor:
        state, rows, before = self.start(hidden), [], self.markov_w1(prev)
        for g in range(prev.shape[-1]):
            state, row = self.step(state, before[..., g, :], hidden[..., g, :])
            rows.append(row)
        return torch.stack(rows, dim=-2)


class ConfidenceHead(nn.Module):
    """Logit of the chance that a slot survives verification, given that every slot before it did."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [...]."""
        return self.proj(x).squeeze(-1)
