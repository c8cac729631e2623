"""Memory and time of the objective against its naive twin, each side in a fresh process.

    python scripts/bench_objective.py [--vocab 151936 --dim 256 --slots 448 --rank 64 --chunk 64] [--log-z]

Peak memory is VmHWM of the whole process less what it held before the objective ran (interpreter, parameters) and less
the gradients of parameters; both sides do the same products on the same numbers, and loss and gradients are compared.
With --log-z ours knows the log Z of the teacher's logits, as from a feature cache.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


def memory(key: str) -> int:
    """VmHWM or VmRSS of this process, bytes; where there is no /proc, the peak from getrusage."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def side(args: argparse.Namespace) -> None:
    """One side, in this process: forward and backward, a warm-up on a few slots first."""
    import torch

    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from twins import naive_divergence

    from deepspec.config import LossConfig
    from deepspec.modeling.vocab import Vocab
    from deepspec.train.divergence import Divergence, block_terms

    torch.manual_seed(0)
    V, D, N, R = args.vocab, args.dim, args.slots, args.rank
    positions = args.slots * 2 // 3  # in training several blocks look at one position
    head = torch.randn(V, D) * D**-0.5
    vocab = Vocab(head, head)
    h, r = (torch.randn(N, D) * 2).requires_grad_(), torch.randn(N, R, requires_grad=True)
    w2 = torch.nn.Parameter(torch.randn(V, R) * 0.1)
    teacher = torch.randn(positions, D) * 2
    place = torch.randint(0, positions, (N,)).sort().values
    label, weight = torch.randint(0, V, (N,)), torch.rand(N)
    config = LossConfig(ce=0.1, tv=0.9, chunk=args.chunk)
    how = config, True, block_terms, vocab.log_z(teacher) if args.log_z else None

    def run(cut: slice) -> torch.Tensor:
        if args.side == "ours":
            loss = Divergence.apply(h[cut], r[cut], w2, vocab, teacher, place[cut], label[cut], weight[cut], *how)[0]
        else:
            loss = naive_divergence(h[cut], r[cut], w2, vocab, teacher[place[cut]], label[cut], weight[cut], config)[0]
        loss.backward()
        return loss.detach()

    run(slice(0, 2))  # code, kernels and threads are loaded; not the memory of a whole run
    grads = (h, r, w2)
    for x in grads:
        x.grad = None
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    began = time.perf_counter()
    loss = run(slice(None))
    seconds = time.perf_counter() - began
    kept = sum(x.grad.numel() * x.grad.element_size() for x in grads)
    peak = memory("VmHWM") - before - kept
    torch.save({"loss": loss, "grads": [x.grad for x in grads]}, args.result)
    print(json.dumps({"peak_mb": peak / 2**20, "seconds": seconds, "loss": loss.item()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("vocab", 151936), ("dim", 256), ("slots", 448), ("rank", 64), ("chunk", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--log-z", action="store_true", help="ours knows the teacher's log Z")
    parser.add_argument("--repeats", type=int, default=3, help="fresh processes a side, interleaved; medians are shown")
    parser.add_argument("--side", choices=("ours", "naive"), help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        return side(args)
    import torch

    runs: dict[str, list[dict]] = {"naive": [], "ours": []}
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.repeats):
            for name in runs:
                path = f"{folder}/{name}.pt"
                options = [f"--{k}={getattr(args, k)}" for k in ("vocab", "dim", "slots", "rank", "chunk")]
                options += ["--log-z"] * args.log_z
                command = [sys.executable, __file__, "--side", name, "--result", path, *options]
                out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                runs[name].append(json.loads(out.splitlines()[-1]))
                results[name] = torch.load(path)
    median = {
        n: {k: sorted(r[k] for r in rs)[len(rs) // 2] for k in ("peak_mb", "seconds", "loss")} for n, rs in runs.items()
    }
    a, b = results["naive"], results["ours"]
    print(
        f"V {args.vocab}, D {args.dim}, {args.slots} slots, rank {args.rank}, float32, chunk {args.chunk}, "
        f"{torch.get_num_threads()} threads"
    )
    for name, m in median.items():
        print(f"{name:6s} peak {m['peak_mb']:8.1f} MB   {m['seconds']:6.2f} s   loss {m['loss']:.4f}")
    print(
        f"memory: 1/{median['naive']['peak_mb'] / median['ours']['peak_mb']:.1f}   "
        f"time: {median['ours']['seconds'] / median['naive']['seconds']:.2f}x"
    )
    print(
        f"loss differs by {abs(float(a['loss'] / b['loss']) - 1):.1e} relative",
        end="; gradients (largest error / largest entry):",
    )
    for name, x, y in zip(("hidden", "rows", "head"), a["grads"], b["grads"]):
        print(f" {name} {float((x - y).abs().max() / x.abs().max()):.1e}", end="")
    print()


if __name__ == "__main__":
    main()
