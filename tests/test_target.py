"""Laws of targets: a packed, ragged, rewindable session equals transformers' own forward pass, and leaves no trace.

Letters: B rows, T positions, L tapped layers, D hidden, V vocabulary.
"""

import copy
import functools
import json
import random
import re

import pytest
import torch
from helpers import FAMILIES, LAYERS, V, hf_model, target
from safetensors.torch import load_file, save_file

from deepspec import InputError, Target
from deepspec.modeling import loading
from deepspec.modeling import target as target_module

CLOSE = dict(atol=2e-5, rtol=1e-4)
families = pytest.mark.parametrize("family", FAMILIES)


@functools.cache
def untouched(family: str):
    """A model that never met deepspec, with the same weights as target(family)."""
    model = hf_model(family)
    model.set_attn_implementation("sdpa")
    return model


@torch.no_grad()
def theirs(family: str, tokens: list[int]):
    """Features [T, L * D], hidden [T, D] and logits [T, V] of one sequence by transformers alone."""
    model = untouched(family)
    out = model(torch.tensor([tokens]), output_hidden_states=True)
    features = torch.cat([out.hidden_states[i + 1] for i in LAYERS], -1)[0]
    return features, out.hidden_states[-1][0], out.logits[0]


def text(n: int, seed: int) -> list[int]:
    return torch.randint(0, V, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def padded(rows: list[list[int]], junk: int = 0) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([r + [junk] * (width - len(r)) for r in rows])


@families
def test_ragged_session_equals_transformers(family):
    """One pass over rows of different lengths, one of them empty: features (hidden_states[id + 1]), hidden and logits
    of every real position equal a fresh model's, row by row; junk in the padding changes nothing. Longer than the
    window."""
    rows = [text(n, n) for n in (11, 1, 17, 0, 5)]
    for junk in (0, V - 1):
        scored = target(family).open(5, 32, LAYERS).score(padded(rows, junk), [len(r) for r in rows])
        assert scored.logits.shape == (5, 17, V)
        for b, row in enumerate(rows):
            if row:
                features, hidden, logits = theirs(family, row)
                n = len(row)
                torch.testing.assert_close(scored.features[b, :n], features, **CLOSE)
                torch.testing.assert_close(scored.hidden[b, :n], hidden, **CLOSE)
                torch.testing.assert_close(scored.logits[b, :n], logits, **CLOSE)


@families
def test_long_random_walk_of_appends_and_rewinds(family):
    """40 rounds of ragged appends (0 to 5 tokens a row), each followed by a rewind by nothing, a part or all, and now
    and then by a reset: what is scored equals a fresh pass over the row's tokens. Checks every row of every round."""
    rng, rows = random.Random(1), [[], [], []]
    session = target(family).open(3, 48, LAYERS)
    for step in range(40):
        new = [text(rng.choice((0, 0, 1, 1, 2, 5)), 100 * step + b) for b in range(3)]
        if not any(new):
            continue
        before = [len(r) for r in rows]
        rows = [r + n for r, n in zip(rows, new)]
        scored = session.score(padded(new, junk=7), torch.tensor([len(n) for n in new]))
        assert session.lengths == [len(r) for r in rows]
        for b in range(3):
            if new[b]:
                features, hidden, logits = theirs(family, rows[b])
                torch.testing.assert_close(scored.logits[b, : len(new[b])], logits[before[b] :], **CLOSE)
                torch.testing.assert_close(scored.features[b, : len(new[b])], features[before[b] :], **CLOSE)
                torch.testing.assert_close(scored.hidden[b, : len(new[b])], hidden[before[b] :], **CLOSE)
        keep = [len(r) - rng.choice((0, 0, rng.randint(0, len(n)), len(n))) for r, n in zip(rows, new)]
        keep = [0 if len(r) > 30 else k for k, r in zip(keep, rows)]
        session.rewind(torch.tensor(keep))
        rows = [r[:k] for r, k in zip(rows, keep)]
        if step % 13 == 12:
            session.reset([1])
            rows[1] = []


@families
def test_tokens_that_fill_a_size_change_nothing(family, monkeypatch):
    """Both laws above hold where every pass is a few tokens longer than what is real."""
    monkeypatch.setattr(target_module, "rounded", lambda n, *_: n + 3)
    test_ragged_session_equals_transformers(family)
    test_long_random_walk_of_appends_and_rewinds(family)


@pytest.mark.parametrize("dtype, rows", [(torch.bfloat16, 20), (torch.float32, 19)])
def test_passes_in_bfloat16_have_few_sizes(dtype, rows):
    """On a CPU 19 tokens make products of 20 rows, in every layer; in float32 of 19."""
    tgt, seen = Target(hf_model().to(dtype)), []
    for layer in tgt.model.model.layers:
        for part in (layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.down_proj):
            part.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[:-1].numel()))
    session = tgt.open(4, 32, LAYERS)
    for counts in ([9, 0, 3, 7], [3, 8, 4, 4]):
        scored = session.score(torch.ones(4, 9, dtype=torch.long), counts)
        assert scored.hidden.shape[:2] == (4, 9) and len(scored.packed) == 19
    assert set(seen) == {rows} and len(seen) == 2 * 3 * 4


