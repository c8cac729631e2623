"""KV injection: a parallel drafter that reads the target's context straight into its keys and values.

Letters: B rows, T positions, S new positions, A anchors, G slots, L tapped layers, D hidden, N packed positions.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..checked import require
from ..sampling import Sampling
from .attention import Anchored, attend
from .cache import KVCache, Ragged, as_list, on_device
from .draft_vocab import check
from .drafter import Batch, Drafter, DrafterConfig, Proposal, choose_anchors
from .fixed import capacity
from .layers import Block, Rotary, Spread, spec_norm
from .packed import pack
from .spec import BlockSpec
from .vocab import Vocab


@dataclass(frozen=True, kw_only=True)
class BlockConfig(DrafterConfig):
    """What DFlash and DSpark share."""

    num_draft_layers: int = 5
    mask_token_id: int
    """Fills the slots after the anchor; an embedding row that text never uses."""
    num_anchors: int = 512
    """Blocks drafted per training sequence."""
    sample_from_anchor: bool = True
    """True: the anchor's own position predicts slot 0, so a block drafts block_size tokens (the paper, DeepSpec).
    False: the anchor is known and masks predict their own position, block_size - 1 tokens (z-lab's DFlash)."""
    width: int | None = None
    """Hidden size of the drafter; None is the target's. Another one is projected to and from at the two ends."""
    mlp_width: int | None = None
    """Width of its MLPs; None is the target's, in proportion to `width`."""
    sliding_window: int | None = None
    """Context a slot sees, itself counted: the positions less than this far before it; None is all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.num_draft_layers >= 1, f"drafter.num_draft_layers must be >= 1, got {self.num_draft_layers}")
        require(self.num_anchors >= 1, f"drafter.num_anchors must be >= 1, got {self.num_anchors}")
        require(self.mask_token_id >= 0, f"drafter.mask_token_id must be >= 0, got {self.mask_token_id}")
        for name in ("width", "mlp_width"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"drafter.{name} must be >= 1 or None, got {value}")
        require(
            self.sliding_window is None or self.sliding_window > self.block_size,
            f"drafter.sliding_window ({self.sliding_window}) must be greater than drafter.block_size "
            f"({self.block_size}): a block sees all of itself and some context",
        )
        require(
            self.sample_from_anchor or self.block_size >= 2,
            "drafter.block_size must be >= 2 where sample_from_anchor is false: one place is the anchor's",
        )

    def check_target(self, *, num_layers: int, vocab_size: int, special_ids: dict[str, Sequence[int]]) -> None:
        super().check_target(num_layers=num_layers, vocab_size=vocab_size, special_ids=special_ids)
        require(
            self.mask_token_id < vocab_size,
            f"drafter.mask_token_id {self.mask_token_id} is outside the target's {vocab_size} embedding rows",
        )
        for kind, ids in special_ids.items():
            require(
                self.mask_token_id not in ids,
                f"drafter.mask_token_id {self.mask_token_id} is the target's {kind} token, which text uses; "
                "choose an id that text never uses",
            )

    def shape(self, spec: BlockSpec) -> BlockSpec:
        """The drafter's own block: the target's, or one of other widths. Leaves one that has them as it is."""
        mlp = self.mlp_width or (spec.mlp_dim if self.width is None else round(spec.mlp_dim * self.width / spec.dim))
        return replace(spec, dim=self.width or spec.dim, mlp_dim=mlp)


@dataclass
class BlockState:
    """Context of the rows in flight: injected keys and values, how many positions, and the anchor after them."""

    cache: KVCache
    lengths: list[int]
    anchors: Tensor
    """[B] long."""
    live: list[int] = field(default_factory=list)
    """Rows that have observed something."""


class BlockDrafter(Drafter):
    """Everything DFlash and DSpark share. Subclasses add what turns slot states into tokens."""

    config: BlockConfig

    def __init__(self, config: BlockConfig, spec: BlockSpec, vocab: Vocab) -> None:
        super().__init__()
        spec = config.shape(spec)
        if vocab.dim != spec.dim and config.width is None:
            raise ValueError(f"the vocabulary has width {vocab.dim}, the block {spec.dim}")
        check(config.draft_vocab_size, vocab)
        self.config, self.spec = config, spec
        # not a submodule: moving, casting, saving or sharding a drafter must leave the target's own tensors alone
        object.__setattr__(self, "vocab", vocab)
        self.fc = nn.Linear(len(config.target_layer_ids) * vocab.dim, spec.dim, bias=False)
        self.hidden_norm = spec_norm(spec)
        self.layers = nn.ModuleList([Block(spec) for _ in range(config.num_draft_layers)])
        self.norm = spec_norm(spec)
        other = spec.dim != vocab.dim
        self.embed_proj = nn.Linear(vocab.dim, spec.dim, bias=False) if other else None
        self.out_proj = nn.Linear(spec.dim, vocab.dim, bias=False) if other else None
        self.rotary = Rotary(spec)
        self._program: Callable[..., Any] | None = None

    @property
    def num_slots(self) -> int:
        return self.config.block_size if self.config.sample_from_anchor else self.config.block_size - 1

    # -- training ------------------------------------------------------------------------------------------------------

    def anchors(self, batch: Batch, seeds: Tensor) -> tuple[Tensor, Tensor]:
        """A = num_anchors positions [B, A] ascending, chosen at random, and which are real; the rest stand at 0."""
        document = batch.documents
        # as in decoding, an anchor is a token the target wrote, and so is the one after it
        usable = torch.zeros_like(batch.loss_mask)
        usable[:, :-1] = batch.loss_mask[:, :-1] & batch.loss_mask[:, 1:] & (document[:, 1:] == document[:, :-1])
        return choose_anchors(usable, self.config.num_anchors, seeds)

    def hidden(self, batch: Batch, anchors: Tensor) -> Tensor:
        positions, documents = batch.positions, batch.documents
        context = self.hidden_norm(self.fc(self._cast(batch.features)))
        context_rotary = self.rotary(positions)
        width = self.config.block_size
        at = positions.gather(1, anchors)[..., None] + torch.arange(width, device=anchors.device)
        rotary = self.rotary(at.flatten(1))
        # the first layer's inputs are the anchors and one mask token: its norm and projections see each once
        spread: Spread = functools.partial(_spread, width)
        x = self._embed(nn.functional.pad(batch.tokens.gather(1, anchors), (0, 1), value=self.config.mask_token_id))
        heads = self.spec.heads, self.spec.kv_heads
        view = Anchored(anchors, documents, width, heads, self.attention, self.config.sliding_window).prepare()
        for layer in self._blocks():
            injected, scale = layer.self_attn.kv(context, context_rotary), layer.self_attn.scale
            look = functools.partial(_look, view, injected, scale)
            if self.checkpoint_layers and torch.is_grad_enabled():
                x = checkpoint(layer, x, rotary, look, spread, use_reentrant=False)
            else:
                x = layer(x, rotary, look, spread)
            spread = None
        return self._slots(x.unflatten(1, (anchors.shape[1], width)))

    def _blocks(self) -> list[Block]:
        return [layer for layer in self.layers if isinstance(layer, Block)]  # ModuleList forgets what it holds

    def _cast(self, x: Tensor) -> Tensor:
        """The target's dtype -> the drafter's; autocast does it by itself."""
        return x if torch.is_autocast_enabled(x.device.type) else x.to(self.fc.weight.dtype)

    def _embed(self, tokens: Tensor) -> Tensor:
        """[...] -> block input [..., D]."""
        x = self._cast(self.vocab.embed(tokens))
        return x if self.embed_proj is None else self.embed_proj(x)

    def _block(self, anchors: Tensor) -> Tensor:
        """The tokens of a block [..., block_size]: its anchor [...], then masks."""
        masks = self.config.block_size - 1
        return nn.functional.pad(anchors[..., None], (0, masks), value=self.config.mask_token_id)

    def _slots(self, x: Tensor) -> Tensor:
        """What the layers leave [..., block_size, D] -> slot states that the target's head reads [..., G, D]."""
        x = self.norm(x if self.config.sample_from_anchor else x[..., 1:, :])
        return x if self.out_proj is None else self.out_proj(x)

    # -- decoding ------------------------------------------------------------------------------------------------------

    def compile(self, **options: Any) -> None:  # type: ignore[override]
        self._program = torch.compile(self._fixed, dynamic=False, **options)

    def new_state(self, rows: int, max_length: int) -> BlockState:
        device = self.fc.weight.device
        pack(self)
        # a proposal writes its own keys after the context, where the next observation overwrites them
        places = max_length + self.config.block_size
        cache = KVCache(rows, places if self._program is None else capacity(places))
        return BlockState(cache, [0] * rows, torch.zeros(rows, dtype=torch.long, device=device))

    @torch.no_grad()
    def observe(self, state: BlockState, features: Tensor, next_tokens: Tensor, counts: Tensor | Sequence[int]) -> None:
        count_list = as_list(counts)  # type: ignore[arg-type]
        ragged = Ragged(count_list, features.device)
        if not ragged.total:
            return
        start = on_device(state.lengths, features.device)
        positions = start[ragged.rows] + ragged.columns
        context = self.hidden_norm(self.fc(self._cast(ragged.pack(features))))
        rotary = self.rotary(positions)
        where = ragged.rows * state.cache.capacity + positions
        for i, layer in enumerate(self._blocks()):
            state.cache.write(i, where, *layer.self_attn.kv(context, rotary))
        last = on_device([c - 1 for c in count_list], features.device)
        newest = next_tokens.gather(1, last.clamp(min=0)[:, None])[:, 0]
        state.anchors = torch.where(last >= 0, newest, state.anchors)
        state.lengths = [n + c for n, c in zip(state.lengths, count_list)]
        state.live = [b for b, n in enumerate(state.lengths) if n]

    def reset_rows(self, state: BlockState, rows: Sequence[int]) -> None:
        for row in as_list(rows):  # type: ignore[arg-type]
            state.lengths[row] = 0
        state.live = [b for b, n in enumerate(state.lengths) if n]

    @torch.no_grad()
    def propose(
        self, state: BlockState, sampling: Sampling, uniforms: Tensor, rows: Sequence[int] | None = None
    ) -> Proposal:
        live = state.live if rows is None else list(rows)
        if len(live) == len(state.lengths):
            return self._draw(self._states(state, live, None), state.anchors, sampling, uniforms)
        at = on_device(live, state.anchors.device)
        part = self._draw(self._states(state, live, at), state.anchors[at], sampling, uniforms[at])
        return part.spread(at, len(state.lengths))

    @abstractmethod
    def _draw(self, hidden: Tensor, anchors: Tensor, sampling: Sampling, uniforms: Tensor) -> Proposal:
        """Slot states [B, G, D], anchors [B], uniforms [B, G] -> a proposal."""

    def _states(self, state: BlockState, live: list[int], rows: Tensor | None) -> Tensor:
        """Slot states [B, G, D] of the block after the anchor of each of `live`; rows [B] the same, None: all."""
        device, width, window = state.anchors.device, self.config.block_size, self.config.sliding_window
        if self._program is not None:
            states: Tensor = self._program(state.anchors, on_device(state.lengths, device), state.cache)
            return states if rows is None else states[rows]
        ends = [state.lengths[b] for b in live]
        longest = max(ends, default=0) + width
        # no row sees anything before this
        first = 0 if window is None else max(0, min(ends, default=0) + 1 - window)
        start = on_device(ends, device)
        mask = None
        if len(set(ends)) > 1 or (window is not None and longest > window):
            mask = self._mask(start, torch.arange(first, longest, device=device))
        anchors = state.anchors if rows is None else state.anchors[rows]
        return self._through(anchors, start, state.cache, mask, (first, longest), rows)

    def _fixed(self, anchors: Tensor, start: Tensor, cache: KVCache) -> Tensor:
        """The same for all rows and the whole capacity: one shape, whatever the context. start [B]: its lengths."""
        mask = self._mask(start, torch.arange(cache.capacity, device=start.device))
        return self._through(anchors, start, cache, mask, (0, cache.capacity), None)

    def _mask(self, start: Tensor, key: Tensor) -> Tensor:
        """[B, 1, width, keys] bool for blocks at start [B] and places key: a row sees its own context, no farther back
        than the window, and its block; not what lies beyond."""
        width, window = self.config.block_size, self.config.sliding_window
        own = (key < start[:, None] + width)[:, None]
        if window is not None:
            positions = start[:, None] + torch.arange(width, device=start.device)
            own = own & ((key > positions[..., None] - window) | (key >= start[:, None])[:, None])
        return own[:, None].expand(-1, 1, width, -1)

    def _through(
        self, anchors: Tensor, start: Tensor, cache: KVCache, mask: Tensor | None, read: tuple[int, int],
        rows: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Blocks of anchors [B] at start [B] through the layers, over places read[0] to read[1] of the cache's rows."""
        positions = start[:, None] + torch.arange(self.config.block_size, device=start.device)
        x, rotary = self._embed(self._block(anchors)), self.rotary(positions)
        numbers = torch.arange(len(start), device=start.device) if rows is None else rows
        where = (numbers[:, None] * cache.capacity + positions).flatten()
        for i, layer in enumerate(self._blocks()):

            def look(q: Tensor, k: Tensor, v: Tensor, i: int = i, scale: float = layer.self_attn.scale) -> Tensor:
                cache.write(i, where, k.flatten(0, 1), v.flatten(0, 1))
                keys, values = cache.read(i, read[1], rows, read[0])
                return attend(q.transpose(1, 2), keys, values, mask, scale).transpose(1, 2)

            x = layer(x, rotary, look)
        return self._slots(x)


def _spread(width: int, x: Tensor) -> Tensor:
    """What A anchors and a mask token have [B, A + 1, ...] -> what the places of A blocks have [B, A * width, ...]."""
    A = x.shape[1] - 1
    masks = x[:, A:, None].expand(-1, A, width - 1, *x.shape[2:])
    return torch.cat([x[:, :A, None], masks], 2).flatten(1, 2)


def _look(view: Anchored, context: tuple[Tensor, Tensor], scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What the queries of all blocks see: their context and their own block."""
    return view.attend(q, context, (k, v), scale)
