"""Eagle3: one autoregressive layer over (target features, next token), trained by unrolling it on itself.

Row t pairs the features of position t with the token at t + 1: it is slot 0 of the block anchored at t + 1. Slot g > 0
takes the state of slot g - 1 and the token at t + 1 + g. Only slot 0 has target features, so what later slots see is
the keys and values of the slots 0 of rows up to t, and those of the row's own earlier slots.

Letters: B rows, T positions, S new positions, A anchors, G slots, L tapped layers, D hidden, N packed positions,
Q heads, K kv heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..checked import require
from ..sampling import Sampling
from .attention import attend
from .cache import KVCache, Ragged, as_list, on_device
from .draft_vocab import check
from .drafter import Batch, Drafter, DrafterConfig, Proposal, certain, choose_anchors
from .layers import Block, RMSNorm, Rotary, spec_norm
from .packed import pack
from .spec import BlockSpec
from .unrolled import Unrolled
from .vocab import Vocab

ROUND = 64
"""Columns of anchors are computed in multiples of this, so that few shapes occur."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(DrafterConfig):
    """block_size is how often the layer is unrolled in training (`ttt_length`) and how many tokens it drafts."""

    num_draft_layers: int = 1
    """Always 1: the layer runs once for every drafted token, and servers disagree about what a second one reads."""
    qk_norm: bool = False
    """Norms on queries and keys, as in DeepSpec's checkpoints. No other server or trainer of Eagle3 knows them."""
    num_anchors: int | None = None
    """Positions drafted from per training sequence, at random where there are more; None: every one."""
    norm_before_residual: bool = False
    """The residual stream starts from the normed state, not from the state itself."""
    norm_before_fc: bool = False
    """A norm over all features together before their projection."""
    fc_norm: bool = False
    """A norm over each tapped layer's features before their projection."""
    norm_output: bool = False
    """The next slot reads the state after the final norm (Eagle 3.1), not before it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.num_draft_layers == 1, f"drafter.num_draft_layers must be 1 for Eagle3, got {self.num_draft_layers}"
        )
        require(
            not (self.norm_before_fc and self.fc_norm),
            "drafter.norm_before_fc and drafter.fc_norm: at most one can be true",
        )
        require(
            self.num_anchors is None or self.num_anchors >= 1,
            f"drafter.num_anchors must be >= 1 or None, got {self.num_anchors}",
        )

    def build(self, spec: BlockSpec, vocab: Vocab) -> Eagle3:
        return Eagle3(self, spec, vocab)


# -- the drafter -------------------------------------------------------------------------------------------------------


@dataclass
class Eagle3State:
    """Context of the rows in flight: keys and values of slot 0, how many positions, and the last position's state."""

    cache: KVCache
    lengths: list[int]
    hidden: Tensor
    """[B, D] what slot 1 reads."""
    live: list[int] = field(default_factory=list)
    """Rows that have observed something."""


