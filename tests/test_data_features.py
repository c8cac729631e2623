"""Laws of feature caches: what training reads from one is what the target would compute, or one line says why not."""

import itertools
import json
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from helpers import LAYERS, V, hf_model, target, token_rows, write_run
from safetensors.torch import load_file, save_file

from deepspec import InputError, Target, fit, load_config
from deepspec.cli import main
from deepspec.data import feature_build, features
from deepspec.data.__main__ import command as data_command
from deepspec.data.batches import Batches
from deepspec.data.chat import Row
from deepspec.data.encoding import bytes_per_token, decode, encode_row
from deepspec.data.feature_build import _claim, build, look
from deepspec.data.feature_cache import Cached, Manifest, Shard, shard_name
from deepspec.data.features import FAULTS, Live, faults
from deepspec.data.rows import Rows
from deepspec.data.training import read_rows, training_data

SETTINGS = {"target": "t", "target_layer_ids": list(LAYERS), "max_length": 64, "chat_template": None}


def make_rows(n=9, seed=3) -> Rows:
    random = np.random.default_rng(seed)
    lengths = random.integers(5, 17, n)
    return Rows.of(
        Row(f"r{i}", random.integers(0, V - 1, k).tolist(), [j >= 2 and j % 5 > 0 for j in range(k)])
        for i, k in enumerate(lengths.tolist())
    )


def make(folder, rows=None, stored="float32", tgt=None, tokens_a_shard=30):
    rows, tgt = make_rows() if rows is None else rows, tgt or target()
    size = bytes_per_token(len(LAYERS), tgt.vocab.dim, stored) * tokens_a_shard
    return build(rows, tgt, SETTINGS, folder, stored, int(size))


def make_old(folder, *args):
    """A cache that a version without log Z began: its manifest is there and no shard. Building goes on in that way."""
    build(*args)

    def older(manifest):
        manifest["format"] = 1
        del manifest["log_z"]

    edit_manifest(folder / "manifest.json", older)
    for path in folder.glob("shard-*"):
        path.unlink()
    return build(*args)


# -- what comes out is what went in ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_is_the_target_rounded(tmp_path, dtype):
    """Any rows in any order and company: features to rounding those of `Live` with that dtype, bit by bit what the
    cache gives of each row alone, and hidden where it supervises; elsewhere hidden is zero."""
    rows = make_rows()
    made = make(tmp_path / "c", rows, dtype)
    assert made.missing == 0 and len(made.manifest.shards) > 2 and not made.refused
    cached = Cached(tmp_path / "c", SETTINGS, rows)
    live = Live(target(), LAYERS, rows, getattr(torch, dtype))
    close = dict(atol=1e-5, rtol=1e-5) if dtype == "float32" else dict(atol=1e-5, rtol=2**-7)  # twice its rounding
    for index in ([0], [5, 1, 8], list(range(9))[::-1], [4, 4]):
        ours, theirs = cached(index), live(index)
        assert ours.features.dtype == getattr(torch, dtype)
        assert torch.equal(ours.features, torch.cat([cached([i]).features for i in index]))
        torch.testing.assert_close(ours.features, theirs.features, **close)
        where = torch.from_numpy(np.concatenate([rows.supervising(i) for i in index]))[:, None]
        torch.testing.assert_close(ours.hidden, theirs.hidden.where(where, 0), **close)
        assert ours.usable.all() and not ours.hidden[~where[:, 0]].any()


def passes_of(tgt, monkeypatch, most=None) -> list[list[int]]:
    """Fills with the counts of each pass that the target makes from now on."""
    made, original = [], tgt.packed_features
    monkeypatch.setattr(tgt, "packed_features", lambda t, counts, ids: made.append(counts) or original(t, counts, ids))
    if most is not None:
        monkeypatch.setattr(features, "CPU_PASS", most)
    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("most", [1, 20, 40, 1024])
