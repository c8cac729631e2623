"""Time and memory of one training step of each drafter, next to its matrix floor and to a peer.

    python scripts/bench_step.py [--peer PYTHON] [--repeats 5] [--kinds dspark dflash eagle3]

A step is forward, objective and backward at width 256, vocabulary 4096, 512 positions, three tapped layers: DSpark and
DFlash with two layers and 64 anchors x 7, Eagle3 unrolled seven times from every position; float32, one thread.

The floor is the matrix products of such a step as it is usually written, at the same sizes, alone, into memory that is
there: every trained matrix three times (its product, the gradient by its input where something before it is trained,
and by itself), the frozen head twice, the teacher's once for each position that some slot looks at, attention over
visible places and within blocks, two products forward and four backward. Left out, so that the floor is rather too low:
what norms, softmaxes, gates and the optimiser do, the confidence head's one column, the few keys of a row's own slots
(Eagle3), scores made a second time. `least` is the same with distinct inputs alone: a token's part of Eagle3's queries,
keys and values is the same in all slots, and so is that of the mask token in a block drafter's first layer.

Times are CPU time; all alternate in one process, and medians are shown. Peak memory is what the process holds at most
above what it held before the first step.

The allocator of both processes keeps what is freed, as that of a training run does (deepspec/allocator.py).

--peer is a Python with speculators 0.9.0; its DSpark and Eagle3 run the same sizes, in turns with ours, a process each.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
ROOT = Path(__file__).parent.parent
D, V, T, TAPS, MLP, HEADS, KV_HEADS, HEAD, SLOTS, ANCHORS, RANK, LAYERS = 256, 4096, 512, 3, 768, 4, 2, 64, 7, 64, 64, 2
BATCH = {"seed": 0, "embedding": 0.02, "head": 0.05}
KINDS = ("dspark", "dflash", "eagle3")
KEEP_FREED = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(1 << 30))


def peak_memory() -> float:
    """MB this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ours(kind: str) -> Callable[[], float]:
    """A step of this project's drafter; returns its loss."""
    import torch

    sys.path.insert(0, str(ROOT))
    from deepspec import Batch, DFlashConfig, DSparkConfig, Eagle3Config, LossConfig, Objective
    from deepspec.modeling.spec import BlockSpec
    from deepspec.modeling.vocab import Vocab

    torch.manual_seed(BATCH["seed"])
    inv_freq = tuple((1e4 ** (-torch.arange(0, HEAD, 2) / HEAD)).tolist())
    spec = BlockSpec(
        dim=D, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD, mlp_dim=MLP, inv_freq=inv_freq, attn_scale=HEAD**-0.5
    )
    vocab = Vocab(torch.randn(V, D) * BATCH["embedding"], torch.randn(V, D) * BATCH["head"])
    taps = {"block_size": SLOTS, "target_layer_ids": (1, 3, 5)}
    block = {**taps, "num_draft_layers": LAYERS, "mask_token_id": 4, "num_anchors": ANCHORS}
    config, loss = {
        "dspark": (
            DSparkConfig(**block, markov_rank=RANK), LossConfig(ce=0.1, tv=0.9, confidence=1.0, slot_decay=0.78)
        ),
        "dflash": (DFlashConfig(**block), LossConfig(ce=1.0, slot_decay=0.78)),
        "eagle3": (Eagle3Config(**taps), LossConfig(kl=1.0, slot_decay=0.8, reduce="document")),
    }[kind]  # fmt: skip
    drafter = config.build(spec, vocab)
    objective = Objective(drafter, loss)
    tokens = torch.randint(0, V, (1, T))
    batch = Batch(tokens, tokens >= 0, torch.randn(1, T, TAPS * D), torch.randn(1, T, D))

    def step() -> float:
        drafter.zero_grad(set_to_none=True)
        total, weight, _ = objective(batch)
        (total / weight).backward()
        return float(total.detach() / weight)

    return step


