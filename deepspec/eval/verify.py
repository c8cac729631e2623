"""Lossless verification: whatever the drafter proposes, committed tokens follow the target's distribution.

Letters: B rows, G slots, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..modeling.drafter import Proposal
from ..sampling import draw


@dataclass(frozen=True)
class Verdict:
    accepted: Tensor
    """[B] long: drafted tokens kept."""
    next_token: Tensor
    """[B] long: the target's own token after them."""


def verify(target_probs: Tensor, proposal: Proposal, lengths: Tensor, uniforms: Tensor) -> Verdict:
    """Accept a prefix of each row's first lengths[b] <= G drafted tokens, and draw the token that follows.

    target_probs [B, S, V] at the anchor and after each verified token, lengths <= S - 1. uniforms [B, G + 1] in (0, 1):
    a coin per slot, then the draw of the next token. Rejection sampling of Leviathan et al. (2211.17192): the law of
    what is committed is exactly the target's, as long as lengths do not depend on tokens they cut.
    """
    n = min(proposal.tokens.shape[1], target_probs.shape[1] - 1)
    if n == 0:
        return Verdict(torch.zeros_like(lengths), draw(target_probs[:, 0], uniforms[:, -1]))
    drafted = proposal.tokens[:, :n, None]
    p = target_probs[:, :n].gather(-1, drafted)[..., 0].double()
    q = proposal.probs[:, :n].gather(-1, drafted)[..., 0].double()
    keep = uniforms[:, :n] * q < p  # accept with probability min(1, p / q), without dividing
    keep = keep & (torch.arange(n, device=keep.device) < lengths[:, None])
    accepted = keep.cumprod(-1).sum(-1)
    rows = torch.arange(len(accepted), device=accepted.device)
    own = target_probs[rows, accepted]
    residual = (own - proposal.probs[rows, accepted.clamp(max=n - 1)]).clamp(min=0)
    # after a refusal the rest of the target's mass decides; where rounding has left none of it, the target's own law
    refused = (accepted < lengths) & (residual.sum(-1) > 0)
    return Verdict(accepted, draw(torch.where(refused[:, None], residual, own), uniforms[:, -1]))