def test_a_row_s_features_are_those_it_has_alone(monkeypatch, most, dtype):
    """Up to rounding, whatever passes its batch-mates make; the same rows in the same order bit by bit. No pass has
    more positions than a CPU should take, unless of one row, and none could take the next row too."""
    rows, tgt = make_rows(), Target(hf_model("qwen3").to(getattr(torch, dtype)))
    live, index = Live(tgt, LAYERS, rows), [4, 0, 8, 3, 3, 1, 2, 7]
    alone = [live([i]) for i in index]
    made = passes_of(tgt, monkeypatch, most)
    together = live(index)
    assert [n for counts in made for n in counts] == rows.lengths[index].tolist()
    assert all(len(counts) == 1 or sum(counts) <= most for counts in made)
    assert all(sum(counts) + after[0] > most for counts, after in itertools.pairwise(made))
    again = live(index)
    for name in ("features", "hidden"):
        ours, theirs = getattr(together, name), torch.cat([getattr(one, name) for one in alone])
        assert torch.equal(ours, getattr(again, name)) and ours.dtype == getattr(torch, dtype)
        assert (ours - theirs).norm() <= theirs.norm() * (1e-5 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "int8"])
def test_log_z_is_that_of_the_hidden_states_that_are_stored(tmp_path, stored, dtype):
    """To 1e-5, where a row supervises: of the logits, in the target's dtype and soft-capped, of the hidden state as it
    is read back, not as the target computed it (which rounding moves by more). Zero elsewhere."""
    rows, tgt = make_rows(), Target(hf_model("gemma3").to(getattr(torch, dtype)), name="tiny")
    assert tgt.vocab.softcap is not None
    made = make(tmp_path / "c", rows, stored, tgt)
    for i in range(len(rows)):
        found, where = Cached(tmp_path / "c", SETTINGS, rows)([i]), torch.from_numpy(rows.supervising(i))
        logits = tgt.vocab.target_logits(found.hidden[where]).float()
        torch.testing.assert_close(found.log_z[where], logits.exp().sum(-1).log(), atol=1e-5, rtol=1e-6)
        assert found.log_z.dtype == torch.float32 and not found.log_z[~where].any()
    assert made.manifest.log_z == dtype


@pytest.mark.parametrize("picked", [[(0, (3,)), (1, (7,))], [(0, (3, 1, 8)), (1, (2,))]], ids=["alone", "packed"])
def test_a_batch_knows_log_z_of_its_hidden_states(tmp_path, picked):
    """Position by position, rows alone or packed; of live features it is not known."""
    rows, tgt = make_rows(), target()
    make(tmp_path / "c", rows)
    batch = Batches(rows, Cached(tmp_path / "c", SETTINGS, rows), tgt.device).batch(picked)
    where = batch.hidden.any(-1)
    assert where.sum() == sum(rows.supervising(i).sum() for _, members in picked for i in members)
    torch.testing.assert_close(batch.log_z[where], tgt.vocab.log_z(batch.hidden[where]))
    assert Batches(rows, Live(tgt, LAYERS, rows), tgt.device).batch(picked).log_z is None


