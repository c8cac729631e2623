"""From logits to the exact distribution a token is drawn from, and the drawing. The only place tokens are drawn.

Letters: V vocabulary, G slots. Randomness is counter-based: a uniform is a pure function of (request seed, position in
the sequence, stream), so a request draws the same numbers alone, in any batch, and on any device.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .checked import Checked, require

DRAFT, ACCEPT, TARGET, ANCHOR = 0, 1, 2, 3
"""Streams: the token drafted after an anchor at a position; the coin that accepts it (both one a slot, see
`slot_streams`); the target's own token after an anchor at a position; the choice of training anchors."""
_STREAMS = 4

_MASK32 = 0xFFFFFFFF

NUCLEUS = 512
"""How many of the likeliest tokens are looked at first for the mass of top_p."""


@dataclass(frozen=True, kw_only=True)
class Sampling(Checked):
    """How tokens are drawn, from drafter and target alike.

    Order of the filters, as in vLLM and transformers: temperature, top-k, top-p, min-p, each on the renormalised rest.
    """

    temperature: float = 0.0
    """0 is greedy: the distribution is a one-hot."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose mass reaches top_p."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the likeliest."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0 <= self.temperature < math.inf, f"sampling.temperature must be >= 0 and finite, got {self.temperature}"
        )
        require(self.top_k >= 0, f"sampling.top_k must be >= 0 (0 keeps all), got {self.top_k}")
        require(0 < self.top_p <= 1, f"sampling.top_p must be in (0, 1], got {self.top_p}")
        require(0 <= self.min_p <= 1, f"sampling.min_p must be in [0, 1], got {self.min_p}")

    def probs(self, logits: Tensor) -> Tensor:
        """[..., V] any float dtype -> [..., V] float32, summing to 1 (to rounding)."""
        if self.temperature == 0:
            return one_hot(likeliest(logits), logits.shape[-1])
        logits = logits.float() / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)  # ties with the k-th stay, on both sides alike
        probs = logits.softmax(-1)
        if self.top_p < 1:
            probs = probs * nucleus(probs, self.top_p)
            probs = probs / probs.sum(-1, keepdim=True)
        if self.min_p > 0:
            probs = probs * (probs >= self.min_p * probs.amax(-1, keepdim=True))
            probs = probs / probs.sum(-1, keepdim=True)
        return probs

    def token(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """logits [..., V], uniform [...] in (0, 1) -> token ids [...]."""
        # of a one-hot, the inverse CDF is its place, whatever the uniform
        return likeliest(logits) if self.temperature == 0 else draw(self.probs(logits), uniform)

    def draw(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """The same, and the law the tokens were drawn from [..., V]."""
        if self.temperature == 0:
            tokens = likeliest(logits)
            return tokens, one_hot(tokens, logits.shape[-1])
        probs = self.probs(logits)
        return draw(probs, uniform), probs

    def fill(self, law: Tensor, logits: Tensor, uniform: Tensor) -> Tensor:
        """`draw` that leaves the law in `law` [..., V], which holds zeros; returns the tokens [...]."""
        if self.temperature == 0:
            tokens = likeliest(logits)
            law.scatter_(-1, tokens[..., None], 1.0)
            return tokens
        return draw(law.copy_(self.probs(logits)), uniform)


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """[..., V] bool: the smallest set of likeliest tokens whose mass reaches top_p; of equals the first stay.

    On a CPU laws whose likeliest few hundred hold that mass, most of them, are never sorted."""
    laws = probs.reshape(-1, probs.shape[-1])
    least, count = _edge(laws, top_p, NUCLEUS if laws.device.type == "cpu" else laws.shape[1])
    keep = laws >= least[:, None]
    if laws.device.type == "cpu":
        surplus = (keep.sum(-1) > count).nonzero()[:, 0]  # rows with equals of which not all stay
        keep[surplus] = _first(laws[surplus], keep[surplus], least[surplus], count[surplus])
    else:  # the host does not wait
        keep = _first(laws, keep, least, count)
    return keep.view(probs.shape)


def _edge(laws: Tensor, top_p: float, most: int) -> tuple[Tensor, Tensor]:
    """laws [N, V] -> the least probability that stays [N], and how many tokens stay [N]; found among each row's `most`
    likeliest where they hold top_p, else among more."""
    most = min(most, laws.shape[1])
    ordered = laws.topk(most, -1).values if most < laws.shape[1] else laws.sort(-1, descending=True).values
    count = (ordered.double().cumsum(-1) < top_p).sum(-1) + 1  # those that leave mass to be reached, and one
    least = ordered.gather(1, (count - 1).clamp(max=most - 1)[:, None])[:, 0]
    if most < laws.shape[1] and len(more := (count > most).nonzero()[:, 0]):
        least[more], count[more] = _edge(laws[more], top_p, 16 * most)
    return least, count


def _first(laws: Tensor, keep: Tensor, least: Tensor, count: Tensor) -> Tensor:
    """keep [N, V] without the last of those as likely as `least` [N], so that count [N] are left."""
    equal = laws == least[:, None]
    room = count - (keep.sum(-1) - equal.sum(-1))
    return keep & ~(equal & (equal.cumsum(-1) > room[:, None]))


def one_hot(tokens: Tensor, size: int) -> Tensor:
    """The law that is certain of tokens [...]: [..., size] float32."""
    law = torch.zeros(*tokens.shape, size, device=tokens.device)
    return law.scatter_(-1, tokens[..., None], 1.0)


def likeliest(logits: Tensor) -> Tensor:
    """[..., V] -> [...] the first of the greatest. (max is two to three times as quick as argmax on a CPU.)"""
    return logits.max(-1).indices


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Inverse CDF in float64: weights [..., V] >= 0 (of any positive sum), uniform [...] in (0, 1) -> token ids [...].

    A token of weight 0 is never drawn: the first entry of the running sum above u * total has weight > 0.
    """
    running = weights.double().cumsum(-1)
    return torch.searchsorted(running, (uniform.double() * running[..., -1])[..., None], right=True)[..., 0]


