"""What a run is made of: rows, target, drafter. All input is checked before the target's weights are read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..config import Config, as_dict
from ..data.training import TrainingData, training_data
from ..modeling import loading
from ..modeling.drafter import Drafter
from ..modeling.families import read_family
from ..modeling.target import Target
from ..provenance import provenance
from . import init


@dataclass(frozen=True)
class Setup:
    """The parts of a run."""

    config: Config
    data: TrainingData
    target: Target
    drafter: Drafter
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
            "data": {"rows": len(self.data.rows), "dropped": dict(self.data.dropped), "manifests": manifests},
            "versions": provenance(),
        }


def prepare(config: Config) -> Setup:
    """Check everything, then read the target and build the drafter. InputError says what is wrong."""
    train = config.train
    init.check(train.init)
    device = loading.pick_device(train.device)
    hf = loading.load_config(config.target, config.target_revision)
    read_family(hf)  # an unknown one is found before the weights are read
    text = hf.get_text_config()
    tokenizer = loading.load_tokenizer(config.target, revision=config.target_revision)
    stops = loading.load_stop_ids(config.target, hf, tokenizer, config.target_revision)
    pad = {text.pad_token_id, getattr(tokenizer, "pad_token_id", None)} - {None}
    config.drafter.check_target(
        num_layers=text.num_hidden_layers, vocab_size=text.vocab_size, special_ids={"eos": stops, "pad": tuple(pad)}
    )
    data = training_data(config, tokenizer, stops, text.vocab_size)
    target = Target.load(config.target, device=str(device), dtype=train.target_dtype, revision=config.target_revision)
    drafter = build_drafter(config, target)
    return Setup(config, data, target, drafter, init.warm_start(drafter, target, train.init))


def build_drafter(config: Config, target: Target) -> Drafter:
    """A fresh drafter with float32 weights on the target's device; the weights depend on config.seed only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        drafter = config.drafter.build(target.spec, target.vocab)
    drafter = drafter.to(device=target.device, dtype=torch.float32)
    drafter.attention = config.train.attention
    return drafter