@pytest.mark.parametrize("dim", [64, 640, 100])
def test_int8_is_within_half_a_level_of_its_group(dim):
    """Each value within half of 1/127 of the largest in its group of 64 channels, plus what the bfloat16 scale and
    result lose; a channel a thousand times larger spoils its own group alone. Half the bytes of bfloat16. The hidden
    state, which the teacher's distribution comes from, is bfloat16."""
    x = torch.randn(7, 2, dim) * torch.logspace(-3, 3, dim)
    x[0, 0] = 0
    x[:, :, 3] = 1e4
    parts = encode_row(x, x[:, 0], "int8")
    back = decode(parts).float()
    for start in range(0, dim, 64):
        cut = slice(start, start + 64)
        bound = x[..., cut].abs().amax(-1, keepdim=True) * (0.5 / 127 + 2 / 256)
        assert ((back - x)[..., cut].abs() <= bound + 1e-12).all()
    assert torch.equal(parts["hidden"], x[:, 0].bfloat16())
    stored = sum(part.nbytes for part in parts.values())
    assert stored + 7 * 4 == 7 * bytes_per_token(2, dim, "int8", 1.0)  # log Z
    assert dim % 64 or stored == 7 * (2 * dim * 66 / 64 + 2 * dim)


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on ten rows, and its caches in every dtype (float32 and int8 of the float32 target), also of format 1."""
    folder = tmp_path_factory.mktemp("run")
    file = write_run(folder)
    for stored, override in (("float32", "float32"), ("int8", "float32"), ("bfloat16", "bfloat16")):
        config = load_config(file, f"train.target_dtype={override}")
        rows, _, identity = read_rows(config)
        tgt = Target.load(config.target, device="cpu", dtype=override)
        build(rows, tgt, identity, folder / stored, stored, 3000)
        make_old(folder / f"{stored}-1", rows, tgt, identity, folder / f"{stored}-1", stored, 3000)
    return file, folder


def train(file, out, *overrides):
    """Losses and last weights."""
    losses, drafter = [], None
    for report in fit(load_config(file, f"out={out}", *overrides)):
        losses.append(report.metrics["loss"])
        drafter = report.drafter
    return losses, {k: v.detach().clone() for k, v in drafter.state_dict().items()}


@pytest.mark.parametrize("extra", [(), ("data.pack_tokens=4096",), ("drafter.draft_vocab_size=16",)], ids=str)
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "int8"])
def test_training_from_a_cache_is_training_live(run, tmp_path, monkeypatch, stored, extra):
    """float32: equal losses and weights up to rounding; bfloat16 of a bfloat16 target, and int8: losses within 1 %.
    Losses from a cache of format 1, without log Z, are those from one with it. Packed or not, of all tokens or some.
    And the target's layers are never read."""
    file, folder = run
    dtype = "train.target_dtype=" + ("bfloat16" if stored == "bfloat16" else "float32")
    live = train(file, tmp_path / "live", dtype, *extra)
    monkeypatch.setattr(Target, "load", None)
    old = train(file, tmp_path / "old", dtype, f"data.features={folder / stored}-1", *extra)
    cached = train(file, tmp_path / "cached", dtype, f"data.features={folder / stored}", *extra)
    assert cached[0] == pytest.approx(old[0], rel=1e-5)
    assert cached[0] == pytest.approx(live[0], rel=1e-5 if stored == "float32" else 0.01)
    if stored == "float32":
        for name, weight in live[1].items():
            torch.testing.assert_close(cached[1][name], weight, atol=1e-5, rtol=1e-4)
    else:
        assert stored == "bfloat16" or cached[0] != live[0]


def test_a_start_from_the_target_reads_its_layers_once(run, tmp_path):
    """train.init=target works with a cache; what is kept of the target afterwards has no layers; the drafter says which
    cache it is from."""
    file, folder = run
    change = ("train.init=target", "train.target_dtype=float32", "train.max_steps=2")
    live = train(file, tmp_path / "live", *change)
    cached = train(file, tmp_path / "cached", *change, f"data.features={folder / 'float32'}")
    assert cached[0] == pytest.approx(live[0], rel=1e-5)
    told = json.loads((tmp_path / "cached/drafter/config.json").read_text())["deepspec"]["data"]["cache"]
    assert told["dtype"] == told["log_z"] == "float32" and "cache" not in str(live[1].keys())


def test_a_cache_of_more_rows_in_another_order_serves(run, tmp_path):
    """Rows are found by what they hold, so a part of the data, or another order of it, needs no new cache."""
    file, folder = run
    some = [json.dumps(r) for r in token_rows(10)]
    (tmp_path / "some.jsonl").write_text("\n".join([some[7], some[2], some[4], some[0]]) + "\n")
    change = (f"data.path={tmp_path / 'some.jsonl'}", "train.target_dtype=float32")
    live = train(file, tmp_path / "live", *change)
    for name in ("float32", "float32-1"):
        cached = train(file, tmp_path / name, *change, f"data.features={folder / name}")
        assert cached[0] == pytest.approx(live[0], rel=1e-5)


# -- log Z, and caches without ----------------------------------------------------------------------------------------


def test_a_cache_of_format_1_stays_one():
    """Its shards' seal is what it was before there was log Z, also where this version finishes it; one with log Z has
    another, so that no shard is taken for one of the other kind."""
    told = {"target": "t", "target_layer_ids": [0, 2]}, "int8", 32, "abc", (Shard(3, 20, 11),), {"dtype": "float32"}
    assert Manifest(*told).id == "a516b89c" and Manifest(*told).parts == ["features", "hidden", "features.scales"]
    assert Manifest(*told, log_z="float32").id not in (Manifest(*told).id, Manifest(*told, log_z="bfloat16").id)