def slot_streams(stream: int, slots: int, device: torch.device | None = None) -> Tensor:
    """[G] one stream a slot, for draws that belong to a block: keyed by its anchor and the slot, never by the place of
    the token. A token that was cut may be known (its confidence made a schedule's budget, its coin a longer prefix),
    so the round that drafts this place again must not repeat its number."""
    return stream + _STREAMS * torch.arange(slots, device=device)


def uniforms(seeds: Tensor, positions: Tensor, stream: int | Tensor) -> Tensor:
    """Uniforms in (0, 1), float64, 48 bits: seeds, positions and streams long, broadcast together -> their shape.

    Products stay below 2^63, so no arithmetic overflows and every device agrees. 48 bits keep u * total < total. Two
    lanes of 32 bits, salted at the seed: where two requests meet in one lane they part in the other, so that no request
    replays another's numbers.
    """
    x, y = _lanes(seeds, positions, stream)
    return (((x ^ y) << 16 | y >> 16).double() + 0.5) * 2.0**-48


def fold(seed: int, *parts: Tensor) -> Tensor:
    """One seed for each place in `parts` (long, in [0, 2^32), broadcast together): a hash of all 64 bits of `seed` and
    of every part, long, in [0, 2^62)."""
    seeds = torch.tensor((seed + 2**63) % 2**64 - 2**63)
    for n, part in enumerate(parts):
        high, low = _lanes(seeds, part, n)
        seeds = high >> 2 << 32 | low
    return seeds


def _lanes(seeds: Tensor, positions: Tensor, stream: int | Tensor) -> Tensor:
    """Both lanes, [2, ...]."""
    dims = max(x.dim() for x in (seeds, positions, stream) if isinstance(x, Tensor))
    salts = torch.arange(0, 2 * 0x1B873593, 0x1B873593, device=seeds.device).view(2, *[1] * dims)
    x = _mix(_mix(seeds & _MASK32 ^ salts) ^ (seeds >> 32 & _MASK32))
    return _mix(_mix(x ^ (positions & _MASK32)) ^ stream * 0x3C6EF372 & _MASK32)


def _mix(x: Tensor) -> Tensor:
    """A 32-bit finaliser (xor-shift, multiply) on values in [0, 2^32) held as int64; its multipliers are below 2^31."""
    x = (x + 0x1E3779B9).bitwise_and_(_MASK32)
    x.bitwise_xor_(x >> 16).mul_(0x21F0AAAD).bitwise_and_(_MASK32)
    x.bitwise_xor_(x >> 15).mul_(0x735A2D97).bitwise_and_(_MASK32)
    return x.bitwise_xor_(x >> 15)
