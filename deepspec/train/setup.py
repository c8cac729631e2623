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
from ..modeling.ends import Ends
from ..modeling.target import Target
from ..provenance import provenance
from . import init


@dataclass(frozen=True)
class Setup:
    """The parts of a run."""

    config: Config
    data: TrainingData
    target: Target | Ends
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
            "data": {"rows": len(self.data.rows), "dropped": dict(self.data.dropped), "manifests": manifests}
            | ({} if self.data.cache is None else {"cache": self.data.cache.manifest.summary()}),
            "versions": provenance(),
        }


def prepare(config: Config) -> Setup:
    """Check everything, then read the target and build the drafter. InputError says what is wrong."""
    train = config.train
    init.check(train.init)
    loading.pick_device(train.device)  # one that is not there is found before anything is read
    data = training_data(config)
    target = data.load_target()
    drafter = build_drafter(config, target)
    started = init.warm_start(drafter, target, train.init)
    return Setup(config, data, target if data.cache is None else Ends.of(target), drafter, started)


def build_drafter(config: Config, target: Target | Ends) -> Drafter:
    """A fresh drafter with float32 weights on the target's device; the weights depend on config.seed only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        drafter = config.drafter.build(target.spec, target.vocab)
    drafter = drafter.to(device=target.device, dtype=torch.float32)
    drafter.attention = config.train.attention
    return drafter
