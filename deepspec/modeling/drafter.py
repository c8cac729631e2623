"""The interface every drafter implements, and the data it exchanges with trainer and evaluator.

Letters: B rows, T positions, S new positions, A anchors a row, G slots, L tapped layers, D hidden, V vocabulary, Vd the
part of it that the drafter can draft (usually all), R rank.

An *anchor* is the last token both models agree on. Slot g (0 <= g < G) of the block anchored at position a predicts
the token at a + g + 1, knowing target features of positions < a and tokens up to a.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checked import Checked, require
from ..sampling import ANCHOR, Sampling, uniforms
from .attention import Backend
from .spec import BlockSpec
from .vocab import Vocab


@dataclass(frozen=True)
class Batch:
    """Training sequences with what the target computed on them. Padding is on the right, unsupervised."""

    tokens: Tensor
    """[B, T] long."""
    loss_mask: Tensor
    """[B, T] bool; True where the target wrote the token."""
    features: Tensor
    """[B, T, L * D] outputs of the tapped target layers, in ascending order of layer."""
    hidden: Tensor
    """[B, T, D] the target's last hidden state after its final norm; hidden[t] predicts tokens[t + 1]."""
    document: Tensor | None = None
    """[B, T] long: which packed document a position belongs to, -1 for padding; None: one document a row."""
    position: Tensor | None = None
    """[B, T] long: position inside the document; None: arange."""
    sample: Tensor | None = None
    """[B] long: ids of the rows in the data set."""
    log_z: Tensor | None = None
    """[B, T] float32: vocab.log_z(hidden), right where that is; None: not known."""

    def __post_init__(self) -> None:
        B, T = self.tokens.shape
        shapes = {"loss_mask": 2, "features": 3, "hidden": 3, "document": 2, "position": 2, "log_z": 2}
        for name, dims in shapes.items():
            value = getattr(self, name)
            if value is not None and (value.dim() != dims or value.shape[:2] != (B, T)):
                raise ValueError(f"batch.{name} must be [{B}, {T}{', ...' * (dims - 2)}], got {list(value.shape)}")
        if self.loss_mask.dtype != torch.bool:
            raise ValueError(f"batch.loss_mask must be bool, got {self.loss_mask.dtype}")

    @property
    def documents(self) -> Tensor:
        """[B, T] document ids, zeros where there is one document a row."""
        return torch.zeros_like(self.tokens) if self.document is None else self.document

    @property
    def positions(self) -> Tensor:
        """[B, T] positions inside the document."""
        if self.position is not None:
            return self.position
        return torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)


@dataclass(frozen=True)
class Proposal:
    """What a drafter proposes for each row in flight."""

    tokens: Tensor
    """[B, G] long."""
    probs: Tensor
    """[B, G, V] float32: the distribution each token was drawn from; 0 on tokens that cannot be drafted."""
    confidence: Tensor
    """[B, G] float32 in (0, 1]: chance that slot g survives, given that the slots before it did."""

    def spread(self, rows: Tensor, total: int) -> Proposal:
        """This proposal's rows at places `rows` [B] of one of `total` rows; zeros elsewhere."""
        parts = (self.tokens, self.probs, self.confidence)
        return Proposal(*(x.new_zeros(total, *x.shape[1:]).index_copy_(0, rows, x) for x in parts))


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(Checked, ABC):
    """What defines a drafter besides its target."""

    block_size: int = 7
    """Draft tokens proposed a round."""
    target_layer_ids: tuple[int, ...]
    """0-based target layers whose outputs the drafter reads; strictly increasing."""
    draft_vocab_size: int | None = None
    """Vd: how many of the target's tokens can be drafted; None: all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        ids = self.target_layer_ids
        require(self.block_size >= 1, f"drafter.block_size must be >= 1, got {self.block_size}")
        require(
            len(ids) > 0 and list(ids) == sorted(set(ids)),
            f"drafter.target_layer_ids must be non-empty and strictly increasing, got {ids}",
        )
        size = self.draft_vocab_size
        require(size is None or size >= 1, f"drafter.draft_vocab_size must be >= 1 or None, got {size}")
        require(ids[0] >= 0, f"drafter.target_layer_ids must be >= 0 (0 is the first decoder layer), got {ids}")

    @property
    def has_confidence(self) -> bool:
        """Whether the drafter will have a confidence head to train."""
        return False

    @property
    def confidence_temperatures(self) -> tuple[float, ...]:
        """What divides each slot's confidence logit [G]; empty: as trained."""
        return ()

    def check_target(self, *, num_layers: int, vocab_size: int, special_ids: dict[str, Sequence[int]]) -> None:
        """ConfigError where these settings cannot fit a target of `num_layers` layers and `vocab_size` embedding rows.

        `special_ids` maps 'eos' and 'pad' to the target's ids, which a mask token must not be.
        """
        last = self.target_layer_ids[-1]
        require(
            last < num_layers,
            f"drafter.target_layer_ids: layer {last} is out of range; the target has layers 0 to {num_layers - 1}",
        )

    @abstractmethod
    def build(self, spec: BlockSpec, vocab: Vocab) -> Drafter:
        """A drafter with fresh weights for a target's block and vocabulary."""


