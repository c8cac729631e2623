"""Laws of training on several processes: it is the training of one, however the rows are shared out.

Groups of two processes over gloo; each group does all of its runs, because starting one costs more than a run.
"""

import itertools

import pytest
import torch
import worlds
from helpers import hf_model, write_run

import deepspec
from deepspec import ConfigError, load_config
from deepspec.config import as_dict
from deepspec.data.loader import Loader
from deepspec.train import checkpoint, share
from deepspec.train.distributed import World

KINDS = {
    "vanilla": (),
    "no confidence loss": ("loss.confidence=0",),
    "document": ("loss.reduce=document",),
    "bf16": ("train.precision=bf16",),
    "muon": ("train.optimizer=muon",),
    "one row, two processes": ("train.batch_size=1", "train.micro_batch=1"),
    "reduced vocabulary": ("drafter.draft_vocab_size=20",),
    "eagle3": (),
}
UNEVEN = ("train.batch_size=5", "train.micro_batch=1", "train.clip=0.05", "train.max_steps=3")
"""Five rows of different lengths: three passes in one process, two in the other; the gradient is clipped."""

EAGLE3 = """
from dataclasses import replace
from pathlib import Path
import deepspec

run = deepspec.load_config(Path(__file__).parent / "run.py")
drafter = deepspec.Eagle3Config(block_size=3, target_layer_ids=(0, 2), norm_output=True, qk_norm=True)
config = replace(run, drafter=drafter, loss=replace(run.loss, kl=1.0, confidence=0.0))
"""


