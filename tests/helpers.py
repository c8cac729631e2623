"""Tiny random targets and drafters, batches of every shape, fake drafters, and a chi-square.

Letters: B rows, T positions, A anchors, G slots, L tapped layers, D hidden, V vocabulary.
"""

import contextlib
import copy
import functools
import itertools
import json

import torch
from torch import Tensor, nn

from deepspec import Batch, DFlashConfig, DSparkConfig, Objective, Proposal, Sampling, Target
from deepspec.modeling.drafter import Drafter, certain, gather_slots

V = 40
LAYERS = (0, 2)
MASK = V - 1

# -- targets -------------------------------------------------------------------------------------------------------

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 50000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = ("qwen3", "llama", "qwen2", "mistral")
GEMMA = dict(
    head_dim=8, sliding_window=5, final_logit_softcapping=4.0,
    layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
)  # fmt: skip
GEMMA4 = GEMMA | dict(
    global_head_dim=16, num_global_key_value_heads=1, attention_k_eq_v=True, hidden_size_per_layer_input=0
)


def hf_model(family: str = "qwen3", *, seed: int = 0, **changes):
    """A fresh transformers model with random weights, norms and biases included, in float32."""
    import transformers as t

    common = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=V, max_position_embeddings=256, tie_word_embeddings=False, pad_token_id=None, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    config, model = {
        "qwen3": (t.Qwen3Config, t.Qwen3ForCausalLM),
        "llama": (t.LlamaConfig, t.LlamaForCausalLM),
        "qwen2": (t.Qwen2Config, t.Qwen2ForCausalLM),
        "mistral": (t.MistralConfig, t.MistralForCausalLM),
        "gemma3": (t.Gemma3TextConfig, t.Gemma3ForCausalLM),
        "gemma4": (t.Gemma4TextConfig, t.Gemma4ForCausalLM),
    }[family]
    own = {
        "qwen3": dict(head_dim=16),
        "llama": dict(rope_parameters=LLAMA3, num_key_value_heads=4),
        "qwen2": {},
        "mistral": dict(sliding_window=6),
        "gemma3": GEMMA | dict(query_pre_attn_scalar=24),
        "gemma4": GEMMA4,
    }[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = model(config(**{**common, **own, **changes}))
        randomize(made)
    return made.eval()


def randomize(module: nn.Module, scale: float = 1.0) -> None:
    """Weights that make every part of a tiny model matter, so that no wrong term hides behind a one or a zero."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            if "norm" in name:
                p.copy_(1 + 0.3 * torch.randn(p.shape))
            elif "confidence_head.proj.weight" in name:
                p.normal_(0, 0.4)
            elif p.dim() < 2:
                p.normal_(0, 0.3)
            elif "embed" in name or "markov" in name:
                p.normal_(0, 0.7 * scale)
            elif "lm_head" in name:
                p.normal_(0, 0.3 * scale)
            else:
                p.normal_(0, p.shape[1] ** -0.5)
        for name, x in module.named_buffers():
            if "layer_scalar" in name:
                x.uniform_(0.5, 1.5)


@functools.cache
def target(family: str = "qwen3", **changes) -> Target:
    return Target(hf_model(family, **changes), name=f"tiny-{family}")


# -- drafters ------------------------------------------------------------------------------------------------------


def _config(kind, **own):
    common = dict(block_size=4, target_layer_ids=LAYERS, num_draft_layers=2, mask_token_id=MASK, num_anchors=5)
    return kind(**{**common, **own})


KINDS = {
    "dflash": (DFlashConfig, {}),
    "dflash-masks": (DFlashConfig, dict(sample_from_anchor=False, block_size=5)),
    "vanilla": (DSparkConfig, dict(markov_rank=6)),
    "gated": (DSparkConfig, dict(markov_rank=6, markov_head_type="gated")),
    "rnn": (DSparkConfig, dict(markov_rank=6, markov_head_type="rnn")),
    "rank0": (DSparkConfig, dict(markov_rank=0)),
    "no-confidence": (DSparkConfig, dict(markov_rank=6, confidence_head=False)),
    "confidence-alone": (DSparkConfig, dict(markov_rank=6, confidence_with_markov=False)),
    "rnn-masks": (DSparkConfig, dict(markov_rank=6, markov_head_type="rnn", sample_from_anchor=False, block_size=5)),
}
"""Every kind of drafter: the class of its settings, and what differs from the common ones. All have 4 slots."""
G = 4


def drafter_config(kind: str, **changes):
    cls, own = KINDS[kind]
    return _config(cls, **{**own, **changes})


def make_drafter(kind: str, tgt: Target, *, seed: int = 1, **changes) -> Drafter:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = drafter_config(kind, **changes).build(tgt.spec, tgt.vocab)
        randomize(drafter)
    return drafter.to(tgt.dtype).eval()


# -- batches -------------------------------------------------------------------------------------------------------


def make_batch(
    tgt: Target, *, rows: int = 2, length: int = 14, seed: int = 0, layers: int = len(LAYERS), **extra
) -> Batch:
    """Random tokens and random target states; all supervised but the first tokens of each row."""
    g = torch.Generator().manual_seed(seed)
    D = tgt.spec.dim
    mask = torch.rand(rows, length, generator=g) > 0.15
    mask[:, 0] = False
    return Batch(
        torch.randint(0, V - 1, (rows, length), generator=g),
        extra.pop("loss_mask", mask),
        torch.randn(rows, length, layers * D, generator=g),
        torch.randn(rows, length, D, generator=g),
        **extra,
    )


@torch.no_grad()
def read(tgt: Target, tokens: Tensor, counts=None, layers=LAYERS) -> tuple[Tensor, Tensor, Tensor]:
    """Features, hidden and logits of whole rows, through a session."""
    scored = tgt.open(len(tokens), tokens.shape[1], layers).score(tokens, counts)
    return scored.features, scored.hidden, scored.logits


# -- fake drafters ---------------------------------------------------------------------------------------------------


class FakeConfig:
    target_layer_ids = (0,)


class Planned(Drafter):
    """A drafter that knows each row's whole continuation and spoils chosen slots.

    `right(row_round, slot)` decides per round of a row and slot whether it proposes the target's own next token. It
    finds its place by the tokens it observed, so it works in any batch, row and order. Confidence is certain.
    """

    def __init__(self, tgt: Target, texts: list[list[int]], slots: int, right=lambda n, g: True) -> None:
        super().__init__()
        self.config = FakeConfig()
        object.__setattr__(self, "vocab", tgt.vocab)
        self.texts, self.slots, self.right = texts, slots, right
        self.observed: list[tuple[int, ...]] = []

    @property
    def num_slots(self) -> int:
        return self.slots

    rows_out = None

    def anchors(self, batch, seeds): ...
    def hidden(self, batch, anchors): ...
    def rows(self, hidden, prev): ...
    def confidence(self, hidden, prev):
        return certain(prev)

    def compile(self, **options): ...

    def new_state(self, rows, max_length):
        return {"seen": [[] for _ in range(rows)], "round": [0] * rows}

    def reset_rows(self, state, rows):
        for row in rows:
            state["seen"][row], state["round"][row] = [], 0

    def observe(self, state, features, next_tokens, counts):
        assert features.shape[:2] == next_tokens.shape
        for b, n in enumerate(counts):
            if n:
                state["round"][b] = state["round"][b] + 1 if state["seen"][b] else 0
                state["seen"][b] = state["seen"][b] + next_tokens[b, :n].tolist()

    def propose(self, state, sampling, uniforms, rows=None):
        B = len(state["seen"])
        assert uniforms.shape == (B, self.slots)
        tokens = torch.zeros(B, self.slots, dtype=torch.long)
        for b, seen in enumerate(state["seen"]):
            if not seen:
                continue
            text = next((t for t in self.texts if t[1 : len(seen) + 1] == seen), None)
            assert text is not None, "a row is no prefix of any known text: the row's history is wrong"
            ahead = [*text[len(seen) + 1 :], *[0] * self.slots][: self.slots]
            for g, token in enumerate(ahead):
                good = self.right(state["round"][b], g)
                tokens[b, g] = token if good else (token + 1) % self.vocab.size
        probs = nn.functional.one_hot(tokens, self.vocab.size).float()
        return Proposal(tokens, probs, torch.ones(B, self.slots))


# -- chance ----------------------------------------------------------------------------------------------------------


def chi_square_p(counts: Tensor, law: Tensor) -> float:
    """P value of counts [K] under law [K]; cells expected fewer than 5 times are pooled. A count in a cell of
    probability 0 gives 0."""
    from scipy.stats import chi2

    counts, law = counts.double(), law.double() / law.sum()
    if (counts[law == 0] > 0).any():
        return 0.0
    expected = law * counts.sum()
    order = expected.argsort()
    counts, expected = counts[order], expected[order]
    small = expected < 5
    pooled_c = torch.cat([counts[small].sum()[None], counts[~small]])
    pooled_e = torch.cat([expected[small].sum()[None], expected[~small]])
    keep = pooled_e > 0
    statistic = ((pooled_c[keep] - pooled_e[keep]) ** 2 / pooled_e[keep]).sum().item()
    return float(chi2.sf(statistic, max(1, int(keep.sum()) - 1)))


@torch.no_grad()
def exact_law(tgt: Target, prompt: list[int], length: int, sampling: Sampling) -> Tensor:
    """[V] * length: the target's law of the next `length` tokens, by scoring every sequence of them."""
    size = tgt.vocab.size
    law = torch.ones(1, dtype=torch.float64)
    for n in range(length):
        prefixes = torch.tensor([[*prompt, *p] for p in itertools.product(range(size), repeat=n)])
        logits = tgt.model(prefixes).logits[:, -1]
        law = (law[:, None] * sampling.probs(logits).double()).flatten()
    return law.view(*[size] * length)


@contextlib.contextmanager
def changed(tensor: Tensor, index, by: float = 1.0):
    """A copy of `tensor` with something else at `index`."""
    other = tensor.clone()
    other[index] = other[index] + by
    yield other


@torch.no_grad()
def recites(drafter: Drafter, batch: Batch) -> bool:
    """Whether the best token of every supervised slot is the one that follows in the batch."""
    anchors, real = drafter.anchors(batch, torch.zeros(len(batch.tokens), dtype=torch.long))
    at = anchors[..., None] + torch.arange(drafter.num_slots)
    best = drafter.logits(drafter.hidden(batch, anchors), gather_slots(batch.tokens, at)).argmax(-1)
    inside = at + 1 < batch.tokens.shape[1]
    supervised = real[..., None] & inside & gather_slots(batch.loss_mask, at + 1)
    return bool((best == gather_slots(batch.tokens, at + 1))[supervised].all())


def by_heart(drafter: Drafter, loss, batch: Batch, *, lr: float, steps: int) -> Drafter:
    """`drafter` trained on one batch until it knows it by heart, at most for `steps` optimiser steps; the rate falls to
    0 over the second half of them."""
    objective = Objective(drafter, loss)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=lr, weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1, 2 - 2 * step / steps)
        total, weight, _ = objective(batch)
        optimizer.zero_grad()
        (total / weight).backward()
        optimizer.step()
        if step % 10 == 9 and recites(drafter, batch):
            break
    return drafter.eval()


