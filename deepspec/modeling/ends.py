"""The two ends of a target, without its layers: all that training reads of it when features come from a cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .loading import load_vocab
from .spec import BlockSpec
from .target import Target
from .vocab import Vocab


@dataclass(frozen=True)
class Ends:
    """Embedding and head, and the shape of the layers between them."""

    name: str
    revision: str | None
    spec: BlockSpec
    vocab: Vocab

    @classmethod
    def load(
        cls, name: str, *, device: str = "auto", dtype: str | torch.dtype = "auto", revision: str | None = None
    ) -> Ends:
        """Read two tensors of a target's safetensors files."""
        family, vocab = load_vocab(name, device=device, dtype=dtype, revision=revision)
        return cls(name, revision, family.block, vocab)

    @classmethod
    def of(cls, target: Target | Ends) -> Ends:
        """Of a target already loaded; its layers can then be freed."""
        return cls(target.name, target.revision, target.spec, target.vocab)

    @property
    def device(self) -> torch.device:
        return self.vocab.head.device

    @property
    def dtype(self) -> torch.dtype:
        return self.vocab.head.dtype