class Eagle3(Drafter):
    config: Eagle3Config
    rows_out = None

    def __init__(self, config: Eagle3Config, spec: BlockSpec, vocab: Vocab) -> None:
        super().__init__()
        if vocab.dim != spec.dim:
            raise ValueError(f"the vocabulary has width {vocab.dim}, the block {spec.dim}")
        check(config.draft_vocab_size, vocab)
        self.config, self.spec = config, spec
        # not a submodule: moving, casting, saving or sharding a drafter must leave the target's own tensors alone
        object.__setattr__(self, "vocab", vocab)
        taps = len(config.target_layer_ids)
        self.fc = nn.Linear(taps * spec.dim, spec.dim, bias=False)
        self.input_norm = RMSNorm(taps * spec.dim, spec.norm_eps) if config.norm_before_fc else None
        norms = [RMSNorm(spec.dim, spec.norm_eps) for _ in range(taps)]
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.layers = nn.ModuleList([Block(spec, aside=True, qk_norm=config.qk_norm)])
        self.norm = spec_norm(spec)
        self.rotary = Rotary(spec)

    @property
    def num_slots(self) -> int:
        return self.config.block_size

    @property
    def _layer(self) -> Block:
        layer = self.layers[0]
        assert isinstance(layer, Block)  # ModuleList forgets what it holds
        return layer

    # -- training ------------------------------------------------------------------------------------------------------

    def anchors(self, batch: Batch, seeds: Tensor) -> tuple[Tensor, Tensor]:
        """Positions whose successor is supervised and whose predecessor has features: num_anchors of them at random, or
        all (A is T then); [B, A] ascending, and which are real; the rest stand at 0."""
        document = batch.documents
        same = document[:, 1:] == document[:, :-1]
        usable = torch.zeros_like(batch.loss_mask)
        usable[:, 1:-1] = batch.loss_mask[:, 2:] & same[:, 1:] & same[:, :-1]
        return choose_anchors(usable, self.config.num_anchors or usable.shape[1], seeds)

    def hidden(self, batch: Batch, anchors: Tensor) -> Tensor:
        A, width = anchors.shape[1], _columns(anchors)
        anchors = anchors[:, :width]
        layer, positions = self._layer, batch.positions
        B, T = batch.tokens.shape
        rows = (anchors - 1).clamp(min=0)
        heads = self.spec.heads, self.spec.kv_heads
        view = Unrolled(rows, batch.documents, layer.self_attn.scale, heads, self.num_slots)
        at = positions.gather(1, rows)
        offset = torch.arange(B, device=rows.device)[:, None] * T

        def pick(x: Tensor, which: Tensor) -> Tensor:
            """[B, T, *] at places which [..., B, N] -> [..., B, N, *]."""
            return x.flatten(0, 1).index_select(0, (offset + which).flatten()).unflatten(0, which.shape)

        # queries, keys and values are of a token and of a state: a token's part is made once for all slots
        sizes, of_token, of_state = self._halves()
        token_part = nn.functional.linear(self._aside(batch.tokens), of_token)
        slot = torch.arange(self.num_slots, device=rows.device)[:, None, None]
        parts = pick(token_part, (anchors + slot).clamp(max=T - 1)).unbind()

        # slot 0: keys and values of every row; queries of the anchors' rows alone
        states = self._project(batch.features)
        normed, residual = self._normed(states)
        following = torch.arange(1, T + 1, device=rows.device).clamp(max=T - 1).expand(B, T)
        kv = _plus(pick(token_part[..., sizes[0] :], following), normed, of_state[sizes[0] :]).split(sizes[1:], -1)
        view.start(*layer.self_attn.placed_kv(kv[0], kv[-1], self.rotary(positions)))
        q = _plus(parts[0][..., : sizes[0]], pick(normed, rows), of_state[: sizes[0]])
        x, slots = pick(residual, rows), []
        for g in range(self.num_slots):
            rotary = self.rotary(at + g)
            if g:
                normed, x = self._normed(x)
                q, *kv = _plus(parts[g], normed, of_state).split(sizes, -1)
                view.add(*layer.self_attn.placed_kv(kv[0], kv[-1], rotary))
            x = self._recur(layer.finish(x, view(layer.self_attn.placed_q(q, rotary))))
            slots.append(x)
        read = self._read(torch.stack(slots, 2))
        return read if width == A else nn.functional.pad(read, (0, 0, 0, 0, 0, A - width))

    def _halves(self) -> tuple[list[int], Tensor, Tensor]:
        """Sizes of what q_proj, k_proj and v_proj give, and their matrices one below the other, cut into what
        multiplies a token [sum, D] and what multiplies a state [sum, D]."""
        attention = self._layer.self_attn
        weights = [m.weight for m in (attention.q_proj, attention.k_proj, attention.v_proj) if m is not None]
        of_token, of_state = torch.cat(weights).split(self.spec.dim, 1)
        return [len(w) for w in weights], of_token, of_state

    # -- the layer's two ends ------------------------------------------------------------------------------------------

    def _project(self, features: Tensor) -> Tensor:
        """Target features [..., L * D] -> states [..., D]."""
        x = self._cast(features)
        if self.input_norm is not None:
            x = self.input_norm(x)
        if self.fc_norm is not None:
            x = torch.cat([norm(part) for norm, part in zip(self.fc_norm, x.split(self.spec.dim, -1))], -1)
        return self.fc(x)

    def _inputs(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """States [..., D] and the tokens after them [...] -> what attention reads [..., 2 D], and the residual."""
        normed, residual = self._normed(states)
        return torch.cat([self._aside(tokens), normed], -1), residual

    def _aside(self, tokens: Tensor) -> Tensor:
        """Tokens [...] -> what attention reads of them [..., D]."""
        return self._layer.input_layernorm(self._cast(self.vocab.embed(tokens)))  # type: ignore[no-any-return]

    def _normed(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """States [..., D] -> what attention reads of them, and the residual."""
        layer = self._layer
        assert layer.hidden_norm is not None
        normed = layer.hidden_norm(states)
        return normed, normed if self.config.norm_before_residual else states

    def _recur(self, x: Tensor) -> Tensor:
        """The layer's output [..., D] -> the state that the next slot reads."""
        return self.norm(x) if self.config.norm_output else x

    def _read(self, states: Tensor) -> Tensor:
        """States [..., D] -> what the vocabulary's head reads."""
        return states if self.config.norm_output else self.norm(states)

    def _cast(self, x: Tensor) -> Tensor:
        """The target's dtype -> the drafter's; autocast does it by itself."""
        return x if torch.is_autocast_enabled(x.device.type) else x.to(self.fc.weight.dtype)

    def rows(self, hidden: Tensor, prev: Tensor) -> Tensor:
        return hidden.new_zeros(*hidden.shape[:-1], 0)

    def confidence(self, hidden: Tensor, prev: Tensor) -> Tensor:
        return certain(prev)

    # -- decoding ------------------------------------------------------------------------------------------------------

    def compile(self, **options: Any) -> None:  # type: ignore[override]
        """Nothing: it drafts token by token."""

    def new_state(self, rows: int, max_length: int) -> Eagle3State:
        pack(self)
        # a proposal writes its own keys after the context, where the next observation overwrites them
        cache = KVCache(rows, max_length + self.num_slots)
        return Eagle3State(cache, [0] * rows, self.fc.weight.new_zeros(rows, self.spec.dim))

    @torch.no_grad()
    def observe(
        self, state: Eagle3State, features: Tensor, next_tokens: Tensor, counts: Tensor | Sequence[int]
    ) -> None:
        count_list = as_list(counts)  # type: ignore[arg-type]
        ragged, device = Ragged(count_list, features.device), features.device
        if not ragged.total:
            return
        layer = self._layer
        positions = on_device(state.lengths, device)[ragged.rows] + ragged.columns
        inputs, residual = self._inputs(self._project(ragged.pack(features)), ragged.pack(next_tokens))
        where = ragged.rows * state.cache.capacity + positions
        rotary = self.rotary(positions)
        state.cache.write(0, where, *layer.self_attn.kv(inputs, rotary))
        state.lengths = [n + c for n, c in zip(state.lengths, count_list)]
        state.live = [b for b, n in enumerate(state.lengths) if n]
        # only each row's last position is ever asked for its state
        live = on_device(ragged.live, device)
        last = on_device([count_list[b] for b in ragged.live], device).cumsum(0) - 1
        q = layer.self_attn.q(inputs[last], (rotary[0][last], rotary[1][last]))
        seen = self._look(state, q, ragged.live, 0)
        x = self._recur(layer.finish(residual[last], seen)).to(state.hidden.dtype)
        state.hidden = state.hidden.index_copy(0, live, x)

    def reset_rows(self, state: Eagle3State, rows: Sequence[int]) -> None:
        for row in as_list(rows):  # type: ignore[arg-type]
            state.lengths[row] = 0
        state.live = [b for b, n in enumerate(state.lengths) if n]

    @torch.no_grad()
    def propose(
        self, state: Eagle3State, sampling: Sampling, uniforms: Tensor, rows: Sequence[int] | None = None
    ) -> Proposal:
        layer, live, B = self._layer, state.live if rows is None else list(rows), len(state.lengths)
        at = on_device(live, uniforms.device)
        start = on_device([state.lengths[b] for b in live], uniforms.device)
        x = state.hidden[at]
        drawn: list[Tensor] = []
        laws: list[Tensor] = []
        for g in range(self.num_slots):
            if g:
                position = start + g - 1
                inputs, x = self._inputs(x, drawn[-1])
                rotary = self.rotary(position)
                where = at * state.cache.capacity + position
                state.cache.write(0, where, *layer.self_attn.kv(inputs, rotary))
                x = self._recur(layer.finish(x, self._look(state, layer.self_attn.q(inputs, rotary), live, g)))
            token, law = self.vocab.full(*sampling.draw(self.vocab.logits(self._read(x)), uniforms[at, g]))
            drawn.append(token)
            laws.append(law)
        tokens = torch.stack(drawn, 1)
        part = Proposal(tokens, torch.stack(laws, 1), certain(tokens).sigmoid())
        return part if len(live) == B else part.spread(at, B)

    def _look(self, state: Eagle3State, q: Tensor, rows: list[int], ahead: int) -> Tensor:
        """Queries [N, Q, H], one for each of `rows`, over the first length + ahead places of its row -> [N, Q, H]."""
        ends = [state.lengths[b] + ahead for b in rows]
        longest, device = max(ends, default=0), q.device
        everyone = len(rows) == len(state.lengths)
        keys, values = state.cache.read(0, longest, None if everyone else on_device(rows, device))
        mask = None
        if min(ends, default=0) != longest:
            mask = torch.arange(longest, device=device) < on_device(ends, device)[:, None]
            mask = mask[:, None, None]
        return attend(q[:, :, None], keys, values, mask, self._layer.self_attn.scale)[:, :, 0]


def _plus(total: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """total [B, N, O] + x [B, N, D] by weight [O, D]."""
    return torch.addmm(total.flatten(0, 1), x.flatten(0, 1), weight.T).view(total.shape)


def _columns(anchors: Tensor) -> int:
    """How many columns of anchors [B, A] to compute: the last ones stand at 0, where nothing can be drafted from."""
    from torch._subclasses.fake_tensor import FakeTensor

    A = anchors.shape[1]
    if isinstance(anchors, FakeTensor):  # a dry run: shapes without data
        return A
    used = int(torch.arange(1, A + 1, device=anchors.device).where(anchors.any(0), 0).max()) if A else 0
    return min(A, max(1, -(-used // ROUND)) * ROUND)
