"""Target families: our block is transformers' layer, our sessions are its forward pass, golden values come out.

Tiny random models with one thread; nothing here is left to chance, every seed is fixed.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import deepspec
from deepspec.checked import InputError
from deepspec.hub.files import read_config
from deepspec.hub.load import read_spec
from deepspec.modeling.drafter import gather_slots
from deepspec.modeling.families import read_family
from deepspec.modeling.layers import Block, Rotary
from deepspec.modeling.loading import load_vocab
from deepspec.modeling.target import Target
from deepspec.train.init import warm_start

GOLDEN = Path(__file__).parent / "golden" / "dspark_gemma4_vanilla"
V, D, LAYERS = 61, 32, 6
SMALL = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.15,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
PATTERN = ["sliding_attention", "sliding_attention", "full_attention"] * 2
GEMMA4 = {
    "layer_types": PATTERN, "sliding_window": 5, "global_head_dim": 16, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 2.0,
}  # fmt: skip
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
TEXT = {
    "qwen3": ("qwen3", {}),
    "qwen3_yarn": ("qwen3", {"rope_parameters": YARN}),
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"head_dim": 8}),
    "mistral_windowed": ("mistral", {"sliding_window": 5}),
    "gemma3": (
        "gemma3_text",
        {"layer_types": PATTERN, "sliding_window": 5, "query_pre_attn_scalar": 24, "final_logit_softcapping": 2.0},
    ),
    "gemma4": ("gemma4_text", GEMMA4),
    "gemma4_own_values": ("gemma4_text", {**GEMMA4, "attention_k_eq_v": False}),
    "gemma4_unified": (
        "gemma4_unified_text",
        {k: v for k, v in GEMMA4.items() if k != "hidden_size_per_layer_input"},
    ),
    "gemma4_per_layer_inputs": (
        "gemma4_text",
        {**GEMMA4, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": V, "num_kv_shared_layers": 3},
    ),
    "gemma4_experts": (
        "gemma4_text",
        {**GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    ),
}
WRAPPED = {
    # transformers' multimodal Gemma 3 does not cap its logits, and no published one asks for it
    "gemma3": ("gemma3", "gemma3_text", {**TEXT["gemma3"][1], "final_logit_softcapping": None}),
    "gemma4": ("gemma4", "gemma4_text", GEMMA4),
}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
DRAFTERS = {
    "dspark": deepspec.DSparkConfig(
        block_size=4, target_layer_ids=(1, 2, 4), num_draft_layers=2, mask_token_id=60, num_anchors=4, markov_rank=8
    ),
    "dflash": deepspec.DFlashConfig(
        block_size=4, target_layer_ids=(0, 5), num_draft_layers=1, mask_token_id=60, num_anchors=4
    ),
}


def tiny(name: str):
    """A random model of a family, float32, with norms and layer scalars that are not 1."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, extra = TEXT[name]
    return _filled(AutoModelForCausalLM, AutoConfig.for_model(kind, **{**SMALL, **extra}))


