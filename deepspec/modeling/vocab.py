"""The target's frozen embedding and output head, shared by every drafter and never saved with one."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Vocab(nn.Module):
    """V tokens: `embed` turns ids into inputs, `logits` turns hidden states into scores, as the target itself does."""

    def __init__(
        self, embedding: Tensor, head: Tensor, *, softcap: float | None = None, embed_scale: float | None = None
    ) -> None:
        """embedding, head: [V, D] (the same tensor when tied); nothing is copied."""
        super().__init__()
        if embedding.shape != head.shape:
            raise ValueError(
                f"embedding {list(embedding.shape)} and head {list(head.shape)} must have one shape [V, D]"
            )
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.head = nn.Parameter(head, requires_grad=False)
        self.softcap, self.embed_scale = softcap, embed_scale

    @property
    def size(self) -> int:
        """V: embedding rows (a tokenizer may use fewer)."""
        return self.head.shape[0]

    @property
    def dim(self) -> int:
        return self.head.shape[1]

    def embed(self, tokens: Tensor) -> Tensor:
        """[...] long -> [..., D]."""
        x = F.embedding(tokens, self.embedding)
        return x if self.embed_scale is None else x * torch.tensor(self.embed_scale, dtype=x.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V], soft-capped where the target caps."""
        logits = F.linear(hidden.to(self.head.dtype), self.head)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