def products(kind: str, *, distinct: bool) -> list[tuple[int, int, int, int, int]]:
    """The floor, of `distinct` inputs or all, as (how often, B, M, K, N): B products of [M, K] and [K, N] at once."""
    found: list[tuple[int, int, int, int, int]] = []

    def linear(rows: int, inputs: int, outputs: int, times: int = 1, *, back: bool = True, train: bool = True) -> None:
        """A matrix: its product, the gradient by its input (back) and by itself (train)."""
        found.append((times, 1, rows, inputs, outputs))
        found.extend([(times, 1, rows, outputs, inputs)] if back else [])
        found.extend([(times, 1, outputs, rows, inputs)] if train else [])

    def attention(rows: int, places: int, times: int, batch: int = 1) -> None:
        """Queries of the heads that share keys, over places: two products forward, four backward."""
        rows, batch = rows * HEADS // KV_HEADS, batch * KV_HEADS
        sizes = ((rows, HEAD, places), (rows, places, HEAD), (places, rows, HEAD))
        found.extend((2 * times, batch, *size) for size in sizes)

    qo, kv = HEADS * HEAD, 2 * KV_HEADS * HEAD
    linear(T, TAPS * D, D, back=False)
    if kind == "eagle3":
        A = T - 2
        slots = A * SLOTS - SLOTS * (SLOTS - 1) // 2  # blocks at the end are cut
        width = D if distinct else 2 * D
        if distinct:
            linear(T, D, qo + kv)
        linear(T, width, kv)
        linear(A, width, kv, SLOTS - 1)
        linear(A, width, qo, SLOTS)
        attention(A, T // 2, SLOTS)
        linear(A, qo, D, SLOTS)
        linear(A, D, MLP, 2 * SLOTS)
        linear(A, MLP, D, SLOTS)
        positions = A
    else:
        slots = ANCHORS * SLOTS
        linear(T, D, kv, LAYERS)
        if distinct:
            linear(ANCHORS + 1, D, qo + kv)
        linear(slots, D, kv, LAYERS - distinct)
        linear(slots, D, qo, LAYERS - distinct)
        attention(slots, T // 2, LAYERS)
        attention(SLOTS, SLOTS, LAYERS, ANCHORS)
        linear(slots, qo, D, LAYERS)
        linear(slots, D, MLP, 2 * LAYERS)
        linear(slots, MLP, D, LAYERS)
        positions = round(T * (1 - (1 - SLOTS / T) ** ANCHORS))  # distinct ones that blocks at random places look at
    linear(positions, D, V, back=False, train=False)
    linear(slots, D, V, train=False)
    if kind == "dspark":
        linear(slots, RANK, V)
    return found


def floor(kind: str, *, distinct: bool) -> Callable[[], float]:
    """Those products and nothing else, each into memory that is there."""
    import torch

    todo = []
    for times, batch, m, k, n in products(kind, distinct=distinct):
        parts = torch.randn(batch, m, k), torch.randn(batch, n, k).mT, torch.empty(batch, m, n)
        one = batch == 1
        todo.append((times, torch.mm if one else torch.bmm, *(x[0] if one else x for x in parts)))

    def step() -> float:
        for times, product, a, b, out in todo:
            for _ in range(times):
                product(a, b, out=out)
        return 0.0

    return step


def measure(kind: str, repeats: int) -> dict[str, float]:
    """CPU milliseconds of a step and of its floor in turns, loss and peak memory, in this process."""
    import torch

    torch.set_num_threads(1)
    step = ours(kind)
    before = peak_memory()
    loss = step()
    step()
    peak = peak_memory() - before
    runs = {"floor": floor(kind, distinct=False), "least": floor(kind, distinct=True), "ours": step}
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            began = time.process_time()
            run()
            times[name].append((time.process_time() - began) * 1e3)
    return {**{n: sorted(t)[len(t) // 2] for n, t in times.items()}, "peak_mb": peak, "loss": loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--repeats", type=int, default=5, help="steps a process")
    parser.add_argument("--rounds", type=int, default=3, help="processes a drafter, in turns with the peer's")
    parser.add_argument("--peer", metavar="PYTHON", help="a Python with speculators 0.9.0")
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.repeats)))
        return
    print("one thread, float32; CPU ms a step (medians), peak MB above the start")
    for kind in args.kinds:
        commands = {"ours": [sys.executable, __file__, "--one", kind, "--repeats", str(args.repeats)]}
        if args.peer and kind != "dflash":
            peer = str(Path(__file__).with_name("bench_step_peer.py"))
            commands["peer"] = [args.peer, peer, kind, str(args.repeats)]
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
        for _ in range(args.rounds):
            for name, command in commands.items():
                environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **KEEP_FREED}
                out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
                runs[name].append(json.loads(out.splitlines()[-1]))
        middle = {
            name: {key: sorted(r[key] for r in found)[len(found) // 2] for key in found[0]}
            for name, found in runs.items()
        }
        our = middle["ours"]
        line = f"{kind:7s} {our['ours']:7.1f}   floor {our['floor']:7.1f}   x {our['ours'] / our['floor']:.2f}"
        line += f"   least {our['least']:7.1f}   x {our['ours'] / our['least']:.2f}   peak {our['peak_mb']:6.0f} MB"
        if "peer" in middle:
            other = middle["peer"]
            line += f"   speculators {other['peer']:7.1f}   x {our['ours'] / other['peer']:.2f}"
            line += f"   peak {other['peak_mb']:6.0f} MB"
        print(line, flush=True)


if __name__ == "__main__":
    main()