def wrapped(name: str):
    """The same text model inside a multimodal one."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    kind, text, extra = WRAPPED[name]
    vision = dict(VISION, image_size=28, patch_size=14) if name == "gemma3" else dict(VISION, num_key_value_heads=2)
    text_config = {"model_type": text, **SMALL, **extra}
    config = AutoConfig.for_model(kind, text_config=text_config, vision_config=vision, audio_config=None)
    return _filled(AutoModelForImageTextToText, config)


def _filled(auto, config):
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name and name.endswith("weight"):
                value.add_(torch.randn_like(value) * 0.2)
            if name.endswith("layer_scalar"):
                value.uniform_(0.5, 1.5)
    return model


@pytest.mark.parametrize("name", [n for n in TEXT if n not in ("gemma4_per_layer_inputs", "gemma4_experts")])
def test_our_block_is_transformers_layer(name):
    """The last layer of full attention, with the target's own query-key norms: same weights, same output."""
    model = tiny(name)
    target = Target(model)
    kinds = getattr(target.config, "layer_types", None) or ["full_attention"] * LAYERS
    index = max([i for i, kind in enumerate(kinds) if kind == "full_attention"], default=LAYERS - 1)
    theirs = model.get_decoder().layers[index]
    ours = Block(target.spec, qk_norm=hasattr(theirs.self_attn, "q_norm"))
    biases = {k for k in theirs.state_dict() if k.endswith("proj.bias")}  # Qwen2's; drafters have none
    for parameter in biases:
        theirs.get_parameter(parameter).zero_()
    ours.load_state_dict({k: v for k, v in theirs.state_dict().items() if k not in biases})
    seen: dict[str, Tensor] = {}

    def keep(module, args, kwargs, output):
        seen["in"], seen["out"] = args[0], output[0] if isinstance(output, tuple) else output

    handle = theirs.register_forward_hook(keep, with_kwargs=True)
    tokens = torch.arange(9)[None] * 5 % V
    with torch.no_grad():
        target.features(tokens, [9], ())
        handle.remove()
        window = target.config.sliding_window if name == "mistral_windowed" else 99
        place = torch.arange(9)
        mask = (place <= place[:, None]) & (place > place[:, None] - window)

        def attend(q, k, v):
            from deepspec.modeling.attention import attend as plain

            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return plain(q, k, v, mask[None, None], ours.self_attn.scale).transpose(1, 2)

        out = ours(seen["in"].view(1, 9, D), Rotary(target.spec)(place[None]), attend)
    torch.testing.assert_close(out, seen["out"].view(1, 9, D), rtol=1e-5, atol=1e-5)


