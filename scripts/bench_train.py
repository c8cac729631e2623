"""Speed and memory of a training step, by part, beside the floor under it: the matrix products no step can do without.

    python scripts/bench_train.py --config config/dspark/tiny.py [--set data.path=FILE ...] [--steps 8] [--json FILE]

The floor is every product of the target's forward pass, of the drafter's forward and backward pass and of the
objective (the teacher's logits, of the kept tokens alone where a feature cache knows log Z, the slots' logits, their
gradients), timed alone in this run, right after the step it
belongs to, with that step's shapes, strides and dtypes, each on matrices of its own (in a step no product finds them in
a cache, where one repeated on the same has them: that takes half of the time); the objective's as whole products, not
in chunks, and every product into memory that is there already. Attention counts as its two plain products, forward and
backward. Everything else of a step is overhead. Steps are the training loop's own; a whole step, its floor and a step
by part take turns.
"""

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_objective import memory
from torch.utils._python_dispatch import TorchDispatchMode

import deepspec
from deepspec.allocator import keep_freed_memory
from deepspec.checked import InputError
from deepspec.config import load_config
from deepspec.modeling.devices import dtype_name
from deepspec.provenance import provenance
from deepspec.train.distributed import World
from deepspec.train.objective import _Slots
from deepspec.train.setup import build_drafter, prepare
from deepspec.train.share import passes, seeds, served
from deepspec.train.step import Stepper

Product = tuple[Any, ...]
"""('mm' or 'bmm', then shape, stride and dtype of both sides)."""
GROUPS = ("target", "drafter", "objective")


class Products(TorchDispatchMode):
    """Counts the matrix products that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Product] = Counter()

    def add(self, a: torch.Tensor, b: torch.Tensor, count: int = 1) -> None:
        def side(x: torch.Tensor) -> Product:
            return tuple(x.shape), tuple(x.stride()), x.dtype

        self.found["mm" if a.dim() == 2 else "bmm", side(a), side(b)] += count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in ("mm", "bmm"):
            self.add(args[0], args[1])
        elif name == "mkldnn::_linear_pointwise":  # packed weights (modeling/packed.py)
            rows = args[0].flatten(0, -2)
            self.add(rows, rows.new_empty(args[1].shape[0], args[1].shape[1]).t())
        elif name.removesuffix("_") in ("addmm", "baddbmm"):
            self.add(args[1], args[2])
        elif name.startswith("_scaled_dot_product") and name.endswith(("attention", "_for_cpu")):
            q, k, v = (x.reshape(-1, *x.shape[2:]) for x in self._heads(args[:3]))
            self.add(q, k.mT)
            self.add(q.new_empty(*q.shape[:2], k.shape[1]), v)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _heads(qkv: Any) -> list[torch.Tensor]:
        q, k, v = qkv
        group = q.shape[1] // k.shape[1]
        return [q, *(x.repeat_interleave(group, 1) for x in (k, v))]


def flops(product: Product) -> int:
    _, (a, *_), (b, *_) = product
    return 2 * torch.Size(a).numel() * b[-1]


def ready(product: Product, device: torch.device) -> Callable[[], Any]:
    """A product on tensors of its own, into a result that is there."""
    kind, *sides = product
    a, b = (torch.empty_strided(shape, stride, dtype=dtype, device=device).normal_() for shape, stride, dtype in sides)
    out = torch.empty(*a.shape[:-1], b.shape[-1], dtype=a.dtype, device=device)
    run = getattr(torch, kind)
    run(a, b, out=out)
    return lambda: run(a, b, out=out)


def timed(run: Callable[[], Any], device: torch.device) -> float:
    wait(device)
    began = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - began


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matrix_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the best of a few square products."""
    best = 0.0
    for n in (1024, 2048, 4096) if device.type == "cpu" else (4096, 8192):
        side = ((n, n), (n, 1), dtype)
        run = ready(("mm", side, side), device)
        best = max(best, 2 * n**3 / min(timed(run, device) for _ in range(5)))
    return best


