"""Laws of a known log Z: the objective is the same, and the target's logits over all tokens are never formed.

Letters: B rows, T positions, D hidden, V the target's tokens, Vd the kept ones, N positions.
"""

import dataclasses

import pytest
import torch
from helpers import LAYERS, V, clone, make_batch, make_drafter, randomize, target
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepspec import Batch, Eagle3Config, LossConfig, Objective
from deepspec.modeling import draft_vocab
from deepspec.modeling import vocab as vocab_module
from deepspec.modeling.drafter import Drafter
from deepspec.modeling.vocab import Vocab
from deepspec.train import compiling

KEPT = torch.tensor([0, 2, 3, 7, 11, 12, 20, 22, 31, 38])
LOSS = LossConfig(ce=0.1, kl=0.3, tv=0.9, slot_decay=0.8, chunk=7)
VOCABS = ("full", "full, own head", "reduced", "reduced, own head")
vocabs = pytest.mark.parametrize("which", VOCABS)
caps = pytest.mark.parametrize("softcap", [None, 3.0])


def vocab_of(which: str, softcap: float | None = None, dtype: torch.dtype = torch.float32) -> Vocab:
    """Of the tiny target, all of it or reduced, with the target's rows as head or with one of a drafter's own."""
    whole = target().vocab
    embedding, head = whole.embedding.detach().to(dtype), whole.head.detach().to(dtype)
    whole = Vocab(embedding, head, softcap=softcap)
    kept = KEPT if which.startswith("reduced") else torch.arange(V)
    own = torch.randn(len(kept), whole.dim, generator=torch.Generator().manual_seed(4)) if "own" in which else None
    return draft_vocab.reduce(whole, kept, own)


def make(kind: str, vocab: Vocab) -> Drafter:
    size = vocab.draft_size if vocab.kept is not None else None
    if kind == "eagle3":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            drafter = Eagle3Config(block_size=4, target_layer_ids=LAYERS, draft_vocab_size=size).build(
                target().spec, vocab
            )
            randomize(drafter)
        return drafter.to(vocab.head.dtype)
    tgt = clone(target())
    tgt.vocab = vocab
    return make_drafter(kind, tgt, draft_vocab_size=size)


def batches(vocab: Vocab) -> tuple[Batch, Batch]:
    """Without log Z, and with it where the next token supervises: elsewhere no cache knows it."""
    batch, dtype = make_batch(target(), rows=3), vocab.head.dtype
    batch = dataclasses.replace(batch, features=batch.features.to(dtype), hidden=2 * batch.hidden.to(dtype))
    log_z = vocab.log_z(batch.hidden.flatten(0, 1)).view(batch.tokens.shape)
    log_z = log_z.where(batch.loss_mask.roll(-1, 1), torch.nan)
    log_z[:, -1] = torch.nan
    return batch, dataclasses.replace(batch, log_z=log_z)


def learn(objective: Objective, batch: Batch) -> dict[str, Tensor]:
    """Loss a weight, every metric, every gradient."""
    objective.drafter.zero_grad()
    loss, weight, metrics = objective(batch)
    (loss / weight).backward()
    found = {name: total / count for name, (total, count) in metrics.items()}
    found |= {f"d {name}": p.grad for name, p in objective.drafter.named_parameters() if p.grad is not None}
    return {"loss": (loss / weight).detach(), **found}


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    """Relative to the largest entry of each."""
    assert ours.keys() == theirs.keys()
    for name, want in theirs.items():
        assert (ours[name] - want).abs().max() <= tolerance * want.abs().max().clamp(min=1e-3), name


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str)
@caps
@vocabs
@pytest.mark.parametrize("kind", ["dflash", "vanilla", "rnn", "eagle3"])
def test_a_known_log_z_changes_nothing(kind, which, softcap, dtype, tolerance):
    """Loss, metrics and gradients are those of the teacher over all tokens, whatever is kept, with whichever head; and
    they depend on it: the log Z of the position before is another loss."""
    vocab = vocab_of(which, softcap, dtype)
    objective, (without, known) = Objective(make(kind, vocab), LOSS), batches(vocab)
    want = learn(objective, without)
    close(learn(objective, known), want, tolerance)
    moved = learn(objective, dataclasses.replace(known, log_z=known.log_z.nan_to_num(3.0).roll(1, 1)))
    assert (moved["loss"] - want["loss"]).abs() > 1e-3


def test_bfloat16_and_compiled_blocks():
    """Under autocast with a bfloat16 head, and with blocks through a compiler: the loss without it to 1e-4, for the
    logits that log Z is of are rounded alike."""
    vocab = vocab_of("reduced", None, torch.bfloat16)
    drafter = make("vanilla", vocab).float()
    without, known = batches(vocab)
    plain = Objective(drafter, LOSS)
    compiled = Objective(drafter, LOSS, torch.compile(compiling.block_terms, dynamic=True, backend="eager"))
    with torch.autocast("cpu", torch.bfloat16):
        want = plain(without)[0]
        for objective in (plain, compiled):
            torch.testing.assert_close(objective(known)[0], want, rtol=1e-4, atol=0)


class Widths(TorchDispatchMode):
    """The last dimension of every matrix computed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            self.found |= {x.shape[-1]} if isinstance(x, Tensor) and x.dim() == 2 else set()
        return result


@caps
@pytest.mark.parametrize("which", VOCABS[2:])
@pytest.mark.parametrize("kind", ["vanilla", "eagle3"])
def test_nothing_is_as_wide_as_the_vocabulary(kind, which, softcap):
    """In forward and backward pass, where log Z is known; without it the teacher's logits are."""
    vocab = vocab_of(which, softcap)
    objective = Objective(make(kind, vocab), LOSS)
    for batch, wide in zip(batches(vocab), (True, False), strict=True):
        with Widths() as widths:
            learn(objective, batch)
        assert (V in widths.found) == wide and len(KEPT) in widths.found


@caps
@vocabs
@pytest.mark.parametrize("at_once", [(1, 1), (3, 2), (100, 3), (100, 100)], ids=str)
def test_log_z_and_the_kept_logits_make_the_target_s_law(which, softcap, at_once, monkeypatch):
    """Whatever head a drafter has, and however many rows are worked on at once."""
    vocab, hidden = vocab_of(which, softcap), torch.randn(8, target().spec.dim)
    monkeypatch.setattr(vocab_module, "_LOGITS_BYTES", 4 * V * at_once[0])
    monkeypatch.setattr(vocab_module, "_SUM_BYTES", {"cpu": 4 * V * at_once[1]})
    law = target().vocab.logits(hidden)
    law = (law if softcap is None else softcap * (law / softcap).tanh()).softmax(-1)
    found = (vocab.kept_logits(hidden) - vocab.log_z(hidden)[:, None]).exp()
    torch.testing.assert_close(found, law if vocab.kept is None else law[:, KEPT], atol=1e-6, rtol=1e-5)
    assert vocab.log_z(hidden[:0]).shape == (0,) and vocab.log_z(hidden).dtype == torch.float32


@vocabs
def test_the_target_s_rows_are_held_once(which):
    """They are the target's head, or what a drafter drafts with; copied only where that is neither, and once."""
    vocab = vocab_of(which)
    rows = {"full": vocab.head, "full, own head": vocab.head, "reduced": vocab.draft_head}.get(which)
    if rows is None:
        assert vocab._kept_head is None, "made before it is needed"
        rows = vocab.kept_head
    assert vocab.kept_head is rows and not [n for n in vocab.state_dict() if "kept_head" in n]