def _check_sessions(model, text):
    """Rows of unequal length, scored in pieces with wrong turns taken back, against one plain forward pass each."""
    rows = [torch.randint(1, V, (n,), generator=torch.Generator().manual_seed(n)) for n in (17, 11)]
    with torch.no_grad():
        expected = [text(input_ids=r[None], output_hidden_states=True) for r in rows]
    target = Target(model)
    session = target.open(2, 32, (0, 2, LAYERS - 1))
    done = [0, 0]
    generator = torch.Generator().manual_seed(1)
    for size in (6, 1, 4, 2, 4):
        counts = [min(size, len(r) - n) for r, n in zip(rows, done)]
        wrong = torch.randint(1, V, (2, 7), generator=generator)
        session.score(wrong, [7 if c else 0 for c in counts])  # a draft that is refused whole
        session.rewind(done)
        grid = torch.zeros(2, size, dtype=torch.long)
        for b, (row, n, c) in enumerate(zip(rows, done, counts)):
            grid[b, :c] = row[n : n + c]
        scored = session.score(grid, counts)
        for b, (n, c) in enumerate(zip(done, counts)):
            out = expected[b]
            torch.testing.assert_close(scored.logits[b, :c], out.logits[0, n : n + c], rtol=1e-4, atol=5e-5)
            torch.testing.assert_close(scored.hidden[b, :c], out.hidden_states[-1][0, n : n + c], rtol=1e-4, atol=5e-5)
            taps = torch.cat([out.hidden_states[i + 1][0, n : n + c] for i in (0, 2)], -1)
            torch.testing.assert_close(scored.features[b, :c, : 2 * D], taps, rtol=1e-4, atol=5e-5)
        done = [n + c for n, c in zip(done, counts)]
    assert done == [17, 11]
    grid = torch.zeros(2, 17, dtype=torch.long)
    for b, row in enumerate(rows):
        grid[b, : len(row)] = row
    features, hidden = target.features(grid, done, (0, 2, LAYERS - 1))
    for b, row in enumerate(rows):
        states = expected[b].hidden_states
        torch.testing.assert_close(hidden[b, : len(row)], states[-1][0], rtol=1e-4, atol=5e-5)
        torch.testing.assert_close(features[b, : len(row), D : 2 * D], states[3][0], rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("name", TEXT)
def test_sessions_are_transformers_forward(name):
    """Windows are shorter than the sequence, so a rewind that lost a windowed layer's past would show."""
    model = tiny(name)
    _check_sessions(model, model)


@pytest.mark.parametrize("name", WRAPPED)
def test_a_text_model_inside_a_multimodal_one(name):
    model = wrapped(name)
    _check_sessions(model, model)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gemma4", "gemma4_unified"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding_and_logits_are_the_targets_own(name, dtype):
    """Gemma scales its embeddings and caps its logits; here the cap of 2 is well within reach."""
    model = tiny(name).to(dtype)
    target = Target(model)
    tokens = torch.arange(V)[None]
    with torch.no_grad():
        assert torch.equal(target.vocab.embed(tokens), model.get_input_embeddings()(tokens))
        logits = model(input_ids=tokens).logits
        _, hidden = target.features(tokens, [V], ())
        torch.testing.assert_close(
            target.vocab.logits(hidden), logits, rtol=1e-4, atol=1e-4 if dtype.itemsize > 2 else 0.1
        )
    if target.vocab.softcap is not None:
        assert logits.abs().max() > 1.5


def batch_for(drafter, target, T=14):
    """One batch of two random rows with the target's own features."""
    tokens = torch.randint(1, V - 1, (2, T), generator=torch.Generator().manual_seed(3))
    features, hidden = target.features(tokens, [T, T], drafter.config.target_layer_ids)
    return deepspec.Batch(tokens, torch.ones_like(tokens).bool(), features, hidden)


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma3", "gemma4", "gemma4_own_values", "gemma4_unified"])
def test_every_drafter_trains_decodes_and_survives_a_file(name, kind, tmp_path):
    """Train == decode for the first proposal; a file holds what was saved; greedy output is the target's."""
    target = Target(tiny(name))
    torch.manual_seed(1)
    drafter = DRAFTERS[kind].build(target.spec, target.vocab).eval()
    for buffer_name, value in drafter.named_buffers():
        if buffer_name.endswith("layer_scalar"):
            value.fill_(0.7)
    batch = batch_for(drafter, target)
    drafter.save(tmp_path / "drafter")
    loaded = deepspec.load_drafter(tmp_path / "drafter", target)
    assert loaded.spec == drafter.spec and loaded.config == drafter.config
    for key, value in drafter.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[key]), key
    anchors = torch.tensor([[6], [9]])
    with torch.no_grad():
        states = loaded.hidden(batch, anchors)
        state = loaded.new_state(2, 32)
        loaded.observe(state, batch.features, batch.tokens[:, 1:], [6, 9])
        proposal = loaded.propose(state, deepspec.Sampling(temperature=1.0), torch.full((2, 4), 0.5))
        prev = torch.cat([batch.tokens.gather(1, anchors), proposal.tokens[:, :-1]], 1)[:, None]
        law = loaded.logits(states, prev)[:, 0].softmax(-1)
    torch.testing.assert_close(proposal.probs, law, rtol=1e-4, atol=1e-5)
    loss, weight, _ = deepspec.Objective(drafter, deepspec.LossConfig(ce=0.5, tv=0.5))(batch)
    loss.backward()
    assert all(p.grad is not None for n, p in drafter.named_parameters() if "confidence" not in n) and weight > 0
    prompts = [[3, 5, 7, 9, 11, 13, 15], [2, 4]]
    plain = deepspec.generate(target, None, prompts, max_new_tokens=16)
    drafted = deepspec.generate(target, loaded, prompts, max_new_tokens=16)
    assert [g.tokens for g in plain] == [g.tokens for g in drafted]


