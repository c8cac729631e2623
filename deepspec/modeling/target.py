"""The frozen target model: its features, its logits, and a rewindable cache of many sequences at once.

This module and `families/` are the only ones that touch `transformers` modelling internals. The model runs through one
attention function of ours, registered beside transformers' own: it writes keys and values to our cache and lets each
row see its own past, so a pass packs rows of any lengths into one sequence without padding, and no cache object of
transformers is involved (their names and calls change between releases).

Letters: B rows, S new positions, N packed positions, T positions, L tapped layers, D hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..allocator import keep_freed_memory
from ..checked import InputError
from .cache import KVCache, Ragged, as_list, on_device
from .devices import pick_device
from .families import Family, read_family
from .fixed import PLACES, FixedDecoder, capacity
from .loading import load_model, load_tokenizer, stop_ids, weight_at
from .packed import pack
from .passes import Pass
from .sizes import rounded
from .vocab import Vocab

ATTENTION = "deepspec"
PREFILL_CHUNK = 4096
"""Packed tokens of one pass of a long prefill."""


@dataclass(frozen=True)
class Scored:
    """What the target thinks of new tokens."""

    packed: Tensor
    """[N, V] logits of the new tokens that were asked about, row after row, without padding."""
    places: Ragged
    """Which of the places [B, S'] those are."""
    width: int
    """S': S, or the most of a row's last new tokens."""
    features: Tensor
    """[B, S, L * D] outputs of the tapped layers, ascending; [B, S, 0] where none is tapped."""
    hidden: Tensor
    """[B, S, D] after the final norm."""

    @functools.cached_property
    def logits(self) -> Tensor:
        """[B, S', V], zeros where there is no token."""
        return self.places.unpack(self.packed, self.width)


class Target:
    """A Hugging Face causal language model."""

    def __init__(
        self, model: Any, *, name: str = "", revision: str | None = None, tokenizer: Any = None,
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        """device: where inputs, features and the vocabulary shared with drafters live; None: where the head is."""
        self.model = model.eval().requires_grad_(False)
        self.name, self.revision, self.tokenizer = name, revision, tokenizer
        self.config = model.config.get_text_config()
        family: Family = read_family(model.config)
        self.spec = family.block
        inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
        device = outputs.weight.device if device is None else device
        head = weight_at(outputs, device)
        embedding = head if inputs.weight is outputs.weight else weight_at(inputs, device)
        self.vocab = Vocab(embedding, head, softcap=family.softcap, embed_scale=family.embed_scale)
        self._decoder = model.get_decoder()
        pack(self._decoder)
        self.num_layers = len(self._decoder.layers)
        _register_attention()
        model.set_attn_implementation(ATTENTION)
        self.stop_ids: tuple[int, ...] = stop_ids(model.generation_config, self.config, tokenizer)
        """Ids that end an answer, from the generation config, the model config and the tokenizer."""
        self.fixed: FixedDecoder | None = None

    def compile(self, **options: Any) -> None:
        """From now on sessions score up to fixed.PLACES tokens a row in passes of one shape, compiled at the first of
        each shape; options are torch.compile's. Prefill stays as it is."""
        self.fixed = FixedDecoder(self._decoder, **options)

    @classmethod
    def load(
        cls, name: str, *, device: str = "auto", dtype: str | torch.dtype = "auto", revision: str | None = None,
        device_map: str | dict[str, Any] | None = None, bits: int | None = None,
    ) -> Target:  # fmt: skip
        """Load a local directory, hub id or GGUF file, or 'deepspec/tiny'. `device` auto is CUDA where there is one;
        `dtype` auto is the checkpoint's, but float32 on a CPU that is slow in it.

        device_map, bits: layers over several devices, layers in 8 or 4 bits (see load_model); what drafters share is on
        `device` and in `dtype` all the same."""
        model = load_model(name, device=device, dtype=dtype, revision=revision, device_map=device_map, bits=bits)
        home = pick_device(device) if device_map is not None else None
        if model.device.type == "cpu":
            keep_freed_memory()  # passes take and free blocks of the same sizes
        return cls(model, name=name, revision=revision, tokenizer=load_tokenizer(name, revision=revision), device=home)

    @property
    def device(self) -> torch.device:
        return self.vocab.head.device

    @property
    def dtype(self) -> torch.dtype:
        return self.vocab.head.dtype

    def open(self, rows: int, max_length: int, target_layer_ids: Sequence[int] = ()) -> Session:
        """A session of `rows` empty sequences of up to `max_length` tokens each."""
        self._check_layers(target_layer_ids)
        return Session(self, rows, max_length, tuple(target_layer_ids))

    @torch.no_grad()
    def features(
        self, tokens: Tensor, counts: Tensor | Sequence[int], target_layer_ids: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Features [B, T, L * D] and hidden [B, T, D] of whole sequences tokens [B, T], row b of counts[b] tokens;
        zeros after a row's end. Nothing is computed for padding, and no logits are formed."""
        ragged = Ragged(as_list(counts), tokens.device)  # type: ignore[arg-type]
        features, hidden = self.packed_features(ragged.pack(tokens), ragged.counts, target_layer_ids)
        return ragged.unpack(features, tokens.shape[1]), ragged.unpack(hidden, tokens.shape[1])

    @torch.no_grad()
    def packed_features(
        self, tokens: Tensor, counts: Sequence[int], target_layer_ids: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """`features` of sequences that follow each other without padding: tokens [N], counts[b] of each -> features
        [N, L * D] and hidden [N, D]."""
        self._check_layers(target_layer_ids)
        view = Pass(Ragged(list(counts), tokens.device), [0] * len(counts), None)
        return self._run(view, tokens, tuple(target_layer_ids))

    def weights(self) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """Tensors of each decoder layer, and of the final norm, by their names there; views, not copies. InputError
        where they are quantised or not in memory."""
        layers = [layer.state_dict() for layer in self._decoder.layers]
        if any(x.is_meta or not x.is_floating_point() for layer in layers for x in layer.values()):
            raise InputError(
                f"the layers of target {self.name!r} are quantised or offloaded; no drafter can start from them"
            )
        return layers, self._decoder.norm.state_dict()

    def _check_layers(self, ids: Sequence[int]) -> None:
        if list(ids) != sorted(set(ids)) or any(not 0 <= i < self.num_layers for i in ids):
            raise InputError(
                f"target_layer_ids {tuple(ids)} must be strictly increasing and within 0 to {self.num_layers - 1}"
            )

    def _run(self, view: Pass, tokens: Tensor, layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Packed tokens [N] -> features [N, L * D] (a copy, no view of a live buffer) and hidden [N, D]."""
        n = len(tokens)
        # filled up here, where that is quick, rather than before every product
        more = rounded(n, self.device.type, self.dtype) - n
        with self._taps(layer_ids) as seen:
            output = self._decoder(
                input_ids=F.pad(tokens, (0, more))[None],
                position_ids=F.pad(view.positions, (0, more))[None],
                attention_mask=view.ignored,
                use_cache=False,
                deepspec_pass=view,
            )
        home = self.device
        hidden = output.last_hidden_state[0, :n].to(home)
        parts = [seen[i][0, :n].to(home) for i in layer_ids]
        features = torch.cat(parts, -1) if parts else hidden.new_empty(n, 0)
        return features, hidden

    @contextlib.contextmanager
    def _taps(self, layer_ids: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
        """Forward hooks on the tapped layers; gone when the pass is over."""
        seen: dict[int, Tensor] = {}

        def keep(place: int) -> Any:
            def hook(module: Any, args: Any, output: Any) -> None:
                seen[place] = output[0] if isinstance(output, tuple) else output

            return hook

        handles = [self._decoder.layers[i].register_forward_hook(keep(i)) for i in layer_ids]
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()


class Session:
    """Sequences in flight on one target: a preallocated cache and a length per row. Rewinding sets an integer."""

    def __init__(self, target: Target, rows: int, max_length: int, layer_ids: tuple[int, ...]) -> None:
        self.target, self.rows, self.max_length, self.layer_ids = target, rows, max_length, layer_ids
        self.lengths = [0] * rows
        """Tokens of each row whose keys and values are in the cache."""
        self.fixed = target.fixed is not None
        """Whether passes after the prefill have one shape, whatever counts say: all rows, all of the S places."""
        self._cache = KVCache(rows, capacity(max_length) if self.fixed else max_length)

    @torch.no_grad()
    def score(
        self, tokens: Tensor, counts: Tensor | Sequence[int] | None = None, *, last: int | Sequence[int] | None = None
    ) -> Scored:
        """Append counts[b] <= S tokens of each row of tokens [B, S] (None: all) and return what the target thinks.

        A row with count 0 takes no part. `last`: logits at each row's last so many new tokens alone (or at its last
        last[b] <= counts[b]), from place 0 on: S' is last, or max(last). A long prefill runs in chunks.
        ValueError where a row would outgrow max_length.
        """
        B, S = tokens.shape
        count_list = [S] * B if counts is None else as_list(counts)  # type: ignore[arg-type]
        for row, (length, count) in enumerate(zip(self.lengths, count_list)):
            if length + count > self.max_length:
                raise ValueError(
                    f"row {row} would hold {length + count} tokens; the session was opened for {self.max_length}"
                )
        if self.target.fixed is not None and any(self.lengths) and 0 < S <= PLACES and last is None:
            start = on_device(self.lengths, tokens.device)
            features, hidden = self.target.fixed(tokens, start, self._cache, self.layer_ids)
            self.lengths = [length + count for length, count in zip(self.lengths, count_list)]
            logits = self.target.vocab.logits(hidden.flatten(0, 1))
            return Scored(logits, Ragged([S] * B, tokens.device), S, features, hidden)
        ragged = Ragged(count_list, tokens.device)
        if ragged.total <= PREFILL_CHUNK:
            features, hidden = self._chunk(tokens, ragged)
        else:
            width = max(1, PREFILL_CHUNK // len(ragged.live))
            cuts = [(s, [min(max(c - s, 0), width) for c in count_list]) for s in range(0, S, width)]
            parts = [self._chunk(tokens[:, s : s + width], Ragged(cut, tokens.device)) for s, cut in cuts]
            features, hidden = (torch.cat(x, 1) for x in zip(*parts))
        if last is None:
            return Scored(self.target.vocab.logits(ragged.pack(hidden)), ragged, S, features, hidden)
        tail, width = ([last] * B, last) if isinstance(last, int) else (list(last), max(last, default=0))
        tail = [min(n, count) for n, count in zip(tail, count_list)]
        ends = Ragged(tail, tokens.device)
        skipped = on_device([count - n for n, count in zip(tail, count_list)], tokens.device)
        newest = hidden[ends.rows, ends.columns + skipped[ends.rows]]
        return Scored(self.target.vocab.logits(newest), ends, width, features, hidden)

    def _chunk(self, tokens: Tensor, ragged: Ragged) -> tuple[Tensor, Tensor]:
        S = tokens.shape[1]
        if not ragged.total:
            D, L = self.target.vocab.dim, len(self.layer_ids)
            empty = torch.zeros(*tokens.shape, D * (L + 1), device=tokens.device, dtype=self.target.dtype)
            return empty[..., : L * D], empty[..., L * D :]
        view = Pass(ragged, self.lengths, self._cache)
        features, hidden = self.target._run(view, ragged.pack(tokens), self.layer_ids)
        self.lengths = [length + count for length, count in zip(self.lengths, ragged.counts)]
        return ragged.unpack(features, S), ragged.unpack(hidden, S)

    def rewind(self, lengths: Tensor | Sequence[int]) -> None:
        """Keep the first lengths[b] tokens of each row. O(1): what lies beyond is overwritten by the next pass."""
        new = as_list(lengths)  # type: ignore[arg-type]
        for row, (length, old) in enumerate(zip(new, self.lengths)):
            if not 0 <= length <= old:
                raise ValueError(f"row {row} holds {old} tokens; it cannot be rewound to {length}")
        self.lengths = new

    def reset(self, rows: Tensor | Sequence[int]) -> None:
        """Empty these rows. O(1)."""
        for row in as_list(rows):  # type: ignore[arg-type]
            self.lengths[row] = 0


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *,
    scaling: float | None = None, sliding_window: int | None = None, deepspec_pass: Pass | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention interface. Without a pass of ours (a user calling the model) it is their own SDPA."""
    if deepspec_pass is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **kwargs
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return deepspec_pass.attend(module.layer_idx, query, key, value, scale, sliding_window), None


def _register_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