@families
def test_chunked_prefill_equals_one_piece(family, monkeypatch):
    """A prefill cut into chunks of a few tokens, into a cache that already holds some: the same features, hidden,
    logits, and the same continuation, whatever the chunk."""
    rows, more = [text(13, 1), text(4, 2), text(9, 3)], [text(2, 4), text(3, 5), text(1, 6)]
    results = []
    for chunk in (4096, 12, 6, 1):
        monkeypatch.setattr(target_module, "PREFILL_CHUNK", chunk)
        session = target(family).open(3, 40, LAYERS)
        session.score(torch.tensor([[3, 1], [2, 2], [5, 0]]), [2, 0, 1])
        first = session.score(padded(rows), [13, 4, 9])
        then = session.score(padded(more), [2, 3, 1])
        results.append((first.logits, first.features, first.hidden, then.logits))
    for other in results[1:]:
        for a, b in zip(results[0], other):
            torch.testing.assert_close(a, b, **CLOSE)


@families
def test_logits_of_the_last_tokens(family):
    """`last` gives the logits at each row's last so many new tokens, from place 0 on; all else stays whole."""
    rows, counts = [text(6, 1), text(2, 2), text(5, 3)], [6, 2, 5]
    whole = target(family).open(3, 16, LAYERS).score(padded(rows), counts)
    for last, tail in ((1, [1, 1, 1]), (3, [3, 2, 3]), ([2, 0, 5], [2, 0, 5])):
        some = target(family).open(3, 16, LAYERS).score(padded(rows), counts, last=last)
        assert some.logits.shape[1] == (last if isinstance(last, int) else max(last))
        for b, n in enumerate(tail):
            torch.testing.assert_close(some.logits[b, :n], whole.logits[b, counts[b] - n : counts[b]])
        torch.testing.assert_close(some.features, whole.features)


@families
def test_rows_that_go_on_and_rows_that_begin_in_one_pass(family):
    """Nine rows of which some have a past, some begin and some take no part, near each other and far apart: what each
    gets is what it gets alone."""
    longest = 24
    session = target(family).open(9, longest, LAYERS)
    history: list[list[int]] = [[] for _ in range(9)]
    for step, counts in enumerate(
        ([5, 0, 2, 0, 0, 0, 0, 0, 9], [1, 0, 0, 0, 7, 0, 0, 0, 1], [1, 3, 1, 0, 1, 0, 0, 6, 4],
         [0, 1, 0, 0, 0, 0, 0, 1, 0], [1, 1, 1, 11, 1, 0, 0, 1, 1], [0, 0, 0, 0, 2, 0, 2, 0, 0])
    ):  # fmt: skip
        new = [text(n, 10 * step + b) for b, n in enumerate(counts)]
        scored = session.score(padded(new), counts)
        for b, n in enumerate(counts):
            if n:
                history[b] += new[b]
                alone = target(family).open(1, longest, LAYERS).score(torch.tensor([history[b]]))
                for name in ("logits", "features", "hidden"):
                    torch.testing.assert_close(getattr(scored, name)[b, :n], getattr(alone, name)[0, -n:], **CLOSE)