def test_saved_configs_name_the_block_they_hold(tmp_path):
    """Gemma blocks have Gemma configs (formats.md 1.1 and 1.2), everything else Qwen3's."""
    expected = {
        "qwen3": ("Qwen3DSparkModel", "qwen3"),
        "llama": ("Qwen3DSparkModel", "qwen3"),
        "gemma3": ("Gemma3DSparkModel", "gemma3_text"),
        "gemma4_unified": ("Gemma4DSparkModel", "gemma4_text"),
    }
    for name, (architecture, model_type) in expected.items():
        target = Target(tiny(name))
        drafter = DRAFTERS["dspark"].build(target.spec, target.vocab)
        drafter.save(tmp_path / name)
        raw = read_config(tmp_path / name)
        assert (raw["architectures"], raw["model_type"]) == ([architecture], model_type)
        assert read_spec(raw) == target.spec
        keys = set(load_file(tmp_path / name / "model.safetensors"))
        assert ("layers.0.self_attn.v_proj.weight" in keys) == (name != "gemma4_unified")
        assert ("layers.0.layer_scalar" in keys) == (name == "gemma4_unified")
        assert ("layers.0.pre_feedforward_layernorm.weight" in keys) == name.startswith("gemma")
        if name == "gemma4_unified":
            assert raw["global_head_dim"] == 16 and raw["attention_k_eq_v"] and raw["final_logit_softcapping"] == 2.0


def test_fresh_norms_multiply_by_one():
    """Gemma 3 stores norms as distances from 1, so a fresh one is 0; frequencies of the two kinds of layers differ."""
    target = Target(tiny("gemma3"))
    drafter = DRAFTERS["dflash"].build(target.spec, target.vocab)
    norms = [p for n, p in drafter.named_parameters() if "norm" in n]
    assert norms and all(p.abs().max() == 0 for p in norms)
    assert target.spec.attn_scale == 24**-0.5 and target.vocab.embed_scale == D**0.5
    assert math.isclose(target.spec.inv_freq[1], 1e6 ** (-2 / 8), rel_tol=1e-5)


def test_warm_start_takes_the_kind_of_layer_the_drafter_has():
    """Of a Gemma 4 the last full-attention layers, layer scalars included; of a Gemma 3, whose layers are alike in
    shape, the last ones."""
    for name, layers in (("gemma4", (2, 5)), ("gemma3", (4, 5))):
        target = Target(tiny(name))
        drafter = DRAFTERS["dspark"].build(target.spec, target.vocab)
        said = warm_start(drafter, target, "target")
        for i, layer in enumerate(layers):
            for key, value in target.weights()[0][layer].items():
                assert torch.equal(drafter.state_dict()[f"layers.{i}.{key}"], value), (name, key)
            assert any(f"from target layer {layer}" in line for line in said)


@pytest.mark.parametrize("name", WRAPPED)
def test_a_multimodal_directory_loads(name, tmp_path):
    """Target.load finds the text model in it, and the vocabulary alone is read from its two tensors."""
    model = wrapped(name)
    model.save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), dtype="float32")
    assert target.spec == read_family(model.config).block and target.num_layers == LAYERS
    family, vocab = load_vocab(str(tmp_path), dtype="float32")
    assert family.block == target.spec
    tokens = torch.arange(V)
    assert torch.equal(vocab.embed(tokens), target.vocab.embed(tokens))
    assert torch.equal(vocab.logits(vocab.embed(tokens)), target.vocab.logits(vocab.embed(tokens)))
    assert torch.equal(vocab.embed(tokens), model.get_input_embeddings()(tokens))


def test_unknown_and_unfit_targets_are_refused_in_one_line():
    from transformers import AutoConfig

    with pytest.raises(InputError, match=r"families/gpt2\.py"):
        read_family(AutoConfig.for_model("gpt2"))
    kind, extra = TEXT["gemma3"]
    with pytest.raises(InputError, match="use_bidirectional_attention"):
        read_family(AutoConfig.for_model(kind, **SMALL, **extra, use_bidirectional_attention=True))