def jobs(folder, name: str) -> list[tuple]:
    file = {"eagle3": "eagle3.py"}
    runs = [(file.get(kind, "run.py"), f"{kind}-{how}", (*UNEVEN, *changes, f"train.sharding={how}"))
            for kind, changes in KINDS.items() for how in (["ddp"] if name == "one" else ["ddp", "fsdp"])]  # fmt: skip
    return [(folder / path, (f"out={folder / name / run}", *overrides), None) for path, run, overrides in runs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("many")
    write_run(root)
    (root / "eagle3.py").write_text(EAGLE3)
    return root


@pytest.fixture(scope="module")
def one(folder):
    """What one process makes of every kind of run: its reports by kind."""
    found = worlds.train(jobs(folder, "one"))
    return {kind: run["reports"] for kind, run in zip(KINDS, found)}


@pytest.fixture(scope="module")
def two(folder):
    """What two processes make of the same, held whole (ddp) and split (fsdp): {(kind, how): (reports of each rank)}."""
    ranks = worlds.together(2, worlds.train, jobs(folder, "two"))
    names = list(itertools.product(KINDS, ("ddp", "fsdp")))
    return {name: tuple(rank[i] for rank in ranks) for i, name in enumerate(names)}


@pytest.mark.parametrize("own", [torch.bfloat16, torch.float32], ids=str)
def test_processes_on_unlike_machines_are_told(tmp_path, own):
    """Where 'auto' comes to another dtype in one of them, all are told, of a precision or a target's; where both are
    said they train."""
    hf_model().to(own).save_pretrained(tmp_path / "target")
    file = write_run(tmp_path)
    auto = (f"out={tmp_path / 'auto'}", "train.precision=auto")
    slow = "fp32 with a target in float32"
    quick = f"bf16 with a target in {str(own).removeprefix('torch.')}"
    for found in worlds.together(2, worlds.train_on_unlike_machines, file, auto):
        assert found == f"processes would train in {quick} and {slow}: say train.precision and train.target_dtype"
    said = (f"out={tmp_path / 'said'}", "train.precision=fp32", "train.target_dtype=float32", "train.max_steps=1")
    assert worlds.together(2, worlds.train_on_unlike_machines, file, said) == ["", ""]


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_are_one(folder, one, two, kind, how):
    """Every number reported is the one process', on both processes, and so are the clipped gradient (the optimiser's
    first momentum) to 1e-5 of its norm, and the weights."""
    ranks = two[kind, how]
    tight = kind != "bf16"  # there, a sum of other parts rounds otherwise; split, Muon's bfloat16 products do
    most = {"exp_avg": 1e-5, "weight": 1e-4} if (kind, how) != ("muon", "fsdp") else {"exp_avg": 1e-3, "weight": 1e-3}
    for mine, first, second in zip(one[kind], *(r["reports"] for r in ranks), strict=True):
        assert first == second and first.keys() == mine.keys()
        assert first == pytest.approx(mine, rel=1e-4 if tight else 2e-2, abs=1e-6 if tight else 1e-3)
        assert 0 <= first["accept@0"] <= 1 <= first["tau"] <= 5 and first["grad_norm"] > 0.05
    seen, expected = (worlds.state(folder / name, 3) for name in (f"two/{kind}-{how}", f"one/{kind}-ddp"))
    assert seen.keys() == expected.keys()
    if tight:
        for part, share_of_norm in most.items():
            a, b = (torch.cat([v.flatten() for k, v in s.items() if k.endswith(part)]) for s in (seen, expected))
            assert (a - b).norm() < share_of_norm * b.norm(), part


def test_gradients_after_one_step(folder, tmp_path):
    """One step alone, three passes of uneven rows in each process and the norm clipped: gradients to 1e-5 of one
    process'. What is compared is what the optimiser took in."""
    common = ("train.batch_size=6", "train.clip=0.05", "train.max_steps=1")
    (report,) = worlds.train([(folder / "run.py", (*common, "train.micro_batch=2", f"out={tmp_path / 'one'}"), None)])
    many = [
        (folder / "run.py", (*common, "train.micro_batch=1", f"train.sharding={how}", f"out={tmp_path / how}"), None)
        for how in ("ddp", "fsdp")
    ]
    worlds.together(2, worlds.train, many)
    assert report["reports"][0]["grad_norm"] > 0.05
    expected = worlds.state(tmp_path / "one", 1)
    for how in ("ddp", "fsdp"):
        seen = worlds.state(tmp_path / how, 1)
        for name, value in expected.items():
            if name.endswith("exp_avg"):
                assert (seen[name] - value).norm() <= 1e-5 * value.norm() + 1e-9, (how, name)


# -- rows and their seeds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "size", "micro"), [*itertools.product((1, 4, 7), (1, 2, 3, 8), (1, 2, 5))])
def test_shares_are_the_step(batch, size, micro):
    """The passes of all processes hold the sequences of the step once each; none is larger than micro_batch, no process
    is without a pass, and what is added is marked as idle."""
    loader = Loader([(i,) for i in range(9)], batch, seed=0)
    for step in range(3):
        whole = share.served(loader, step)
        assert [s.picked for s in whole] == loader.batch(step) and not any(s.idle for s in whole)
        assert [s.epoch for s in whole] == [(step * batch + j) // 9 for j in range(batch)]
        parts = [share.passes(whole, rank, size, micro) for rank in range(size)]
        assert all(1 <= len(p) <= micro for part in parts for p in part)
        real = [s for part in parts for p in part for s in p if not s.idle]
        assert sorted(s.picked for s in real) == sorted(s.picked for s in whole) and len(real) == batch
        sizes = [sum(len(p) for p in part) for part in parts]
        assert max(sizes) - min(sizes) <= 1


def test_every_bit_counts_in_a_seed():
    """Anchor seeds differ by run seed (each of 64 bits, and the sign), epoch and row; a row's depends on nothing else;
    all are valid longs."""
    at = [share.Served(e, (i, (i,))) for e in range(20) for i in range(50)]
    base = share.seeds(3, at)
    assert base.dtype == torch.long and base.min() >= 0 and len(base.unique()) == len(at)
    for bit in range(64):
        other = share.seeds(3 ^ 1 << bit, at)
        assert not torch.isin(other, base).any(), bit
    assert not torch.isin(share.seeds(-3, at), base).any()
    assert torch.equal(share.seeds(3, at[37:40]), base[37:40])
    halves = torch.stack([base & 0xFFFF, base >> 16 & 0xFFFF, base >> 32 & 0xFFFF, base >> 46]).double() / 2**16
    assert (halves.mean(1) - 0.5).abs().max() < 0.05


# -- elastic -----------------------------------------------------------------------------------------------------------


def test_another_number_of_processes_goes_on(folder, tmp_path):
    """Two processes, then one with another micro-batch, then two that split the weights: every row once an epoch, the
    same learning rates, and the uninterrupted run's losses to 1e-4."""
    settings = ("train.max_steps=None", "train.epochs=4", "train.batch_size=5", "train.micro_batch=1")
    straight = worlds.train([(folder / "run.py", (*settings, f"out={tmp_path / 'straight'}"), None)])[0]
    job = (folder / "run.py", (*settings, f"out={tmp_path / 'out'}"))
    parts = [worlds.together(2, worlds.train, [(*job, 3)])]
    parts += [[worlds.train([(job[0], (*job[1], "train.micro_batch=5"), 6)])]]
    parts += [worlds.together(2, worlds.train, [(job[0], (*job[1], "train.sharding=fsdp"), None)])]
    reports = [r for part in parts for r in part[0][0]["reports"]]
    assert [r["step"] for r in reports] == list(range(1, 9)) == [r["step"] for r in straight["reports"]]
    for ours, theirs in zip(reports, straight["reports"]):
        assert ours["lr"] == theirs["lr"] and ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    served = [[i for rank in part for i in rank[0]["served"]] for part in parts]
    assert [len(s) for s in served] == [15, 15, 10]
    flat = [i for s in served for i in s]
    assert sorted(flat) == sorted(list(range(10)) * 4)  # four epochs of ten rows; the parts end within and at epochs
    assert sorted(flat[:10]) == sorted(straight["served"][:10]) or sorted(flat[:15]) == sorted(straight["served"][:15])
    a, b = (worlds.state(tmp_path / name, 8) for name in ("out", "straight"))
    for name, value in b.items():
        torch.testing.assert_close(a[name], value, atol=1e-4, rtol=1e-3)


def test_the_same_processes_go_on_bit_equal(folder, tmp_path):
    """Two processes stopped and started again end in the same bits as two that were not."""
    job = (folder / "run.py", ("train.batch_size=5", "train.micro_batch=1"))
    for how in ("ddp", "fsdp"):
        a, b = ((job[0], (*job[1], f"train.sharding={how}", f"out={tmp_path / how / x}")) for x in "ab")
        worlds.together(2, worlds.train, [(*a, None), (*b, 2), (*b, None)])
        one, two = (worlds.state(tmp_path / how / x, 6) for x in "ab")
        assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def test_a_device_of_several_is_refused_under_a_launcher(monkeypatch):
    """Under a launcher a process' device is the launcher's choice."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(deepspec.InputError, match="names one device"):
        World.join("cpu:0")


def test_how_weights_are_held_may_change(folder):
    """micro_batch and sharding are no part of what a run is; a batch size is."""
    base = as_dict(load_config(folder / "run.py"))
    for free in ("train.micro_batch=4", "train.sharding=fsdp"):
        assert checkpoint.differ(base, as_dict(load_config(folder / "run.py", free))) == []
    changed = as_dict(load_config(folder / "run.py", "train.batch_size=8"))
    assert checkpoint.differ(base, changed) == ["train.batch_size: 4 -> 8"]
    with pytest.raises(ConfigError):
        load_config(folder / "run.py", "train.sharding=zero")
