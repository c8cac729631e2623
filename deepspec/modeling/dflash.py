"""DFlash: all slots in one pass, each drawn independently of the others."""

from dataclasses import dataclass

from torch import Tensor

from ..sampling import Sampling
from .block import BlockConfig, BlockDrafter
from .drafter import Proposal, certain
from .spec import BlockSpec
from .vocab import Vocab


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(BlockConfig):
    """KV injection and nothing else."""

    def build(self, spec: BlockSpec, vocab: Vocab) -> "DFlash":
        return DFlash(self, spec, vocab)


class DFlash(BlockDrafter):
    rows_out = None

    def rows(self, hidden: Tensor, prev: Tensor) -> Tensor:
        return hidden.new_zeros(*hidden.shape[:-1], 0)

    def confidence(self, hidden: Tensor, prev: Tensor) -> Tensor:
        return certain(prev)

    def _draw(self, hidden: Tensor, anchors: Tensor, sampling: Sampling, uniforms: Tensor) -> Proposal:
        tokens, probs = self.vocab.full(*sampling.draw(self.vocab.logits(hidden), uniforms))
        return Proposal(tokens, probs, certain(tokens).sigmoid())