def test_a_cache_begun_without_log_z_is_finished_without(tmp_path):
    """No shard of it has one, --check is content, and what is read says that it is not known."""
    rows, tgt = make_rows(), target()
    made = make_old(tmp_path / "c", rows, tgt, SETTINGS, tmp_path / "c", "float32", 4000)
    assert made.missing == 0 and made.manifest.log_z is None and len(made.manifest.shards) > 2
    assert not any("log_z" in load_file(p) for p in (tmp_path / "c").glob("shard-*"))
    assert look(tmp_path / "c", check=True).missing == 0
    build(rows, tgt, SETTINGS, tmp_path / "d", "float32", 4000)
    old, new = (Cached(tmp_path / name, SETTINGS, rows)(range(9)) for name in "cd")
    assert old.log_z is None
    assert torch.equal(new.features, old.features) and torch.equal(new.hidden, old.hidden) and new.log_z is not None
    for part in ("manifest.json", shard_name(0)):  # of one cache in the other
        shutil.copytree(tmp_path / "d", tmp_path / part)
        shutil.copy(tmp_path / "c" / part, tmp_path / part / part)
        with pytest.raises(InputError, match=r"belongs to another cache|does not contain tensor log_z"):
            Cached(tmp_path / part, SETTINGS, rows)


def test_log_z_of_another_dtype_is_left_out(run, tmp_path, caplog):
    """Logits in the dtype at hand would not sum to it: said, and trained on as without it, bit by bit. A cache is not
    gone on with in another dtype either."""
    file, folder = run
    caplog.set_level("INFO")
    losses = {
        name: train(file, tmp_path / name, "train.target_dtype=bfloat16", f"data.features={folder / name}")[0]
        for name in ("float32", "float32-1")
    }
    assert losses["float32"] == losses["float32-1"]
    assert "float32 holds the log Z of logits in float32" in caplog.text and "float32-1 holds no log Z" in caplog.text
    rows, _, identity = read_rows(load_config(file))
    tgt = Target.load(str(folder / "target"), device="cpu", dtype="bfloat16")
    shutil.copytree(folder / "float32", tmp_path / "c")
    assert build(rows, tgt, identity, tmp_path / "c", "float32", 3000).missing == 0  # nothing is left to do
    (tmp_path / "c" / shard_name(1)).unlink()
    with pytest.raises(InputError, match="begun with a target in float32 and this one is in bfloat16; go on with"):
        build(rows, tgt, identity, tmp_path / "c", "float32", 3000)


# -- what does not fit -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("drafter.target_layer_ids=(0,3)", r"target_layer_ids is \[0, 2\] there and \[0, 3\] now"),
        ("data.max_length=12", "max_length is 4096 there and 12 now"),
        ("data.thinking=off", 'thinking is "auto" there and "off" now'),
        ("target_revision=abc", 'target_revision is null there and "abc" now'),
    ],
)
def test_a_cache_of_other_settings_is_refused(run, tmp_path, override, message):
    file, folder = run
    with pytest.raises(InputError, match=message):
        fit(load_config(file, f"out={tmp_path / 'o'}", f"data.features={folder / 'float32'}", override))
    assert not (tmp_path / "o").exists()


def test_a_stale_template_or_tokenizer_is_named(tmp_path):
    make(tmp_path / "c")
    for key in ("chat_template", "target"):
        with pytest.raises(InputError, match=f'{key} is .* there and "new" now'):
            Cached(tmp_path / "c", SETTINGS | {key: "new"}, make_rows())


def test_other_weights_under_the_same_name_are_named(run, tmp_path):
    """The target's directory was overwritten by another model of the same shape."""
    file, folder = run
    shutil.copytree(folder, tmp_path / "moved")
    hf_model("qwen3", seed=5).save_pretrained(folder / "target")
    try:
        with pytest.raises(InputError, match="other weights of the target"):
            train(file, tmp_path / "o", f"data.features={folder / 'float32'}", "train.target_dtype=float32")
    finally:
        shutil.rmtree(folder / "target")
        shutil.copytree(tmp_path / "moved/target", folder / "target")


def test_a_row_that_is_not_there_is_named(tmp_path):
    make(tmp_path / "c")
    more = Rows.of([*make_rows(), Row("new", [1, 2, 3], [False, True, True])])
    with pytest.raises(InputError, match="no features of 1 of 10 rows, the first of them 'new'"):
        Cached(tmp_path / "c", SETTINGS, more)


