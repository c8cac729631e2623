"""The target's frozen embedding and output head, shared by every drafter and never saved with one.

Letters: V the target's tokens, Vd those a drafter can draft, D hidden.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .packed import Packed

_LOGITS_BYTES = 64 << 20
"""Of the logits that `log_z` has at once, in float32."""
_SUM_BYTES = {"cpu": 512 << 10}
"""Of those it sums at once: so few on a CPU that they stay in a core's own cache, which takes a third of the time."""


class Vocab(nn.Module):
    """V tokens: `embed` turns ids into inputs, `logits` turns hidden states into scores, as the target itself does.

    A drafter may keep Vd of the V tokens (`kept`, see draft_vocab.py): then `logits` scores those alone.
    """

    kept: Tensor | None
    """[Vd] long, ascending: the target ids that can be drafted; None: all."""
    _kept_head: Tensor | None

    def __init__(
        self, embedding: Tensor, head: Tensor, *, softcap: float | None = None, embed_scale: float | None = None,
        kept: Tensor | None = None, draft_head: Tensor | None = None,
    ) -> None:  # fmt: skip
        """embedding, head: [V, D] (the same tensor when tied); nothing is copied. draft_head: [Vd, D] where a drafter
        has a head of its own."""
        super().__init__()
        if embedding.shape != head.shape:
            raise ValueError(
                f"embedding {list(embedding.shape)} and head {list(head.shape)} must have one shape [V, D]"
            )
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.head = nn.Parameter(head, requires_grad=False)
        self.softcap, self.embed_scale = softcap, embed_scale
        self.register_buffer("kept", kept)
        self.register_buffer("_kept_head", None, persistent=False)
        self._replaced = draft_head is not None
        """Whether a drafter's own head stands where the target's rows would."""
        if draft_head is None and kept is not None:
            draft_head = head.detach()[kept]
        self._own_head = None if draft_head is None else nn.Parameter(draft_head, requires_grad=False)
        self._packed, self._packed_own = Packed(), Packed()

    @property
    def size(self) -> int:
        """V: embedding rows (a tokenizer may use fewer)."""
        return self.head.shape[0]

    @property
    def draft_size(self) -> int:
        """Vd: rows of `logits`."""
        return self.draft_head.shape[0]

    @property
    def dim(self) -> int:
        return self.head.shape[1]

    @property
    def draft_head(self) -> Tensor:
        """[Vd, D] what `logits` multiplies with; the target's own head unless reduced."""
        return self.head if self._own_head is None else self._own_head

    @property
    def has_own_head(self) -> bool:
        return self._own_head is not None

    @property
    def kept_head(self) -> Tensor:
        """[Vd, D] the target's own rows of the tokens that can be drafted. `draft_head` unless a drafter brought that
        along; then a copy, made when it is first needed."""
        if self.kept is None:
            return self.head
        if not self._replaced:
            return self.draft_head
        if self._kept_head is None:
            self._kept_head = self.head.detach()[self.kept]
        return self._kept_head

    def embed(self, tokens: Tensor) -> Tensor:
        """[...] long -> [..., D]."""
        x = F.embedding(tokens, self.embedding)
        return x if self.embed_scale is None else x * torch.tensor(self.embed_scale, dtype=x.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., Vd], soft-capped where the target caps."""
        return self._scores(hidden, self.draft_head)

    def target_logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V]: the target's own scores of its hidden states, whatever a drafter keeps."""
        return self._scores(hidden, self.head)

    def kept_logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., Vd]: of `target_logits` those of the tokens that can be drafted; no others are formed."""
        return self._scores(hidden, self.kept_head)

    @torch.no_grad()
    def log_z(self, hidden: Tensor) -> Tensor:
        """[N, D] -> [N], float32 or wider: logarithm of the sum of exp(target_logits), which a law is divided by."""
        limits = _LOGITS_BYTES, _SUM_BYTES.get(hidden.device.type, _LOGITS_BYTES)
        rows, few = (max(1, limit // (4 * self.size)) for limit in limits)
        exact = torch.promote_types(self.head.dtype, torch.float32)
        parts = (part for some in hidden.split(rows) for part in self.target_logits(some).split(few))
        return torch.cat([part.to(exact).logsumexp(-1) for part in parts])

    def _scores(self, hidden: Tensor, head: Tensor) -> Tensor:
        logits = (self._packed if head is self.head else self._packed_own)(hidden.to(head.dtype), head)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    # -- between the V tokens of the target and the Vd of a drafter ----------------------------------------------------

    def keep(self, probs: Tensor) -> tuple[Tensor, Tensor | None]:
        """A law over V tokens [..., V] -> its part on the kept ones [..., Vd] and the sum of it [...]; None: all."""
        if self.kept is None:
            return probs, None
        part = probs.index_select(-1, self.kept)  # four times as fast as [..., kept] on a CPU
        return part, part.sum(-1)

    def spread(self, probs: Tensor) -> Tensor:
        """A law over the kept tokens [..., Vd] -> the same over all [..., V]."""
        if self.kept is None:
            return probs
        return probs.new_zeros(*probs.shape[:-1], self.size).index_copy_(-1, self.kept, probs)

    def to_target(self, drafted: Tensor) -> Tensor:
        """Rows of `logits` [...] -> token ids."""
        return drafted if self.kept is None else self.kept[drafted]

    def full(self, drafted: Tensor, law: Tensor) -> tuple[Tensor, Tensor]:
        """What was drawn among the kept tokens, and its law, among all: [...], [..., Vd] -> [...], [..., V]."""
        return self.to_target(drafted), self.spread(law)

    def to_draft(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Token ids [...] -> rows of `logits` and which tokens have one (the others get row 0); None: all."""
        if self.kept is None:
            return tokens, None
        row = torch.searchsorted(self.kept, tokens).clamp_(max=self.draft_size - 1)
        found = self.kept[row] == tokens
        return row * found, found
