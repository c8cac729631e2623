"""All that training reads besides the target's weights: rows, how they make up sequences, and their features."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..config import Config
from ..modeling import loading
from ..modeling.ends import Ends
from ..modeling.families import read_family
from ..modeling.target import Target
from .batches import Batches
from .feature_cache import Cached
from .features import FAULTS, Live, check_refused
from .loader import Loader, load_rows, sequences
from .manifest import doubts, template_hash
from .rows import Rows

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingData:
    """Usable rows, what was dropped by reason, the sequences that training sees."""

    config: Config
    rows: Rows
    dropped: Counter[str]
    sequences: Sequence[tuple[int, ...]]
    """The rows of each."""
    cache: Cached | None
    """None: features are computed live."""

    def loader(self) -> Loader:
        return Loader(self.sequences, self.config.train.batch_size, self.config.seed)

    def load_target(self, device: torch.device) -> Target | Ends:
        """On `device`: the target, or its two ends where nothing needs its layers (a forward pass, a start from
        them, decoding)."""
        c, train = self.config, self.config.train
        options: dict[str, Any] = {"device": str(device), "dtype": train.target_dtype, "revision": c.target_revision}
        whole = self.cache is None or train.init == "target" or c.target.endswith(".gguf") or c.validate.path
        if not whole:
            return Ends.load(c.target, **options)
        spread = "auto" if train.target_devices == "all" else None
        return Target.load(c.target, **options, device_map=spread, bits=train.target_bits)

    def batches(self, target: Target | Ends) -> Batches:
        """Makes the micro-batches of these rows. InputError where the cache is of another target."""
        if self.cache is None:
            assert isinstance(target, Target)
            live = Live(target, self.config.drafter.target_layer_ids, self.rows)
            return Batches(self.rows, live, target.device)
        self.cache.check_vocab(target.vocab)
        self.cache.device = target.device
        return Batches(self.rows, self.cache, target.device)


def training_data(config: Config) -> TrainingData:
    """Read and check all of it, before the target's weights are read. InputError says what is wrong."""
    rows, dropped, identity = read_rows(config)
    _say(config, rows, dropped, identity)
    cache = None
    if config.data.features != "live":
        cache = Cached(config.data.features, identity, rows)
        if refused := Counter(FAULTS[fault] for fault in cache.fault.tolist() if fault >= 0):
            check_refused(refused.total(), len(rows), config.data.max_refused)
            dropped.update({f"{fault} features": count for fault, count in refused.items()})
            rows = rows.keep(cache.fault < 0)
            cache = Cached(config.data.features, identity, rows)
    return TrainingData(config, rows, dropped, sequences(rows, config.data.pack_tokens, config.seed), cache)


def _say(config: Config, rows: Rows, dropped: Counter[str], identity: dict[str, Any]) -> None:
    """Log how many rows there are, what was dropped, and where the answers were made otherwise than they are used."""
    _LOG.info("%d training rows of %d tokens", len(rows), len(rows.tokens))
    for reason, count in dropped.most_common():
        _LOG.info("dropped %d: %s", count, reason)
    used = {key: identity[key] for key in ("target", "target_revision")}
    used |= {"chat_template_sha256": identity["chat_template"]}
    used |= {"thinking": None if config.data.thinking == "auto" else config.data.thinking}
    used |= {"dtype": None if config.train.target_dtype == "auto" else config.train.target_dtype}
    for line in doubts(config.data.path, used):
        _LOG.warning("%s", line)


def read_rows(config: Config, every: int = 1) -> tuple[Rows, Counter[str], dict[str, Any]]:
    """The rows of config.data (of every so manieth record), what was dropped, and what their features depend on. Reads
    the target's config and tokenizer; InputError where they do not fit the drafter or the data."""
    hf = loading.load_config(config.target, config.target_revision)
    read_family(hf)  # an unknown one is found before the weights are read
    text = hf.get_text_config()
    tokenizer = loading.load_tokenizer(config.target, revision=config.target_revision)
    stops = loading.load_stop_ids(config.target, hf, tokenizer, config.target_revision)
    pad = {text.pad_token_id, getattr(tokenizer, "pad_token_id", None)} - {None}
    config.drafter.check_target(
        num_layers=text.num_hidden_layers, vocab_size=text.vocab_size, special_ids={"eos": stops, "pad": tuple(pad)}
    )
    rows, dropped = load_rows(config.data.path, tokenizer, stops, config.data, text.vocab_size, every)
    identity = {
        "target": config.target,
        "target_revision": config.target_revision,
        "target_layer_ids": list(config.drafter.target_layer_ids),
        "tokenizer": _tokenizer_hash(tokenizer),
        "chat_template": template_hash(tokenizer),
        "thinking": config.data.thinking,
        "max_length": config.data.max_length,
    }
    return rows, dropped, identity


def _tokenizer_hash(tokenizer: Any) -> str | None:
    """Of everything that decides how a text is cut; None without a tokenizer."""
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