# -- damage ------------------------------------------------------------------------------------------------------------


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def edit_shard(path, **tensors):
    """Rewrite a shard with some tensors changed or left out (None), checksums and all else as they were."""
    from safetensors import safe_open

    with safe_open(path, "pt") as f:
        metadata = f.metadata()
    save_file({k: v for k, v in {**load_file(path), **tensors}.items() if v is not None}, path, metadata)


def edit_manifest(path, change):
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


LAST = "shard-00002.safetensors"
DAMAGE = {
    "truncated": (lambda c: (c / LAST).write_bytes((c / LAST).read_bytes()[:-7]), rf"{LAST} is damaged \(\d+ bytes"),
    "truncated to its header": (lambda c: (c / LAST).write_bytes((c / LAST).read_bytes()[:40]), rf"{LAST} is damaged"),
    "zero bytes": (lambda c: (c / LAST).write_bytes(b""), rf"{LAST} is damaged \(0 bytes"),
    "missing last": (lambda c: (c / LAST).unlink(), rf"{LAST} is missing, one of 3 shards; run"),
    "flipped, last byte": (lambda c: flip(c / LAST, -1), rf"{LAST} is damaged \(the checksum of its row"),
    "swapped": (lambda c: shutil.copy(c / shard_name(1), c / LAST), rf"{LAST} belongs to another cache"),
    "wrong count in the manifest": (
        lambda c: edit_manifest(c / "manifest.json", lambda m: m["shards"][2].update(rows=77)), "another cache",
    ),
    "wrong count in a shard": (
        lambda c: edit_shard(c / LAST, hidden=load_file(c / LAST)["hidden"][:-1]), "hidden has .* entries, its index",
    ),
    "log Z gone": (lambda c: edit_shard(c / LAST, log_z=None), rf"{LAST} is damaged \(.*log_z"),
    "log Z cut": (
        lambda c: edit_shard(c / LAST, log_z=load_file(c / LAST)["log_z"][1:]), "log_z has .* entries, its index",
    ),
    "log Z changed": (
        lambda c: edit_shard(c / LAST, log_z=load_file(c / LAST)["log_z"] + 1), "the checksum of its row",
    ),
    "an index changed": (
        lambda c: edit_shard(c / LAST, keys=load_file(c / LAST)["keys"] + 1), "the checksum of its index does not",
    ),
    "manifest cut": (
        lambda c: (c / "manifest.json").write_text((c / "manifest.json").read_text()[:50]),
        "manifest.json is damaged",
    ),
    "manifest gone": (lambda c: (c / "manifest.json").unlink(), "is no feature cache: it has no manifest.json"),
    "manifest without shards": (
        lambda c: edit_manifest(c / "manifest.json", lambda m: m.pop("shards")), "manifest.json is damaged",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_in_one_line_and_never_trained_on(tmp_path, kind):
    """Found when the cache is opened, or at the latest when the damaged row is asked for, by training and --check."""
    damage, message = DAMAGE[kind]
    rows = make_rows()
    made = make(tmp_path, rows)
    assert len(made.manifest.shards) == 3
    damage(tmp_path)

    def use():
        cached = Cached(tmp_path, SETTINGS, rows)
        for i in range(len(rows)):
            cached([i])

    for attempt in (use, lambda: look(tmp_path, check=True)):
        if kind == "missing last" and attempt is not use:
            assert look(tmp_path, check=True).missing == 1  # not damage: others may be at it
            continue
        with pytest.raises(InputError, match=message) as error:
            attempt()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("stored", ["float32", "int8"])
def test_any_flipped_byte_is_noticed(tmp_path, stored):
    """Wherever in a shard a byte flips, header or data: an InputError that names the shard, never other features. Every
    97th byte."""
    rows = Rows.of([Row("a", [1, 2, 3, 4], [False, True, True, True]), Row("b", [5, 6, 7], [False, True, True])])
    make(tmp_path, rows, stored, tokens_a_shard=1000)
    path = tmp_path / shard_name(0)
    whole = path.read_bytes()
    clean = Cached(tmp_path, SETTINGS, rows)([0, 1])
    for at in range(0, len(whole), 97):
        path.write_bytes(whole)
        flip(path, at)
        try:
            found = Cached(tmp_path, SETTINGS, rows)([0, 1])
        except InputError as error:
            assert path.name in str(error) or "holds no features" in str(error)
        else:
            for name in ("features", "hidden", "log_z"):
                assert torch.equal(getattr(found, name), getattr(clean, name)), (at, name)


# -- building ----------------------------------------------------------------------------------------------------------


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize("written", [0, 1, 500, "all but one"])
def test_a_kill_while_a_shard_is_written_loses_that_shard_alone(tmp_path, monkeypatch, written):
    """Whatever part of the second shard was on disk, building again makes the files an uninterrupted build makes, and
    does not touch the first shard."""
    make(tmp_path / "straight")

    class Killed(BaseException):
        pass

    def die(tensors, path, metadata):
        save_file(tensors, path, metadata)
        if "00001" in path.name:
            data = path.read_bytes()
            path.write_bytes(data[: len(data) - 1 if written == "all but one" else written])
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(feature_build, "save_file", die)
        with pytest.raises(Killed):
            make(tmp_path / "killed")
    first = (tmp_path / "killed" / shard_name(0)).stat().st_mtime_ns
    with pytest.raises(InputError, match=r"shard-00001\.safetensors is missing"):
        Cached(tmp_path / "killed", SETTINGS, make_rows())
    assert make(tmp_path / "killed").missing == 0
    assert contents(tmp_path / "killed") == contents(tmp_path / "straight")
    assert (tmp_path / "killed" / shard_name(0)).stat().st_mtime_ns == first


def test_a_shard_that_another_process_has_is_left_to_it(tmp_path):
    """One process holds a shard: the others make the rest and say what is missing; when it is gone without having made
    it, the next one does."""
    make(tmp_path / "straight")
    (tmp_path / "c").mkdir()
    with _claim(tmp_path / "c", 2) as mine, pytest.MonkeyPatch.context() as patch:
        assert mine
        patch.setattr(feature_build.Path, "iterdir", lambda self: iter(()))  # the lock came before the manifest
        assert make(tmp_path / "c").missing == 1
    assert make(tmp_path / "c").missing == 0 and contents(tmp_path / "c") == contents(tmp_path / "straight")


def test_a_cache_is_never_mixed(tmp_path):
    """Other settings, dtype or rows, or a directory with other things in it: refused, and nothing is changed."""
    make(tmp_path / "c")
    before = contents(tmp_path / "c")
    for change in (dict(stored="int8"), dict(rows=make_rows(8)), dict(tgt=target("llama"))):
        with pytest.raises(InputError, match=r"was made with other settings: .*; use another --out"):
            make(tmp_path / "c", **change)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "mine.txt").write_text("x")
    with pytest.raises(InputError, match=r"is not empty \('mine.txt'\)"):
        make(tmp_path / "d")
    assert contents(tmp_path / "c") == before and contents(tmp_path / "d") == {"mine.txt": b"x"}


def test_too_little_room_is_said_before_anything_is_computed(tmp_path, monkeypatch):
    monkeypatch.setattr(feature_build.shutil, "disk_usage", lambda p: shutil._ntuple_diskusage(10**9, 10**9, 100))
    with pytest.raises(InputError, match=r"needs another .* GB .* free"):
        make(tmp_path / "c")
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["manifest.json"]


# -- useless rows ------------------------------------------------------------------------------------------------------


def spoilt(tgt, fault, at):
    """packed_features with a fault in the rows of length `at`."""
    original = tgt.packed_features

    def call(tokens, counts, layers):
        features, hidden = original(tokens, counts, layers)
        D = tgt.vocab.dim
        for part in {"layer": features[:, D:], "hidden": hidden}[fault[1]].split(counts):
            if len(part) == at:
                part[2:3] = {"non-finite": torch.inf}.get(fault[0], part[2:3])
                part[:] = {"all-zero": torch.zeros(()), "constant": part[:1].clone()}.get(fault[0], part)
        return features, hidden

    return call


@pytest.mark.parametrize("place", ["layer", "hidden"])
@pytest.mark.parametrize("kind", FAULTS)
def test_useless_rows_are_refused_counted_and_left_out(run, tmp_path, monkeypatch, kind, place):
    """In one layer or in the hidden state. Live and from a cache alike: the same losses on the rest, packed together
    with the useless ones or not, and gradients stay finite."""
    file, _ = run
    config = load_config(file, "train.target_dtype=float32")
    rows, _, identity = read_rows(config)
    tgt = Target.load(config.target, device="cpu", dtype="float32")
    at = int(rows.lengths[3])
    bad = int((rows.lengths == at).sum())
    tgt.packed_features = spoilt(tgt, (kind, place), at)
    assert build(rows, tgt, identity, tmp_path / "c", "float32", 3000).refused == {kind: bad}
    data = training_data(load_config(file, "train.target_dtype=float32", f"data.features={tmp_path / 'c'}"))
    assert len(data.rows) == len(rows) - bad and data.dropped[f"{kind} features"] == bad
    assert at not in data.rows.lengths
    live = Live(tgt, LAYERS, rows)
    batch = Batches(rows, live, torch.device("cpu")).batch([(0, tuple(range(len(rows))))])
    assert batch.features.isfinite().all() and batch.hidden.isfinite().all()
    lengths = rows.lengths.tolist()
    supervised = [part.any() for part in batch.loss_mask[0].split(lengths)]
    assert supervised == [n != at for n in lengths]
    with pytest.raises(InputError, match=rf"{bad} of 10 rows are non-finite, all-zero or constant, more than"):
        live.check(0.0)
    live.check(0.01)
    with pytest.raises(InputError, match=rf"{bad} of 10 rows"):
        training_data(load_config(file, f"data.features={tmp_path / 'c'}", "data.max_refused=0"))


def test_training_stops_past_the_threshold(run, tmp_path, monkeypatch):
    """A live run whose target answers NaN to everything ends with one line instead of a drafter; nothing is saved."""
    file, _ = run
    original = Target.packed_features

    def nan(self, *args):
        return tuple(x * torch.nan for x in original(self, *args))

    monkeypatch.setattr(Target, "packed_features", nan)
    with pytest.raises(InputError, match="its weights, its dtype"):
        for _ in fit(load_config(file, f"out={tmp_path / 'o'}", "data.max_refused=0.001")):
            pass
    assert not (tmp_path / "o" / "drafter").exists() and not (tmp_path / "o" / "checkpoints").exists()


def test_faults_are_of_rows_not_of_positions():
    """One constant or zero position in a good row is no fault, nor is a row of one position."""
    x = torch.randn(8, 2 * 4)
    h = torch.randn(8, 3)
    x[1], h[2] = 0, h[1]
    found = faults(x, h, [4, 3, 1], 2)
    assert not found.any() and found.shape == (3, 3)
    x[4:7, 4:] = 1.5
    assert faults(x, h, [4, 3, 1], 2).tolist() == [[False] * 3, [False, False, True], [False] * 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_faults_are_what_they_say(dtype):
    """Against the words taken literally, over 200 draws of few values, so that rows are often constant, zero, alike up
    to sign or to their largest channel, and sometimes neither."""
    draw = torch.Generator().manual_seed(1)
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 3e38, 1e-38, 1e-40, torch.inf, torch.nan], dtype=dtype)
    counts, layers, dim, seen = [3, 1, 2], 2, 2, set()
    for _ in range(200):
        few = torch.randperm(len(values), generator=draw)[: int(torch.randint(1, 3, (), generator=draw))]
        pick = torch.randint(0, len(few), (6, (layers + 1) * dim), generator=draw)
        x = values[few][pick]
        found = faults(x[:, : layers * dim], x[:, layers * dim :], counts, layers)
        for row, told in zip(x.unflatten(-1, (layers + 1, dim)).split(counts), found.tolist()):
            parts = row.unbind(1)
            zero = [bool((p == 0).all()) for p in parts]
            alike = [len(p) > 1 and bool((p == p[0]).all()) and not z for p, z in zip(parts, zero)]
            assert told == [not bool(row.isfinite().all()), any(zero), any(alike)]
            seen.add(tuple(told))
    assert len(seen) >= 5


