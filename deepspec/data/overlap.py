"""Whether a prompt is, or holds, a prompt of a benchmark: what is measured on must not be trained on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

RUN = 13
"""Words in a row that two texts share by chance hardly ever."""
COMMON = 3
"""A run in so many benchmark prompts is part of their frame ("put your final answer within..."), not of a question."""


class Overlap:
    """Of `texts`, every run of RUN words; of a shorter text, all its words. Case, signs and spacing do not count."""

    def __init__(self, texts: Iterable[str]) -> None:
        texts = list(dict.fromkeys(texts))
        self._whole = {tuple(words) for text in texts if (words := _words(text))}
        counts = Counter(run for text in texts for run in set(_runs(_words(text))))
        self._runs = {run for run, count in counts.items() if count < COMMON}

    def __contains__(self, text: str) -> bool:
        words = _words(text)
        return tuple(words) in self._whole or not self._runs.isdisjoint(_runs(words))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _runs(words: Sequence[str]) -> Iterable[str]:
    return (" ".join(words[i : i + RUN]) for i in range(len(words) - RUN + 1))
