"""Lossless verification: whatever the drafter proposes, committed tokens follow the target's distribution.

Letters: B rows, S places of a row, N of them that are real, G slots, n verified slots, V vocabulary.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..modeling.cache import Ragged
from ..modeling.drafter import Proposal
from ..sampling import draw

Rule = Literal["token", "block"]


@dataclass(frozen=True)
class Verdict:
    accepted: Tensor
    """[B] long: drafted tokens kept."""
    next_token: Tensor
    """[B] long: the target's own token after them."""


def verify(
    target_probs: Tensor,
    proposal: Proposal,
    lengths: Tensor,
    uniforms: Tensor,
    rule: Rule = "token",
    places: Ragged | None = None,
) -> Verdict:
    """Accept a prefix of each row's first lengths[b] <= G drafted tokens, and draw the token that follows.

    target_probs [B, S, V] at the anchor and after each verified token, lengths <= S - 1; with `places` those of these
    places alone, packed [N, V], lengths[b] < places.counts[b] (the verdict of a row without any means nothing).
    uniforms [B, G + 1] in (0, 1): a coin per slot, then the draw of the next token. The law of what is committed is
    exactly the target's under both rules, as long as lengths do not depend on tokens they cut:

    - token: each slot by itself, up to the first refusal (rejection sampling of Leviathan et al., 2211.17192);
    - block: the longest prefix that holds as a whole (2403.10444); in expectation it never keeps fewer.
    """
    if places is None:
        B, S, _ = target_probs.shape
        target_probs, places = target_probs.flatten(0, 1), Ragged([S] * B, target_probs.device)
    n = min(proposal.tokens.shape[1], places.width - 1)
    if n == 0:
        own = target_probs[places.at(torch.zeros_like(lengths)[:, None])[:, 0]]
        return Verdict(torch.zeros_like(lengths), draw(own, uniforms[:, -1]))
    drafted, slot = proposal.tokens[:, :n], torch.arange(n, device=lengths.device)
    p = target_probs[places.at(slot), drafted].double()
    q = proposal.probs[:, :n].gather(-1, drafted[..., None])[..., 0].double()
    rows = torch.arange(len(drafted), device=drafted.device)
    weight: Tensor | None = None
    if rule == "token":
        keep = uniforms[:, :n] * q < p  # accept with probability min(1, p / q), without dividing
        keep = keep & (slot < lengths[:, None])
        accepted = keep.cumprod(-1).sum(-1)
    else:
        weights = _weights(p, q)
        left = _left(target_probs, proposal.probs, weights, places)
        accepted = _longest(lengths, uniforms[:, :n], weights, left)
        weight = weights[rows, accepted][:, None]
    own = target_probs[places.at(accepted[:, None])[:, 0]]
    scaled = own if weight is None else own * weight.to(own.dtype)
    residual = (scaled - proposal.probs[rows, accepted.clamp(max=n - 1)]).clamp(min=0)
    # after a refusal the rest of the target's mass decides; where rounding has left none of it, the target's own law
    refused = (accepted < lengths) & (residual.sum(-1) > 0)
    return Verdict(accepted, draw(torch.where(refused[:, None], residual, own), uniforms[:, -1]))


def agree(own: Tensor, drafted: Tensor, lengths: Tensor) -> Verdict:
    """`verify` at temperature 0, where the target is certain of own [B, S]: keep of the first lengths[b] drafted tokens
    [B, G] what agrees up to the first that does not. Both rules say so, whatever the drafter's law and the coins."""
    n = min(drafted.shape[1], own.shape[1] - 1)
    same = (own[:, :n] == drafted[:, :n]) & (torch.arange(n, device=own.device) < lengths[:, None])
    accepted = same.cumprod(-1).sum(-1)
    return Verdict(accepted, own.gather(1, accepted[:, None])[:, 0])


def _weights(p: Tensor, q: Tensor) -> Tensor:
    """w [B, n + 1], the chance that the first i drafted tokens stand: w_0 = 1, w_i = min(1, w_{i-1} p_i / q_i).
    p, q [B, n]: what target and drafter give the drafted tokens."""
    weights = [torch.ones_like(p[:, 0])]
    for i in range(p.shape[1]):
        mass = weights[-1] * p[:, i]
        # a token its own drafter gives 0 was never drawn; 1 where the target likes it and 0 where not
        weights.append(torch.where(mass < q[:, i], mass / q[:, i], (mass > 0).double()))
    return torch.stack(weights, 1)


def _left(target_probs: Tensor, probs: Tensor, weights: Tensor, places: Ragged) -> Tensor:
    """s [B, n], the mass that the next slot leaves to the target after i = 1, ..., n drafted tokens: the sum of
    max(0, w_i p_{i+1} - q_{i+1}); 0 where a row verifies no next slot. target_probs packed [N, V], probs [B, G, V],
    weights [B, n + 1]."""
    n = weights.shape[1] - 1
    inner = Ragged([max(min(count - 2, n - 1), 0) for count in places.counts], probs.device)
    i = inner.columns + 1
    mass = target_probs[places.at(torch.arange(1, inner.width + 1, device=probs.device))[inner.rows, inner.columns]]
    mass.mul_(weights[inner.rows, i][:, None].to(mass.dtype)).sub_(probs[inner.rows, i]).clamp_(min=0)
    return inner.unpack(mass.sum(-1, dtype=torch.float64), n)


def _longest(lengths: Tensor, coins: Tensor, weights: Tensor, left: Tensor) -> Tensor:
    """[B] the longest prefix whose coin falls below its chance h. coins and left [B, n], weights [B, n + 1]."""
    w, slot = weights[:, 1:], torch.arange(1, coins.shape[1] + 1, device=coins.device)
    # h_i = s_i / (s_i + 1 - w_i) before the last verified token, w_n at it
    last = slot == lengths[:, None]
    keep = torch.where(last, coins < w, coins * (left + 1 - w) < left) & (slot <= lengths[:, None])
    return (keep * slot).amax(-1)