# -- the command -------------------------------------------------------------------------------------------------------


def command(capsys, name, *args):
    """Exit code, standard output, and the lines of standard error that are no progress bar."""
    with pytest.raises(SystemExit) as exit:
        main(lambda: data_command([name, *map(str, args)]))
    out, err = capsys.readouterr()
    return exit.value.code, out, [line for line in err.splitlines() if line.startswith("error:")]


def test_the_command(run, tmp_path, capsys):
    """It says rows, bytes and bytes a token; --check reads all of it; bad input is one line and exit code 2, and where
    weights are not needed to find it, none are read."""
    file, _ = run
    made = ("--out", tmp_path / "c")
    code, out, _ = command(capsys, "features", "--config", file, *made, "--shard-mb", "0.003", "--dtype", "int8")
    found = re.search(
        r"(\d+) of \1 shards, .* MB of int8, 10 rows, (\d+) tokens, (\d+) bytes a token; refused: nothing", out
    )
    assert code == 0 and found and int(found[1]) > 2
    use = f"data.features={tmp_path / 'c'}"
    code, out, _ = command(capsys, "features", "--config", file, "--set", use, "--check")
    assert code == 0 and "every byte read and right" in out
    flip(tmp_path / "c" / shard_name(1), -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "load", None)
        for args in ((*made, "--check"), (*made, "--dtype", "float32"), ("--out", "/proc/no"), (), ("--shard-mb", "0")):
            code, out, err = command(capsys, "features", "--config", file, *args)
            assert code == 2 and len(err) == 1, args