@pytest.fixture(scope="module")
def case():
    meta = json.loads((GOLDEN / "meta.json").read_text())
    target = Target.load(str(GOLDEN / "target"), dtype="float32")
    drafter = deepspec.load_drafter(GOLDEN / "drafter", target)
    inputs, expected = (load_file(GOLDEN / f"{n}.safetensors") for n in ("inputs", "expected"))
    batch = deepspec.Batch(
        inputs["input_ids"],
        inputs["loss_mask"].bool(),
        inputs["target_hidden_states"],
        inputs["target_last_hidden_states"],
    )
    return meta, target, drafter, inputs, expected, batch


class TestGolden:
    """tests/golden/dspark_gemma4_vanilla (shared/golden/README.md names its tensors)."""

    def test_features(self, case):
        meta, target, _, _, _, batch = case
        counts = [batch.tokens.shape[1]] * len(batch.tokens)
        features, hidden = target.features(batch.tokens, counts, meta["target_layer_ids"])
        torch.testing.assert_close(features, batch.features, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(hidden, batch.hidden, rtol=1e-4, atol=1e-5)

    def test_logits_and_confidence(self, case):
        _, _, drafter, inputs, expected, batch = case
        anchors, mask = inputs["anchor_positions"], expected["eval_mask"].bool()
        with torch.no_grad():
            hidden = drafter.hidden(batch, anchors)
            prev = gather_slots(batch.tokens, anchors[..., None] + torch.arange(drafter.num_slots))
            logits, confidence = drafter.logits(hidden, prev), drafter.confidence(hidden, prev)
        torch.testing.assert_close(logits[mask], expected["draft_logits"][mask], rtol=0, atol=1e-5)
        torch.testing.assert_close(confidence[mask], expected["confidence_logits"][mask], rtol=0, atol=1e-5)

    @pytest.mark.parametrize("chunk", [1, 64])
    def test_loss_and_gradients(self, case, chunk):
        meta, target, _, inputs, expected, batch = case
        drafter = deepspec.load_drafter(GOLDEN / "drafter", target)
        terms = meta["loss"]
        config = deepspec.LossConfig(
            ce=terms["ce"], tv=terms["tv_l1"], confidence=terms["confidence"],
            slot_decay=math.exp(-1 / terms["decay_gamma"]), chunk=chunk,
        )  # fmt: skip
        anchors = (inputs["anchor_positions"], inputs["block_keep_mask"].bool())
        loss, weight, _ = deepspec.Objective(drafter, config)(batch, anchors=anchors)
        (loss / weight).backward()
        torch.testing.assert_close(loss / weight, expected["loss"], rtol=0, atol=1e-5)
        parameters = dict(drafter.named_parameters())
        names = [k.removeprefix("grad.") for k in expected if k.startswith("grad.")]
        assert len(names) > 5
        for name in names:
            grad = expected[f"grad.{name}"]
            torch.testing.assert_close(parameters[name].grad, grad, rtol=0, atol=1e-5 * float(grad.abs().max() + 1e-4))

    @pytest.mark.parametrize("key", ["decode", "decode_threshold_0.5"])
    def test_greedy_decoding(self, case, key):
        """Ids, accepted and proposed lengths of every round that the budget does not cut."""
        meta, target, drafter, *_ = case
        case_ = meta[key]
        schedule = deepspec.verify_all() if key == "decode" else deepspec.threshold(0.5)
        (g,) = deepspec.generate(target, drafter, [case_["prompt"]], max_new_tokens=40, schedule=schedule)
        assert case_["prompt"] + g.tokens == case_["output_ids"][: len(case_["prompt"]) + 40]
        whole, total = 0, 1
        while total + case_["acceptance_lengths"][whole] < 40:
            total += case_["acceptance_lengths"][whole]
            whole += 1
        assert whole > 2
        assert [a + 1 for _, a in g.rounds[:whole]] == case_["acceptance_lengths"][:whole]
        assert [v for v, _ in g.rounds[:whole]] == case_["proposal_lengths"][:whole]