@families
def test_features_of_whole_rows_equal_the_sessions(family):
    """features(...), as training calls it, equals a session's, zeros after a row's end, any subset of layers."""
    rows, counts = [text(8, 1), text(15, 2), text(3, 3)], [8, 15, 3]
    for layers in ((), (1,), LAYERS, (0, 1, 2, 3)):
        features, hidden = target(family).features(padded(rows, junk=9), counts, layers)
        scored = target(family).open(3, 16, layers).score(padded(rows), counts)
        assert features.shape == (3, 15, 32 * len(layers))
        torch.testing.assert_close(features, scored.features, **CLOSE)
        torch.testing.assert_close(hidden, scored.hidden, **CLOSE)
        assert not features[0, 8:].any() and not hidden[2, 3:].any()
    some, _ = target(family).features(padded(rows), [8, 0, 3], LAYERS)
    assert not some[1].any() and some.shape[1] == 15
    torch.testing.assert_close(some[2, :3], target(family).features(padded(rows[2:]), [3], LAYERS)[0][0], **CLOSE)


@families
def test_the_last_layer_is_tapped_before_the_final_norm(family):
    """A tapped layer is that layer's output, also for the last layer, whose output transformers does not list."""
    model, seen = untouched(family), []
    handle = model.model.layers[3].register_forward_hook(
        lambda m, a, out: seen.append(out[0] if isinstance(out, tuple) else out)
    )
    tokens = text(9, 4)
    with torch.no_grad():
        model(torch.tensor([tokens]))
    handle.remove()
    features, _ = target(family).features(torch.tensor([tokens]), [9], (3,))
    torch.testing.assert_close(features, seen[0], **CLOSE)


@families
def test_head_of_hidden_is_the_models_logits(family):
    """vocab.logits(hidden) equals the model's logits: no norm missing, none twice; vocab.embed is its input
    embedding."""
    tokens = text(12, 5)
    _, hidden = target(family).features(torch.tensor([tokens]), [12], ())
    torch.testing.assert_close(target(family).vocab.logits(hidden)[0], theirs(family, tokens)[2], **CLOSE)
    embedded = untouched(family).get_input_embeddings()(torch.tensor([tokens]))
    assert torch.equal(target(family).vocab.embed(torch.tensor([tokens])), embedded)


@families
def test_no_trace_is_left(family):
    """After sessions, features, and a pass that fails halfway, no hook hangs on the model."""
    t = Target(hf_model(family))
    t.features(torch.tensor([[1, 2]]), [2], LAYERS)
    session = t.open(1, 8, LAYERS)
    with pytest.raises(IndexError):
        session.score(torch.tensor([[1, V + 5]]))
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in t.model.modules())
    assert not any(p.requires_grad for p in t.model.parameters()) and not t.model.training


@families
def test_the_users_own_calls_are_untouched(family):
    """target.model stays an ordinary model: forward with left padding, with right padding, with a cache, and greedy
    generate of a padded batch equal a model that never met deepspec."""
    ours, other = target(family).model, untouched(family)
    tokens = torch.tensor([text(10, 7), text(10, 8)])
    left, right = torch.ones(2, 10, dtype=torch.long), torch.ones(2, 10, dtype=torch.long)
    left[0, :4] = right[1, 6:] = 0
    with torch.no_grad():
        for mask in (None, left, right):
            a, b = (m(tokens, attention_mask=mask).logits for m in (ours, other))
            real = torch.ones(2, 10, dtype=torch.bool) if mask is None else mask.bool()
            torch.testing.assert_close(a[real], b[real], **CLOSE)
        a, b = (
            m.generate(
                tokens, attention_mask=left, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None
            )
            for m in (ours, other)
        )
    assert torch.equal(a, b)


@families
def test_sessions_are_independent(family):
    """Several sessions on one target at once do not see each other."""
    a, b = target(family).open(1, 16, ()), target(family).open(2, 16, LAYERS)
    row, other = text(9, 1), text(9, 2)
    for i in range(9):
        logits = a.score(torch.tensor([[row[i]]])).logits
        b.score(torch.tensor([[other[i]], [0]]), [1, i % 2])
        torch.testing.assert_close(logits[0, 0], theirs(family, row)[2][i], **CLOSE)


def test_a_session_refuses_what_it_cannot_hold():
    """Outgrowing max_length, rewinding forward or below zero: ValueError that names row and numbers; state unharmed."""
    session = target().open(2, 4)
    session.score(torch.tensor([[1, 2, 3], [4, 5, 6]]), [3, 1])
    with pytest.raises(ValueError, match="row 0 would hold 5"):
        session.score(torch.tensor([[1, 2], [3, 0]]), [2, 1])
    for bad in ([4, 0], [-1, 0]):
        with pytest.raises(ValueError, match="row 0 holds 3"):
            session.rewind(bad)
    assert session.lengths == [3, 1]
    assert torch.isfinite(session.score(torch.tensor([[1], [1]])).logits).all()