def test_plan_says_what_features_would_take(run, tmp_path, capsys, monkeypatch):
    """Counts by proportion from every k-th record; bytes as a cache then has; the paper's 38 TB for 1.24 G tokens of
    Qwen3-4B without data or weights. Nothing is written."""
    file, folder = run
    before = sorted(folder.rglob("*"))
    rows = [{"prompt_ids": [1, 2], "answer_ids": [3] * 18}] * 40 + [{"prompt_ids": [1], "answer_ids": [2] * 39}] * 40
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"id": i, **r}) + "\n" for i, r in enumerate(rows)))
    code, out, _ = command(
        capsys, "plan", "--config", file, "--set", f"data.path={tmp_path / 'd.jsonl'}", "--sample", 20, "--seconds", 0.2
    )
    assert code == 0 and re.search(r"records +80  of which 20 were read", out)
    assert re.search(r"tokens +2,400  95% of the positions", out) and re.search(
        r"rows +80  the longest read has 40", out
    )
    each = bytes_per_token(2, 32, "bfloat16", (18 * 40 + 39 * 40) / 2400)
    assert f"{each:,.0f} bytes a token" in out and re.search(r"target +[\d,]+  tokens a second on cpu in float32", out)
    assert re.search(r"live features .* in 10 epochs", out)
    monkeypatch.setattr(Target, "load", None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 2560}))
    whole = ("--config", "config/dspark/qwen3_4b.py", "--target-config", tmp_path / "config.json")
    code, out, _ = command(capsys, "plan", *whole, "--tokens", "1.24e9")
    assert code == 0 and re.search(r"bfloat16 +38.1 TB  30,724 bytes a token", out)
    assert re.search(r"int8 +22.7 TB  18,324 bytes a token", out)
    for args in (whole, ("--config", file, "--sample", 0), ("--config", file, "--set", "data.path=no.jsonl")):
        code, out, err = command(capsys, "plan", *args)
        assert code == 2 and len(err) == 1, args
    assert sorted(folder.rglob("*")) == before


