"""What a run is made of: rows, target, drafter. All input is checked before the target's weights are read."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..config import Config, as_dict
from ..data.prompts import Prompt
from ..data.training import TrainingData, training_data
from ..hub.files import read_tensors
from ..modeling import draft_vocab, loading
from ..modeling.drafter import Drafter
from ..modeling.ends import Ends
from ..modeling.target import Target
from ..modeling.vocab import Vocab
from ..provenance import provenance
from . import init
from .checkpoint import Saved
from .trackers import find
from .validate import read_prompts


@dataclass(frozen=True)
class Setup:
    """The parts of a run."""

    config: Config
    data: TrainingData
    identity: dict[str, Any]
    """What tells the data from others: the number of rows, and a hash of them in their order."""
    target: Target | Ends
    drafter: Drafter
    prompts: list[tuple[Prompt, int]]
    """Held-out ones to decode while training, each with its seed."""
    started: list[str]
    """Where the drafter's weights came from, a line each; empty: at random."""

    @property
    def settings(self) -> dict[str, Any]:
        return as_dict(self.config)

    def provenance(self) -> dict[str, Any]:
        """What every saved drafter says about its origin."""
        manifests = {}
        for path in self.config.data.path:
            manifest = Path(path + ".manifest.json")
            manifests[path] = json.loads(manifest.read_text()) if manifest.is_file() else None
        return {
            "target": {
                "name": self.config.target,
                "revision": self.config.target_revision,
                "dtype": str(self.target.dtype),
            },
            "settings": self.settings,
            "init": self.started,
            "data": {**self.identity, "dropped": dict(self.data.dropped), "manifests": manifests}
            | ({} if self.data.cache is None else {"cache": self.data.cache.manifest.summary()}),
            "versions": provenance(),
        }


def prepare(config: Config, device: torch.device, saved: Saved | None = None) -> Setup:
    """Check everything, then read the target and build the drafter, with the weights of `saved` where there is one.
    InputError says what is wrong."""
    train = config.train
    if saved is None:
        init.check(train.init)
    for name in train.trackers:
        find(name)
    source = functools.partial(loading.load_tokenizer, config.target, revision=config.target_revision)
    prompts = read_prompts(config.validate, source, config.data.thinking)
    data = training_data(config)
    digest = hashlib.blake2b(data.rows.keys().tobytes(), digest_size=8).hexdigest()
    identity = {"rows": len(data.rows), "digest": digest}
    if saved is not None:
        saved.check_data(identity)
    target = data.load_target(device)
    if saved is not None:
        tensors = read_tensors(saved.path)
        drafter = build_drafter(config, target, draft_vocab.from_tensors(target.vocab, tensors))
        drafter.load_state_dict(tensors)
        started = saved.drafter.get("init", [])
    else:
        drafter = build_drafter(config, target, init.vocabulary(config, target.vocab, data.rows))
        started = init.warm_start(drafter, target, train.init)
    kept = target if data.cache is None or prompts else Ends.of(target)
    return Setup(config, data, identity, kept, drafter, prompts, started)


def build_drafter(config: Config, target: Target | Ends, vocab: Vocab | None = None) -> Drafter:
    """A fresh drafter with float32 weights on the target's device; the weights depend on config.seed only. vocab: what
    it drafts from, where that is not all of the target's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        drafter = config.drafter.build(target.spec, target.vocab if vocab is None else vocab)
    drafter = drafter.to(device=target.device, dtype=torch.float32)
    drafter.attention = config.train.attention
    drafter.checkpoint_layers = config.train.checkpoint_layers
    return drafter
