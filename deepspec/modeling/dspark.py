"""DSpark: DFlash's parallel backbone, a sequential head that ties the slots together, and a confidence head."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ..checked import require
from ..sampling import Sampling
from .block import BlockConfig, BlockDrafter
from .drafter import Proposal, certain
from .heads import ConfidenceHead, MarkovHead, RNNHead, SequentialHead
from .spec import BlockSpec
from .vocab import Vocab


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(BlockConfig):
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    markov_rank: int = 256
    """R; 0 is no sequential head."""
    confidence_head: bool = True
    confidence_with_markov: bool = True
    """The confidence head also reads the embedding of the token before (where markov_rank > 0)."""
    confidence_stop_gradient: bool = False
    """The confidence loss trains its own head only, not the backbone."""
    confidence_temperatures: tuple[float, ...] = ()
    """What divides each slot's confidence logit in decoding, one a slot (deepspec.eval.calibrate); empty: nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.markov_rank >= 0, f"drafter.markov_rank must be >= 0, got {self.markov_rank}")
        slots = self.block_size if self.sample_from_anchor else self.block_size - 1
        require(
            len(self.confidence_temperatures) in (0, slots) and min(self.confidence_temperatures, default=1.0) > 0,
            f"drafter.confidence_temperatures must hold {slots} numbers > 0, got {self.confidence_temperatures}",
        )

    @property
    def has_confidence(self) -> bool:
        return self.confidence_head

    @property
    def confidence_reads_markov(self) -> bool:
        return self.confidence_with_markov and self.markov_rank > 0

    def build(self, spec: BlockSpec, vocab: Vocab) -> "DSpark":
        return DSpark(self, spec, vocab)


class DSpark(BlockDrafter):
    config: DSparkConfig

    def __init__(self, config: DSparkConfig, spec: BlockSpec, vocab: Vocab) -> None:
        super().__init__(config, spec, vocab)
        self.markov_head: SequentialHead | None = None
        if config.markov_rank:
            size = (vocab.dim, vocab.size, config.markov_rank)
            rnn, gated = config.markov_head_type == "rnn", config.markov_head_type == "gated"
            self.markov_head = RNNHead(*size) if rnn else MarkovHead(*size, gated=gated)
            if vocab.kept is not None:  # it reads any token and adds to those that can be drafted
                self.markov_head.markov_w2 = nn.Linear(config.markov_rank, vocab.draft_size, bias=False)
        self.confidence_head: ConfidenceHead | None = None
        if config.confidence_head:
            self.confidence_head = ConfidenceHead(vocab.dim + config.markov_rank * config.confidence_reads_markov)

    @property
    def rows_out(self) -> Tensor | None:
        return None if self.markov_head is None else self.markov_head.markov_w2.weight

    @property
    def has_confidence(self) -> bool:
        return self.confidence_head is not None

    def rows(self, hidden: Tensor, prev: Tensor) -> Tensor:
        if self.markov_head is None:
            return hidden.new_zeros(*hidden.shape[:-1], 0)
        return self.markov_head.rows(hidden, prev)

    def confidence(self, hidden: Tensor, prev: Tensor) -> Tensor:
        if self.confidence_head is None:
            return certain(prev)
        x = hidden.detach() if self.config.confidence_stop_gradient else hidden
        if self.markov_head is not None and self.config.confidence_reads_markov:
            before = self.markov_head.markov_w1(prev)
            x = torch.cat([x, before.detach() if self.config.confidence_stop_gradient else before], -1)
        return self.confidence_head(x)

    def _draw(self, hidden: Tensor, anchors: Tensor, sampling: Sampling, uniforms: Tensor) -> Proposal:
        base = self.vocab.logits(hidden)
        head = self.markov_head
        if head is None:
            tokens, probs = self.vocab.full(*sampling.draw(base, uniforms))
        else:
            state, prev, drawn = head.start(hidden), anchors, []
            laws = torch.zeros(base.shape, device=base.device)
            for g in range(base.shape[1]):
                state, row = head.step(state, head.markov_w1(prev), hidden[:, g])
                drawn.append(sampling.fill(laws[:, g], base[:, g] + head.markov_w2(row), uniforms[:, g]))
                prev = self.vocab.to_target(drawn[-1])
            tokens, probs = self.vocab.full(torch.stack(drawn, 1), laws)
        before = torch.cat([anchors[:, None], tokens[:, :-1]], 1)
        confidence = self.confidence(hidden, before).float()
        if self.config.confidence_temperatures:
            confidence = confidence / confidence.new_tensor(self.config.confidence_temperatures)
        return Proposal(tokens, probs, confidence.sigmoid())
