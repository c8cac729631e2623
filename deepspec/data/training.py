"""All that training reads from disk besides the target: rows, and how they make up sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..config import Config
from ..modeling.target import Target
from .batches import Batches
from .features import Live
from .loader import Loader, load_rows, sequences
from .prompts import TokenizerSource
from .rows import Rows


@dataclass(frozen=True)
class TrainingData:
    """Usable rows, what was dropped by reason, and the sequences that training sees."""

    config: Config
    rows: Rows
    dropped: Counter[str]
    sequences: Sequence[tuple[int, ...]]
    """The rows of each."""

    def loader(self) -> Loader:
        return Loader(self.sequences, self.config.train.batch_size, self.config.seed)

    def batches(self, target: Target) -> Batches:
        """Makes the micro-batches of these rows."""
        source = Live(target, self.config.drafter.target_layer_ids, self.rows)
        return Batches(self.rows, source, target.device)


def training_data(
    config: Config, tokenizer: TokenizerSource, stop_ids: Collection[int], vocab_size: int
) -> TrainingData:
    """Read and check all of it, before the target's weights are read. InputError as in `load_rows`."""
    rows, dropped = load_rows(config.data.path, tokenizer, stop_ids, config.data, vocab_size)
    return TrainingData(config, rows, dropped, sequences(rows, config.data.pack_tokens, config.seed))
