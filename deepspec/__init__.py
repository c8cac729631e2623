"""deepspec: train and evaluate drafters for lossless speculative decoding.

The names below are the public contract; README.md shows them in use. Importing this package touches neither CUDA nor
the network, and transformers is imported when a target is first loaded.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "ConfigError": "checked", "InputError": "checked",
    "Config": "config", "DataConfig": "config", "LossConfig": "config", "TrainConfig": "config",
    "load_config": "config",
    "Sampling": "sampling",
    "Target": "modeling.target",
    "Batch": "modeling.drafter", "Drafter": "modeling.drafter", "Proposal": "modeling.drafter",
    "DFlashConfig": "modeling.dflash", "DSparkConfig": "modeling.dspark", "Eagle3Config": "modeling.eagle3",
    "load_drafter": "hub",
    "Generation": "eval.generate", "generate": "eval.generate",
    "verify": "eval.verify", "threshold": "eval.schedule", "verify_all": "eval.schedule",
    "throughput": "eval.throughput", "lagged": "eval.throughput", "load_profile": "eval.cost",
    "Objective": "train.objective", "fit": "train.loop",
}  # fmt: skip
__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from .checked import ConfigError, InputError
    from .config import Config, DataConfig, LossConfig, TrainConfig, load_config
    from .eval.cost import load_profile
    from .eval.generate import Generation, generate
    from .eval.schedule import threshold, verify_all
    from .eval.throughput import lagged, throughput
    from .eval.verify import verify
    from .hub import load_drafter
    from .modeling.dflash import DFlashConfig
    from .modeling.drafter import Batch, Drafter, Proposal
    from .modeling.dspark import DSparkConfig
    from .modeling.eagle3 import Eagle3Config
    from .modeling.target import Target
    from .sampling import Sampling
    from .train.loop import fit
    from .train.objective import Objective


def __getattr__(name: str) -> Any:
    """Public names are imported at first use, so that `import deepspec` is quick and command lines answer at once."""
    if name not in _HOME:
        raise AttributeError(f"module 'deepspec' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