class Drafter(nn.Module, ABC):
    """Concrete drafters are final: they implement the abstract methods and override nothing else."""

    config: DrafterConfig
    spec: BlockSpec
    vocab: Vocab
    attention: Backend = "auto"
    """Backend of teacher-forced attention, where a drafter has more than one: auto is flex on CUDA, SDPA elsewhere."""
    checkpoint_layers = False
    """Whether the backward pass computes the layers again instead of keeping what they computed."""

    @property
    @abstractmethod
    def num_slots(self) -> int:
        """G: draft tokens a round."""

    @property
    def has_confidence(self) -> bool:
        """Whether `confidence` is a trained opinion and not `certain`."""
        return False

    # -- training ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def anchors(self, batch: Batch, seeds: Tensor) -> tuple[Tensor, Tensor]:
        """Positions to draft from [B, A] long, and which of them are real [B, A] bool. seeds [B] long: a row's anchors
        depend on its own seed and loss mask only."""

    @abstractmethod
    def hidden(self, batch: Batch, anchors: Tensor) -> Tensor:
        """States of every slot, teacher-forced: [B, A, G, D]."""

    # -- both ----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def rows(self, hidden: Tensor, prev: Tensor) -> Tensor:
        """[..., G, D] and the token before each slot [..., G] -> [..., G, R]: what the sequential head adds before its
        last matrix; R = 0 without such a head. Given its row, a slot is independent of every other slot."""

    @property
    @abstractmethod
    def rows_out(self) -> Tensor | None:
        """[Vd, R] the sequential head's last matrix; None without such a head."""

    def logits(self, hidden: Tensor, prev: Tensor) -> Tensor:
        """Slot logits [..., G, Vd] = vocab.logits(hidden) + rows @ rows_out.T; vocab.to_target names their tokens."""
        logits = self.vocab.logits(hidden)
        if self.rows_out is None:
            return logits
        return logits + nn.functional.linear(self.rows(hidden, prev), self.rows_out)

    @abstractmethod
    def confidence(self, hidden: Tensor, prev: Tensor) -> Tensor:
        """Logit of each slot's conditional survival, [..., G]; `certain(prev)` without a head."""

    # -- decoding ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def compile(self, **options: Any) -> None:  # type: ignore[override]
        """From now on, draft in passes of one shape, compiled at the first of each; options are torch.compile's. What
        has no fixed shape stays as it is."""

    @abstractmethod
    def new_state(self, rows: int, max_length: int) -> Any:
        """State of `rows` empty sequences of up to `max_length` positions each."""

    @abstractmethod
    def observe(self, state: Any, features: Tensor, next_tokens: Tensor, counts: Tensor | Sequence[int]) -> None:
        """Take in verified context: features [B, S, L * D] of the next counts[b] <= S positions of each row, and the
        token that followed each [B, S]. The last of these is the row's new anchor; it has no features yet."""

    @abstractmethod
    def propose(self, state: Any, sampling: Sampling, uniforms: Tensor, rows: Sequence[int] | None = None) -> Proposal:
        """Draft G tokens after each row's anchor. uniforms [B, G] in (0, 1). Leaves `state` as it was.

        rows: ascending, those to draft for, each of which has observed something; None: all that have. Other rows are
        zeros throughout.
        """

    @abstractmethod
    def reset_rows(self, state: Any, rows: Sequence[int]) -> None:
        """Forget these rows, so that other requests can use them. O(1)."""

    # -- files ---------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, **provenance: Any) -> None:
        """Write config.json + model.safetensors (names of DeepSpec's format), all of it or nothing. `provenance` is
        stored in the `deepspec` section of config.json."""
        from ..hub.native import save_drafter  # here, because the formats know every drafter

        save_drafter(self, Path(path), provenance)


def certain(prev: Tensor) -> Tensor:
    """The confidence logits of a drafter that has no opinion: verify everything."""
    return torch.full(prev.shape, torch.inf, device=prev.device)


def gather_slots(values: Tensor, index: Tensor) -> Tensor:
    """values [B, T, ...] at positions index [B, A, G] (clamped to T - 1) -> [B, A, G, ...]."""
    rows = torch.arange(len(values), device=values.device)[:, None, None]
    return values[rows, index.clamp(max=values.shape[1] - 1)]


def choose_anchors(usable: Tensor, count: int, seeds: Tensor) -> tuple[Tensor, Tensor]:
    """`count` of each row's usable [B, T] positions, at random by its own seed [B]: ascending [B, count], and which are
    real; where a row has fewer, the rest stand at 0."""
    T = usable.shape[1]
    place = torch.arange(T, device=usable.device)
    order = uniforms(seeds[:, None], place, ANCHOR).masked_fill(~usable, 2.0).argsort(1)[:, :count]
    chosen = torch.where(usable.gather(1, order), order, T).sort(1).values
    chosen = nn.functional.pad(chosen, (0, count - chosen.shape[1]), value=T)
    real = chosen < T
    return chosen.where(real, torch.zeros_like(chosen)), real