class Bench:
    """A run's parts, stepped by hand."""

    def __init__(self, config: deepspec.Config) -> None:
        world = World.join(config.train.device)
        self.config, self.device = config, world.device
        if self.device.type == "cpu":
            keep_freed_memory()
        self.parts = prepare(config, world.device)
        self.loader, self.batches = self.parts.data.loader(), self.parts.data.batches(self.parts.target)
        self.stepper = Stepper(config, world, self.parts.drafter, self.loader, self.batches, 1 << 30, lambda: False)
        self.dtype = self.stepper.dtype
        # what is compiled hides its products
        self.eager = build_drafter(config, self.parts.target, self.parts.drafter.vocab)

    def whole(self, step: int) -> tuple[float, Any]:
        report: list[Any] = []
        seconds = timed(lambda: report.append(self.stepper.step(step)), self.device)
        return seconds, report[0]

    def by_part(self, step: int) -> dict[str, float]:
        """Seconds of a step's parts; the device is waited for after each."""
        spent: Counter[str] = Counter()
        module, stepper = self.stepper.wrapped.module, self.stepper

        def around(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                wait(self.device)
                began = time.perf_counter()
                result = run(*args, **kwargs)
                wait(self.device)
                spent[name] += time.perf_counter() - began
                return result

            return call

        old = module.forward, stepper.ahead.batch, stepper.optimizer.step
        waited = stepper.ahead.waited
        module.forward = around("drafter forward and loss", old[0])  # type: ignore[method-assign]
        stepper.ahead.batch = around("target", old[1])  # type: ignore[method-assign]
        stepper.optimizer.step = around("optimiser", old[2])  # type: ignore[method-assign]
        total, _ = self.whole(step)
        module.forward, stepper.ahead.batch, stepper.optimizer.step = old  # type: ignore[method-assign]
        data = stepper.ahead.waited - waited
        spent["target"] -= data
        return {"data": data, **spent, "backward and the rest": total - data - sum(spent.values())}

    def products(self, step: int) -> dict[str, Counter[Product]]:
        """Products of a step by group."""
        found = {name: Products() for name in GROUPS}
        cast = torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16)
        drafter = self.eager
        for share in passes(served(self.loader, step), 0, 1, self.stepper.micro_batch):
            with found["target"]:
                batch = self.batches.batch([s.picked for s in share])
            anchors, real = drafter.anchors(batch, seeds(self.config.seed, share).to(self.device))
            slots = _Slots.of(batch, anchors, real, drafter.num_slots)
            with found["drafter"], cast:
                states = drafter.hidden(batch, anchors)
                outputs = [states, drafter.rows(states, slots.prev)]
                outputs = [x for x in outputs if x.numel() and x.requires_grad]
                torch.autograd.backward(outputs, [torch.zeros_like(x) for x in outputs])
            self._objective(found["objective"], len(slots.index), len(slots.place.unique()), batch.log_z is None)
        return {name: mode.found for name, mode in found.items()}

    def _objective(self, found: "Products", n: int, positions: int, all_tokens: bool) -> None:
        """The products of n slots over so many distinct positions, each as a whole. all_tokens: whether the teacher's
        logits are needed over all tokens."""
        vocab, out = self.eager.vocab, self.eager.rows_out

        def empty(*shape: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device="meta")

        head, seen = vocab.head.dtype, vocab.size if all_tokens else vocab.draft_size
        found.add(empty(positions, vocab.dim, dtype=head), empty(seen, vocab.dim, dtype=head).t())
        found.add(empty(n, vocab.dim), empty(vocab.draft_size, vocab.dim).t())
        found.add(empty(n, vocab.draft_size), empty(vocab.draft_size, vocab.dim))
        if out is not None:
            found.add(empty(n, out.shape[1]), empty(*out.shape).t())
            found.add(empty(n, out.shape[0]), empty(*out.shape))
            found.add(empty(n, out.shape[0]).t(), empty(n, out.shape[1]))

    def floor(self, products: dict[str, Counter[Product]]) -> dict[str, float]:
        """Seconds of all products of a step, each as often as the step has it and on matrices of its own: like those
        of a step, they come from memory, not from the cache that the one before has filled."""
        spent = {}
        for name, counted in products.items():
            runs = [ready(product, self.device) for product in counted.elements()]
            random.Random(0).shuffle(runs)
            spent[name] = timed(lambda runs=runs: [run() for run in runs], self.device)  # type: ignore[misc]
        return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", nargs="+", action="extend", default=[])
    parser.add_argument(
        "--steps", type=int, default=8, help="measured; each is a whole step, its floor, a step by part"
    )
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()

    bench = Bench(load_config(args.config, *args.set))
    device, cuda = bench.device, bench.device.type == "cuda"
    for step in range(args.warmup):
        bench.whole(step)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    rows, parts, last = [], [], args.warmup
    for step in range(last, last + 2 * args.steps, 2):
        seconds, report = bench.whole(step)
        products = bench.products(step)
        floor = bench.floor(products)
        parts.append(bench.by_part(step + 1))
        work = sum(flops(p) * n for counted in products.values() for p, n in counted.items())
        slots = sum(float(c) for name, (_, c) in report.sums.items() if name.startswith("accept@"))
        rows.append({"seconds": seconds, "floor": sum(floor.values()), **{f"floor {k}": v for k, v in floor.items()},
                     "tokens": report.tokens, "slots": slots, "flops": work, "waited": report.waited})  # fmt: skip
    if not rows:
        raise InputError("--steps must be at least 1")

    def middle(key: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(map(key, rows))

    peak = matrix_peak(device, bench.dtype)
    figures = {
        "config": args.config,
        "set": args.set,
        "device": torch.cuda.get_device_name(device) if cuda else f"CPU, {torch.get_num_threads()} threads",
        "precision": dtype_name(bench.dtype),
        "versions": provenance(),
        "seconds_a_step": middle(lambda r: r["seconds"]),
        "floor_seconds": middle(lambda r: r["floor"]),
        "floor_by_group": {name: middle(lambda r, n=name: r[f"floor {n}"]) for name in GROUPS},  # type: ignore[misc]
        "times_the_floor": middle(lambda r: r["seconds"] / r["floor"]),
        "tokens_per_second": middle(lambda r: r["tokens"] / r["seconds"]),
        "slots_per_second": middle(lambda r: r["slots"] / r["seconds"]),
        "flops_per_second": middle(lambda r: r["flops"] / r["seconds"]),
        "matrix_peak": peak,
        "waits_for_data": sum(r["waited"] for r in rows) / sum(r["seconds"] for r in rows),
        "parts": {name: statistics.median(p.get(name, 0.0) for p in parts) for name in parts[0]},
        "peak_memory_mb": (torch.cuda.max_memory_allocated() if cuda else memory("VmHWM")) / 2**20,
    }
    f = figures
    print(
        f"{args.config} on {f['device']}, {f['precision']}: {f['seconds_a_step']:.3f} s a step, "
        f"{f['times_the_floor']:.2f} x its floor of {f['floor_seconds']:.3f} s\n"
        f"{f['tokens_per_second']:.0f} tokens/s, {f['slots_per_second']:.0f} slots/s, "
        f"{f['flops_per_second'] / 1e9:.0f} GFLOP/s of products, {f['flops_per_second'] / peak:.0%} of the measured "
        f"peak of {peak / 1e9:.0f}; {f['waits_for_data']:.1%} waiting for data; "
        f"peak memory {f['peak_memory_mb']:.0f} MB"
    )
    for title, values in (("parts", figures["parts"]), ("floor", figures["floor_by_group"])):
        print(f"{title}: " + ", ".join(f"{name} {value:.3f} s" for name, value in values.items()))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