@pytest.mark.slow
def test_two_processes_and_kills(run, tmp_path):
    """Two builders at once, both killed with SIGKILL twice, whatever they were writing, and started again: what they
    leave is what one uninterrupted builder makes."""
    file, _ = run
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(r) + "\n" for r in token_rows(6000, length=60)))

    def start(out):
        words = ["--config", file, "--set", f"data.path={rows}", "--shard-mb", "2", "--out", out]
        return subprocess.Popen([sys.executable, "-m", "deepspec.data", "features", *map(str, words)])

    made = tmp_path / "c"
    for shards in (2, 5):
        both = [start(made) for _ in "ab"]
        deadline = time.monotonic() + 120
        while len([*made.glob("shard-*")]) < shards and time.monotonic() < deadline:
            time.sleep(0.01)
        for process in both:
            process.kill()
            process.wait()
    assert look(made).missing > 2
    both = [start(made) for _ in "ab"]
    assert [process.wait() for process in both] == [0, 0]
    assert start(tmp_path / "straight").wait() == 0
    ours, theirs = (
        {name: data for name, data in contents(folder).items() if name.endswith(".safetensors")}
        for folder in (made, tmp_path / "straight")
    )
    assert ours == theirs and len(ours) > 8 and look(made, check=True).missing == 0