@pytest.mark.parametrize("bad", [(2, 0), (1, 1), (-1, 2), (0, 4)], ids=str)
def test_layers_out_of_order_or_range_are_refused(bad):
    """Unsorted, repeated, negative and too large layer ids: InputError with the range."""
    for call in (lambda: target().open(1, 4, bad), lambda: target().features(torch.tensor([[1]]), [1], bad)):
        with pytest.raises(InputError, match="0 to 3"):
            call()


def test_window_matters():
    """The window of the mistral family is in the test: without it the same weights answer otherwise."""
    tokens = torch.tensor([text(17, 3)])
    with torch.no_grad():
        windowed, whole = hf_model("mistral")(tokens).logits, hf_model("mistral", sliding_window=None)(tokens).logits
    assert (windowed - whole)[:, :6].abs().max() < 1e-5 < (windowed - whole)[:, 6:].abs().max()


def test_qwen3_with_sliding_layers():
    """Layers of one model may differ: sliding and full ones, longer than the window, equal transformers'."""
    changes = dict(use_sliding_window=True, sliding_window=5, max_window_layers=2)
    ours, other = Target(hf_model("qwen3", **changes)), hf_model("qwen3", **changes)
    assert set(other.config.layer_types) == {"sliding_attention", "full_attention"}
    session, row = ours.open(1, 32), text(20, 3)
    with torch.no_grad():
        want = other(torch.tensor([row])).logits
        got = torch.cat([session.score(torch.tensor([row[s : s + 3]])).logits for s in range(0, 20, 3)], 1)
    torch.testing.assert_close(got, want, **CLOSE)
    _, hidden = ours.features(torch.tensor([row]), [20], ())
    torch.testing.assert_close(ours.vocab.logits(hidden), want, **CLOSE)


def test_bfloat16_sessions():
    """In bfloat16 too, a packed session is as near to the float32 model as transformers' own bfloat16 pass is, give or
    take a factor of two."""
    half, row = hf_model("qwen3").bfloat16(), text(24, 3)
    with torch.no_grad():
        exact = hf_model("qwen3")(torch.tensor([row])).logits
        own = half(torch.tensor([row])).logits.float()
    t = Target(copy.deepcopy(half))
    scored = t.open(1, 32).score(torch.tensor([row]))
    assert scored.logits.dtype == torch.bfloat16 and t.dtype == torch.bfloat16
    assert (scored.logits.float() - exact).abs().mean() < 2 * (own - exact).abs().mean()


# -- reading from disk ---------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    def save(family="qwen3", shards=False, **changes):
        folder = tmp_path / f"{family}-{len(list(tmp_path.iterdir()))}"
        hf_model(family, **changes).save_pretrained(folder, max_shard_size="20KB" if shards else "1GB")
        return folder

    return save


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_vocabulary_alone_reads_two_tensors(saved, family, shards, tied):
    """load_vocab gives the target's own embedding and head, and works when every other tensor is gone from the
    files."""
    folder = saved(family, shards, tie_word_embeddings=tied)
    t = Target.load(str(folder))
    index = folder / "model.safetensors.index.json"
    assert index.exists() == shards
    for file in folder.glob("*.safetensors"):
        tensors = {k: v for k, v in load_file(file).items() if k.endswith(("embed_tokens.weight", "lm_head.weight"))}
        file.unlink()
        if tensors:
            save_file(tensors, file)
    family_, vocab = loading.load_vocab(str(folder))
    assert torch.equal(vocab.embedding, t.vocab.embedding) and torch.equal(vocab.head, t.vocab.head)
    assert tied == torch.equal(vocab.head, vocab.embedding) and family_.block == t.spec
    assert tied == (vocab.head.data_ptr() == vocab.embedding.data_ptr())
    with torch.no_grad():
        half = loading.load_vocab(str(folder), dtype="bfloat16")[1]
    assert half.head.dtype == torch.bfloat16 and torch.equal(half.head, t.vocab.head.bfloat16())


def test_loaded_target_equals_the_saved_model(saved):
    """Target.load of a directory: same logits, dtype as asked, name kept, no tokenizer where there is none."""
    folder = saved("llama")
    t = Target.load(str(folder), dtype="float32")
    row = text(8, 1)
    torch.testing.assert_close(t.open(1, 8).score(torch.tensor([row])).logits[0], theirs("llama", row)[2], **CLOSE)
    assert t.name == str(folder) and t.tokenizer is None and t.device.type == "cpu"
    assert Target.load(str(folder), dtype="bf16").dtype == torch.bfloat16


