"""Naive twins: the same results by the shortest route, whatever it costs. Used by tests and benchmarks."""

import torch
from torch import Tensor
from torch.nn import functional as F

from deepspec.config import LossConfig
from deepspec.modeling.drafter import Batch, Drafter, gather_slots
from deepspec.modeling.vocab import Vocab


def naive_divergence(
    h: Tensor, r: Tensor, w2: Tensor, vocab: Vocab, teacher: Tensor, label: Tensor, weight: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """h [N, D], r [N, R], w2 [V, R], teacher [N, D] (one row a slot) -> weighted loss, accept [N]; plain autograd."""
    logits = vocab.logits(h).float() + (F.linear(r, w2).float() if w2.numel() else 0)
    log_q = logits.log_softmax(-1)
    p = vocab.logits(teacher).float().softmax(-1)
    l1 = (log_q.exp() - p).abs().sum(-1)
    ce = -log_q.gather(-1, label[:, None])[:, 0]
    kl = -(p * log_q).sum(-1)
    loss = ((config.ce * ce + config.kl * kl + config.tv * l1) * weight).sum()
    return loss, 1 - l1.detach() / 2


def naive_objective(
    drafter: Drafter, config: LossConfig, batch: Batch, anchors: Tensor, real: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Slot by slot in plain loops over the mask; loss, weight, accept [B, A, G], mask [B, A, G]."""
    (B, T), G = batch.tokens.shape, drafter.num_slots
    mask = torch.zeros(*anchors.shape, G, dtype=torch.bool)
    for b in range(B):
        for a in range(anchors.shape[1]):
            for g in range(G):
                at = int(anchors[b, a]) + g
                alive = bool(real[b, a]) and at + 1 < T and bool(batch.loss_mask[b, at + 1])
                alive = alive and batch.documents[b, at + 1] == batch.documents[b, anchors[b, a]]
                if not alive:
                    break
                mask[b, a, g] = True
    at = anchors[..., None] + torch.arange(G)
    hidden = drafter.hidden(batch, anchors)
    prev, label = gather_slots(batch.tokens, at), gather_slots(batch.tokens, at + 1)
    log_q = drafter.logits(hidden, prev).log_softmax(-1)
    p = drafter.vocab.logits(gather_slots(batch.hidden, at)).softmax(-1)
    l1 = (log_q.exp() - p).abs().sum(-1)
    accept = 1 - l1.detach() / 2
    loss = config.ce * -log_q.gather(-1, label[..., None])[..., 0] - config.kl * (p * log_q).sum(-1) + config.tv * l1
    if config.confidence:
        guess = drafter.confidence(hidden, prev)
        loss = loss + config.confidence * F.binary_cross_entropy_with_logits(guess, accept, reduction="none")
    weight = config.slot_decay ** torch.arange(G) * mask
    if config.reduce == "document":
        document = batch.documents.gather(1, anchors)
        shares = torch.zeros_like(weight)
        groups = {(b, int(d)) for b in range(B) for d, m in zip(document[b], mask[b].any(-1)) if m}
        for b, d in groups:
            mine = (document == d)[..., None] & mask & (torch.arange(B) == b)[:, None, None]
            shares = torch.where(mine, weight / (weight * mine).sum(), shares)
        return (torch.where(mask, loss, 0) * shares).sum(), torch.tensor(float(len(groups))), accept, mask
    return (torch.where(mask, loss, 0) * weight).sum(), weight.sum(), accept, mask
