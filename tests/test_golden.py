"""Golden cases made by the reference implementation, through the public contract only (tests/golden, facts of each in
meta.json). Letters: B rows, A anchors, G slots, V vocabulary."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import deepspec

HERE = Path(__file__).parent / "golden"
CASES = ("dspark_qwen3_vanilla", "dspark_qwen3_gated", "dspark_qwen3_rnn", "dflash_qwen3")


class Case:
    def __init__(self, name: str) -> None:
        self.meta = json.loads((HERE / name / "meta.json").read_text())
        self.inputs = load_file(HERE / name / "inputs.safetensors")
        self.expected = load_file(HERE / name / "expected.safetensors")
        self.target = deepspec.Target.load(str(HERE / name / "target"))
        self.drafter = deepspec.load_drafter(HERE / name / "drafter", self.target)
        i = self.inputs
        self.batch = deepspec.Batch(
            i["input_ids"], i["loss_mask"].bool(), i["target_hidden_states"], i["target_last_hidden_states"]
        )
        self.anchors, self.real = i["anchor_positions"], i["block_keep_mask"].bool()
        self.mask = self.expected["eval_mask"].bool()
        at = self.anchors[..., None] + torch.arange(self.drafter.num_slots)
        self.prev = i["input_ids"].gather(1, at.flatten(1).clamp(max=i["input_ids"].shape[1] - 1)).view_as(at)


@pytest.fixture(scope="module", params=CASES)
def case(request) -> Case:
    return Case(request.param)


def test_settings_are_read_from_the_checkpoint(case):
    """A DeepSpec checkpoint says what it is: slots, layers, mask, kind of head."""
    c, meta = case.drafter.config, case.meta
    assert case.drafter.num_slots == c.block_size == meta["block_size"]
    assert list(c.target_layer_ids) == meta["target_layer_ids"] and c.mask_token_id == meta["mask_token_id"]
    assert case.drafter.has_confidence == ("confidence_logits" in case.expected)
    assert getattr(c, "markov_head_type", None) == meta.get("markov_head_type")


def test_target_reproduces_features_and_hidden(case):
    """features and hidden of our target are the reference's target_hidden_states and target_last_hidden_states; with
    attention_mask giving each row's length."""
    counts = case.inputs["attention_mask"].sum(1) if "attention_mask" in case.inputs else [case.batch.tokens.shape[1]] * 2
    features, hidden = case.target.features(case.batch.tokens, counts, case.drafter.config.target_layer_ids)
    real = torch.arange(features.shape[1]) < torch.as_tensor(counts)[:, None]
    torch.testing.assert_close(features[real], case.batch.features[real], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(hidden[real], case.batch.hidden[real], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_logits_and_confidence(case):
    """Slot logits and confidence logits at the given anchors, to 1e-5."""
    hidden = case.drafter.hidden(case.batch, case.anchors)
    logits = case.drafter.logits(hidden, case.prev)
    assert case.mask.sum() > 20
    assert (logits - case.expected["draft_logits"])[case.mask].abs().max() < 1e-5
    if case.drafter.has_confidence:
        confidence = case.drafter.confidence(hidden, case.prev)
        assert (confidence - case.expected["confidence_logits"])[case.mask].abs().max() < 1e-5


def objective(case, **changes):
    loss = case.meta["loss"]
    weights = dict(ce=loss["ce"], tv=loss["tv_l1"], confidence=loss["confidence"] if case.drafter.has_confidence else 0.0)
    decay = math.exp(-1 / loss["decay_gamma"])
    config = deepspec.LossConfig(**{**weights, "slot_decay": decay, "chunk": 4, **changes})
    total, weight, metrics = deepspec.Objective(case.drafter, config)(case.batch, anchors=(case.anchors, case.real))
    return total / weight, metrics


def test_loss_and_gradients(case):
    """The mean loss to 1e-5, every gradient given to 1e-4 of its largest entry."""
    case.drafter.zero_grad()
    loss, _ = objective(case)
    assert abs(loss - case.expected["loss"]) < 1e-5
    loss.backward()
    parameters = dict(case.drafter.named_parameters())
    given = {k.removeprefix("grad."): v for k, v in case.expected.items() if k.startswith("grad.")}
    assert len(given) >= 5
    for name, gradient in given.items():
        error = (parameters[name].grad - gradient).abs().max() / gradient.abs().max()
        assert error < 1e-4, f"{name}: {error:.1e}"


def test_each_term_of_the_loss(case):
    """Each term alone: its weighted mean is the reference's, L1 not halved."""
    with torch.no_grad():
        assert abs(objective(case, ce=1.0, tv=0.0, confidence=0.0)[0] - case.expected["ce_loss"]) < 1e-5
        if case.meta["loss"]["tv_l1"]:  # the reference leaves terms of weight 0 out
            assert abs(objective(case, ce=0.0, tv=1.0, confidence=0.0)[0] - case.expected["tv_l1_loss"]) < 1e-5
        if case.drafter.has_confidence:
            both = objective(case, ce=1.0, tv=0.0, confidence=1.0)[0]
            assert abs(both - case.expected["ce_loss"] - case.expected["confidence_loss"]) < 1e-5


def test_acceptance_metrics(case):
    """accept@g is the mean of the reference's accept_rate over the supervised slots of index g."""
    with torch.no_grad():
        metrics = objective(case)[1]
    rate = torch.where(case.mask, case.expected["accept_rate"], 0).sum((0, 1))
    for g in range(case.drafter.num_slots):
        total, count = metrics[f"accept@{g}"]
        assert count == case.mask[..., g].sum()
        assert abs(total - rate[g]) < 1e-4


@torch.no_grad()
def test_first_block(case):
    """The first greedy block after the decode prompt: tokens, and the law they were drawn from."""
    prompt, first = case.inputs["decode_prompt"], case.inputs["decode_first_token"]
    state = case.drafter.new_state(1, 64)
    following = torch.cat([prompt[:, 1:], first], 1)
    case.drafter.observe(state, case.inputs["decode_context_hidden"], following, [prompt.shape[1]])
    coins = torch.full((1, case.drafter.num_slots), 0.5, dtype=torch.float64)
    greedy = case.drafter.propose(state, deepspec.Sampling(), coins)
    assert greedy.tokens.tolist() == case.expected["first_block_tokens"].tolist()
    # teacher-forced by the greedy tokens, the law at temperature 1 is the softmax of the reference's logits
    law = case.drafter.propose(state, deepspec.Sampling(temperature=1.0), coins).probs[:, 0]
    if case.meta.get("markov_head_type") is None:
        whole = case.drafter.propose(state, deepspec.Sampling(temperature=1.0), coins).probs
        torch.testing.assert_close(whole, case.expected["first_block_logits"].softmax(-1), atol=1e-5, rtol=0)
    torch.testing.assert_close(law, case.expected["first_block_logits"][:, 0].softmax(-1), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "key, schedule",
    [
        ("decode", deepspec.verify_all),
        ("decode", lambda: deepspec.threshold(0.0)),
        ("decode_threshold_0.5", lambda: deepspec.threshold(0.5)),
    ],
    ids=["all", "threshold-0", "threshold-0.5"],
)
def test_greedy_decoding(case, key, schedule):
    """Output ids, and verified and accepted of every round before the one that reaches the budget (the reference's loop
    overshoots it; its acceptance lengths include the bonus). Without a confidence head a threshold cuts nothing."""
    told = case.meta[key if case.drafter.has_confidence else "decode"]
    budget, prompt = told["max_new_tokens"], told["prompt"]
    (out,) = deepspec.generate(case.target, case.drafter, [prompt], max_new_tokens=budget, schedule=schedule())
    assert prompt + out.tokens == told["output_ids"] == case.meta["greedy_ids"]
    committed, whole = 1, []
    for verified, length in zip(told["proposal_lengths"], told["acceptance_lengths"]):
        if committed + length >= budget:
            break
        committed += length
        whole.append((verified, length - 1))
    assert len(whole) >= 5 and out.rounds[: len(whole)] == whole
    assert len(out.rounds) == len(whole) + 1
    accepted = told["acceptance_lengths"][len(whole)] - 1
    assert out.rounds[-1][1] == min(accepted, budget - committed)