def test_stop_ids_are_gathered_from_everywhere(saved):
    """Ids that end an answer come from the generation config and the model config, each holding none, one or a list."""
    folder = saved("qwen3")
    config = json.loads((folder / "config.json").read_text())
    for in_config, in_generation, want in (
        (None, None, ()), (5, None, (5,)), (None, [7, 3], (3, 7)), ([9, 1], 9, (1, 9)), (0, [2], (0, 2)),
    ):  # fmt: skip
        (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": in_config}))
        generation = {} if in_generation is None else {"eos_token_id": in_generation}
        (folder / "generation_config.json").write_text(json.dumps(generation))
        assert Target.load(str(folder)).stop_ids == want
        assert loading.load_stop_ids(str(folder), loading.load_config(str(folder)), None) == want


def test_what_is_no_target_is_one_clear_line(saved, tmp_path):
    """Missing GGUF file, missing directory, directory without config, unknown family, truncated weights, unknown dtype
    and device: InputError of one line with the name and what would be right."""
    broken = saved("qwen3")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    odd = saved("qwen3")
    (odd / "config.json").write_text(
        json.dumps({**json.loads((odd / "config.json").read_text()), "model_type": "gpt2"})
    )
    (tmp_path / "empty").mkdir()
    good = str(saved("qwen3"))
    for call, words in (
        (lambda: Target.load(str(tmp_path / "no.gguf")), "no.gguf"),
        (lambda: loading.load_vocab(str(tmp_path / "no.gguf")), "no.gguf"),
        (lambda: Target.load(str(tmp_path / "nowhere")), "nowhere"),
        (lambda: Target.load("./nowhere/at/all"), "nowhere"),
        (lambda: Target.load(str(tmp_path / "empty")), "config.json"),
        (lambda: Target.load(str(broken)), "cannot be loaded"),
        (lambda: loading.load_vocab(str(broken)), "cannot be loaded"),
        (lambda: loading.load_vocab(str(odd)), "families/gpt2.py"),
        (lambda: Target.load(good, dtype="float99"), "float99"),
        (lambda: Target.load(good, dtype="int32"), "int32"),
        (lambda: Target.load(good, device="quantum"), "quantum"),
    ):
        with pytest.raises(InputError, match=re.escape(words)) as caught:
            call()
        assert len(str(caught.value).splitlines()) == 1


def test_a_gguf_file_is_refused_for_a_vocabulary_alone(tmp_path):
    """load_vocab reads safetensors only, and says so."""
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match="safetensors"):
        loading.load_vocab(str(tmp_path / "model.gguf"))


@families
def test_rotary_of_the_drafter_is_the_targets(family):
    """inv_freq, factor, head sizes and scale in the spec are those of the model's own modules, scaling included."""
    model, spec = untouched(family), target(family).spec
    rotary, attention = model.model.rotary_emb, model.model.layers[0].self_attn
    assert torch.equal(torch.tensor(spec.inv_freq), rotary.inv_freq) and spec.rope_factor == rotary.attention_scaling
    assert spec.attn_scale == attention.scaling and spec.head_dim == attention.head_dim
    assert spec.heads * spec.head_dim == attention.q_proj.weight.shape[0]
    assert spec.kv_heads * spec.head_dim == attention.k_proj.weight.shape[0]
    assert spec.norm_eps == model.model.norm.variance_epsilon and spec.mlp_dim == 48 and spec.max_positions == 256
    if family == "llama":  # llama3 scaling is not nothing
        plain = hf_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 50000.0})
        assert not torch.equal(rotary.inv_freq, plain.model.rotary_emb.inv_freq)


def test_a_pass_over_nothing():
    """No new token for any row: empty states, logits of the asked width, and the session as it was."""
    tgt = target()
    session = tgt.open(2, 8, LAYERS)
    session.score(torch.tensor([[1, 2], [3, 4]]), [2, 1])
    none = torch.zeros(2, 0, dtype=torch.long)
    D = tgt.spec.dim
    for last in (None, 1, [0, 0]):
        scored = session.score(none, last=last)
        assert scored.logits.shape == (2, int(last == 1), V) and scored.hidden.shape == (2, 0, D)
        assert scored.features.shape == (2, 0, len(LAYERS) * D) and session.lengths == [2, 1]
