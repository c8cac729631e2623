"""Where a drafter's weights start: at random, from the target's last layers, or from another drafter."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checked import InputError
from ..config import Config
from ..data.rows import Rows
from ..hub.files import find_drafter, read_tensors
from ..modeling import draft_vocab
from ..modeling.drafter import Drafter
from ..modeling.ends import Ends
from ..modeling.target import Target
from ..modeling.vocab import Vocab


def check(init: str) -> None:
    """InputError where `init` names no drafter; costs nothing, so that it may come before the target's weights."""
    if init not in ("random", "target"):
        find_drafter(init)


def vocabulary(config: Config, vocab: Vocab, rows: Rows) -> Vocab:
    """What a new drafter drafts from: of the target's tokens those that `rows` supervise most, or those that the
    drafter it starts from drafts, with its head, where they are as many."""
    size = config.drafter.draft_vocab_size
    if size is not None and config.train.init not in ("random", "target"):
        theirs = draft_vocab.from_tensors(vocab, read_tensors(find_drafter(config.train.init)))
        if theirs.draft_size == size:
            return theirs
    return draft_vocab.for_training(
        vocab, size, ((rows.tokens_of(i).tolist(), rows.mask_of(i).tolist()) for i in range(len(rows)))
    )


@torch.no_grad()
def warm_start(drafter: Drafter, target: Target | Ends, init: str) -> list[str]:
    """Copy into a fresh drafter what `init` offers and what fits by name and shape. Returns what was done, a line each.

    InputError where another drafter has nothing that fits.
    """
    if init == "random":
        return []
    own = drafter.state_dict()
    if init == "target":
        assert isinstance(target, Target)
        offered = from_target(drafter, target)
    else:
        offered = _from_drafter(init)
    copied = {name for name, (value, _) in offered.items() if name in own and own[name].shape == value.shape}
    if not copied:
        raise InputError(f"train.init {init!r} has no tensor that fits this drafter")
    for name in copied:
        own[name].copy_(offered[name][0])
    sources: dict[str, list[str]] = {}
    for name in own:
        if name in copied:
            sources.setdefault(offered[name][1], []).append(name)
    lines = [f"{len(names)} tensors from {source}: {_brief(names)}" for source, names in sources.items()]
    rest = [name for name in own if name not in copied]
    return [*lines, f"{len(rest)} tensors start fresh: {_brief(rest)}"] if rest else lines


def from_target(drafter: Drafter, target: Target) -> dict[str, tuple[Tensor, str]]:
    """What a target offers a drafter: {name in the drafter: (tensor, where it is from)}.

    Of the target's layers the last ones that fit best: where kinds of layers differ in shape, the kind the drafter has.
    """
    own, (layers, norm) = drafter.state_dict(), target.weights()
    numbers = sorted({int(name.split(".")[1]) for name in own if name.startswith("layers.")})

    def fit(index: int) -> int:
        return sum(own.get(f"layers.0.{k}", torch.empty(0)).shape == v.shape for k, v in layers[index].items())

    best = sorted(sorted(range(len(layers)), key=lambda i: (fit(i), i))[-len(numbers) :])
    offered = {
        f"layers.{i}.{name}": (value, f"target layer {index}")
        for i, index in zip(numbers, best)
        for name, value in layers[index].items()
    }
    offered |= {f"norm.{name}": (value, "the target's final norm") for name, value in norm.items()}
    if "fc.weight" in own:
        width, inputs = own["fc.weight"].shape
        tapped = len(drafter.config.target_layer_ids)
        if width * tapped == inputs:  # a drafter as wide as its target
            select = torch.zeros(width, inputs)
            select[:, -width:].fill_diagonal_(1.0)
            offered["fc.weight"] = (select, f"the selection of layer {drafter.config.target_layer_ids[-1]}")
    return offered


def _from_drafter(path: str) -> dict[str, tuple[Tensor, str]]:
    folder = find_drafter(path)
    return {name: (value, str(folder)) for name, value in read_tensors(folder).items()}


def _brief(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