def clone(module):
    return copy.deepcopy(module)


# -- whole runs ------------------------------------------------------------------------------------------------------


def write_jsonl(path, records) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(path)


def token_rows(n: int, *, length: int = 20, seed: int = 0) -> list[dict]:
    """n token rows of different lengths, mostly answer."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda k: torch.randint(0, V - 1, (k,), generator=g).tolist()  # noqa: E731
    return [{"prompt_ids": draw(2 + i % 3), "answer_ids": draw(length - i % 5)} for i in range(n)]


CONFIG = """
import deepspec

config = deepspec.Config(
    target={target!r},
    drafter=deepspec.DSparkConfig(
        block_size=4, target_layer_ids=(0, 2), num_draft_layers=1, mask_token_id=39, num_anchors=6, markov_rank=4
    ),
    loss=deepspec.LossConfig(ce=0.1, tv=0.9, confidence=1.0, slot_decay=0.8, chunk=32),
    data=deepspec.DataConfig(path={data!r}, min_supervised=4),
    train=deepspec.TrainConfig(
        lr=3e-3, max_steps=6, batch_size=4, micro_batch=2, log_every=1, save_every=100, precision="fp32", device="cpu"
    ),
    out={out!r},
    seed=3,
)
"""


def write_run(folder, *, rows=None, family: str = "qwen3", **changes):
    """A saved target, token rows and a config file in `folder`; returns the config file."""
    import contextlib as c
    import io

    if not (folder / "target").exists():
        with c.redirect_stderr(io.StringIO()):  # a progress bar
            hf_model(family, **changes).save_pretrained(folder / "target")
    data = write_jsonl(folder / "rows.jsonl", token_rows(10) if rows is None else rows)
    file = folder / "run.py"
    file.write_text(CONFIG.format(target=str(folder / "target"), data=(data,), out=str(folder / "out")))
    return file
