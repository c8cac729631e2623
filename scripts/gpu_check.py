"""Checks that want an accelerator: a JSON line a section, and all of them in one file. See gpu_check.sh.

A section that fails says so and the next one runs; one that would start after the time is up is skipped. The exit
status is 0 where every section that ran passed. Letters as in deepspec: T positions, A anchors, G slots, V vocabulary.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import deepspec
from deepspec.config import LossConfig
from deepspec.modeling.target import Target
from deepspec.modeling.vocab import Vocab
from deepspec.provenance import provenance
from deepspec.train import compiling
from deepspec.train.divergence import Divergence, block_terms

Result = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """The shape of target and drafter, and how much is done with them."""

    dim: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    taps: tuple[int, ...]
    draft_layers: int
    rank: int
    length: int
    anchors: int
    chunk: int
    new_tokens: int
    rows: int


QWEN3_4B = Size(2560, 9728, 36, 32, 8, 128, 151936, (1, 9, 17, 25, 33), 5, 256, 4096, 512, 1024, 96, 8)
TOY = Size(64, 128, 4, 4, 2, 16, 2048, (0, 2), 2, 8, 96, 12, 64, 12, 2)
SMALL = Size(256, 512, 2, 4, 2, 64, 1024, (0, 1), 2, 16, 600, 24, 128, 0, 2)
"""For comparisons with float64 and between backends; lengths that are no multiple of a tile."""


def target(size: Size, device: torch.device, dtype: torch.dtype) -> Target:
    """A Qwen3 of random weights, made on the device."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=size.dim, intermediate_size=size.mlp, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.kv_heads, head_dim=size.head_dim,
        vocab_size=size.vocab, max_position_embeddings=40960, tie_word_embeddings=True,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return Target(model.to(device=device, dtype=dtype), name="random")


def drafter_of(size: Size, tgt: Target, dtype: torch.dtype = torch.float32) -> Any:
    config = deepspec.DSparkConfig(
        block_size=7, target_layer_ids=size.taps, num_draft_layers=size.draft_layers, mask_token_id=size.vocab - 1,
        num_anchors=size.anchors, markov_rank=size.rank,
    )  # fmt: skip
    torch.manual_seed(1)
    return config.build(tgt.spec, tgt.vocab).to(device=tgt.device, dtype=dtype)


def batch_of(size: Size, device: torch.device, dtype: torch.dtype, *, rows: int = 1, length: int = 0, seed: int = 0,
             packed: bool = False) -> deepspec.Batch:  # fmt: skip
    """Random tokens and states, the first eighth of each row unsupervised."""
    g = torch.Generator().manual_seed(seed)
    T = length or size.length
    tokens = torch.randint(0, size.vocab - 1, (rows, T), generator=g)
    mask = torch.ones(rows, T, dtype=torch.bool)
    mask[:, : T // 8] = False
    place = torch.arange(T).expand(rows, -1)
    features = torch.randn(rows, T, len(size.taps) * size.dim, generator=g)
    hidden = torch.randn(rows, T, size.dim, generator=g)
    document, position = (place // (T // 2 + 1), place % (T // 2 + 1)) if packed else (None, None)
    move = lambda x: None if x is None else x.to(device)  # noqa: E731
    return deepspec.Batch(
        move(tokens), move(mask), features.to(device, dtype), hidden.to(device, dtype), move(document), move(position)
    )


def gradients(drafter: Any) -> dict[str, torch.Tensor]:
    return {n: p.grad.detach().clone() for n, p in drafter.named_parameters() if p.grad is not None}


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest relative difference |a - b| / |b| of tensors with the same name."""
    assert a.keys() == b.keys() and a
    return max(float((a[k].double() - b[k].double()).norm() / b[k].double().norm().clamp(min=1e-12)) for k in a)


class Check:
    """The sections. Each returns figures with `ok`."""

    def __init__(self, device: torch.device, size: Size) -> None:
        self.device, self.size = device, size
        self.cuda = device.type == "cuda"

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], Any], repeats: int = 3) -> float:
        times = []
        for _ in range(repeats):
            self.wait()
            began = time.perf_counter()
            run()
            self.wait()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def autocast(self) -> Any:
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def peak(self, run: Callable[[], Any]) -> float | None:
        """Bytes allocated at most while `run` runs, beyond what is there before; None without CUDA."""
        if not self.cuda:
            run()
            return None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return float(torch.cuda.max_memory_allocated() - before)

    # -- sections ------------------------------------------------------------------------------------------------------

    def flex(self) -> Result:
        """FlexAttention equals SDPA, forward and, on CUDA, backward: one document, packed documents, a window."""
        tgt = target(SMALL, self.device, torch.float32)
        found: Result = {}
        cases: dict[str, tuple[bool, int | None, torch.dtype]] = {
            "float32": (False, None, torch.float32),
            "packed": (True, None, torch.float32),
            "window": (False, 64, torch.float32),
            "bfloat16": (False, None, torch.bfloat16),
        }
        for name, (packed, window, dtype) in cases.items():
            batch = batch_of(SMALL, self.device, torch.float32, rows=2, packed=packed)
            results = []
            for backend in ("sdpa", "flex"):
                drafter = drafter_of(SMALL, tgt)
                drafter.config = deepspec.DSparkConfig(**{**vars(drafter.config), "sliding_window": window})
                drafter.attention = backend
                anchors, _ = drafter.anchors(batch, torch.arange(2, device=self.device))
                grad = torch.enable_grad if self.cuda else torch.no_grad  # torch has no backward of it on a CPU
                with grad(), self.autocast() if dtype == torch.bfloat16 else contextlib.nullcontext():
                    hidden = drafter.hidden(batch, anchors)
                if self.cuda:
                    (hidden.float() * torch.linspace(-1, 1, hidden.shape[-1], device=self.device)).sum().backward()
                results.append((hidden.detach(), gradients(drafter)))
            (h0, g0), (h1, g1) = results
            found[name] = {"forward": apart({"h": h1}, {"h": h0})} | ({"gradient": apart(g1, g0)} if self.cuda else {})
        limits = {name: 6e-2 if dtype == torch.bfloat16 else 2e-3 for name, (_, _, dtype) in cases.items()}
        return {"ok": all(max(found[n].values()) < limits[n] for n in found), **found}

    def precision(self) -> Result:
        """bfloat16 against float64: the divergence's gradient at acceptance 0.98, with log Z known too, and a whole
        objective."""
        torch.manual_seed(0)
        N, D, V = 48, 64, 512
        head = (torch.randn(V, D) * 0.25).to(self.device, torch.bfloat16)
        teacher = torch.randn(N, D)
        h = (teacher + 0.024 * torch.randn(N, D)).to(self.device, torch.bfloat16)
        teacher = teacher.to(self.device, torch.bfloat16)
        vocab = Vocab(head, head)
        rows = torch.eye(N, device=self.device).requires_grad_()
        w2 = torch.zeros(V, N, device=self.device).requires_grad_()
        place, label = torch.arange(N, device=self.device), torch.randint(0, V, (N,), device=self.device)
        weight = torch.rand(N, device=self.device)
        found: Result = {}
        for name, config, log_z in (
            ("kl", LossConfig(kl=1.0), None),
            ("tv", LossConfig(tv=1.0), None),
            ("tv, log Z known", LossConfig(tv=1.0), vocab.log_z(teacher)),
        ):
            w2.grad = None
            with self.autocast():
                loss, _, _, l1 = Divergence.apply(
                    h, rows, w2, vocab, teacher, place, label, weight, config, True, block_terms, log_z
                )
            loss.backward()
            logits = torch.nn.functional.linear(h, head).double().requires_grad_()
            log_q, p = logits.log_softmax(-1), vocab.logits(teacher).double().softmax(-1)
            exact = -config.kl * (p * log_q).sum(-1) + config.tv * (log_q.exp() - p).abs().sum(-1)
            (exact * weight).sum().backward()
            assert w2.grad is not None and logits.grad is not None
            found[name] = float((w2.grad.T.double() - logits.grad).norm() / logits.grad.norm())
            found["acceptance"] = float((1 - l1 / 2).mean())
        small = target(SMALL, self.device, torch.float32)
        batch = batch_of(SMALL, self.device, torch.float32, rows=2)
        config = LossConfig(ce=0.1, tv=0.9, confidence=1.0, slot_decay=0.8, chunk=128)
        losses = []
        for dtype in (torch.float64, torch.bfloat16):
            drafter = drafter_of(SMALL, small, torch.float64 if dtype == torch.float64 else torch.float32)
            anchors = drafter.anchors(batch, torch.arange(2, device=self.device))
            with self.autocast() if dtype == torch.bfloat16 else contextlib.nullcontext():
                loss, weight_sum, _ = deepspec.Objective(drafter, config)(batch, anchors=anchors)
            losses.append(float(loss / weight_sum))
        found["objective, bfloat16 against float64"] = abs(losses[1] / losses[0] - 1)
        right = all(found[name] < 0.02 for name in ("kl", "tv", "tv, log Z known"))
        return {"ok": right and abs(losses[1] / losses[0] - 1) < 0.01, **found}

    def compile(self) -> Result:
        """Compiled equals eager, and twenty random lengths compile no more than their buckets."""
        tgt = target(SMALL, self.device, torch.float32)
        config = LossConfig(ce=0.1, kl=0.5, tv=0.5, confidence=1.0, chunk=128)
        plain, fast = drafter_of(SMALL, tgt), drafter_of(SMALL, tgt)
        eager = deepspec.Objective(plain, config)
        backend = "inductor" if self.cuda else "aot_eager"  # on a CPU the C++ compiler alone would take minutes
        quick = compiling.objective(fast, config, "on", self.device, backend)
        g, counts, worst = torch.Generator().manual_seed(3), [], 0.0
        began = time.perf_counter()
        for i in range(20):
            longest = int(torch.randint(64, SMALL.length, (1,), generator=g))
            length = compiling.width(longest, SMALL.length) if self.cuda else longest
            batch = batch_of(SMALL, self.device, torch.float32, rows=2, length=length, seed=i)
            seeds = torch.arange(2, device=self.device) + i
            for drafter, objective in ((plain, eager), (fast, quick)):
                drafter.zero_grad()
                loss, weight, _ = objective(batch, seeds=seeds)
                (loss / weight).backward()
            worst = max(worst, apart(gradients(fast), gradients(plain)))
            counts.append(compiling.graphs())
        flat = counts[-1] == counts[9]
        return {
            "ok": worst < 5e-3 and flat,
            "gradient": worst,
            "graphs": counts,
            "seconds": time.perf_counter() - began,
        }

    def fsdp(self) -> Result:
        """FSDP2 on one rank: the gradients of a step are those of a plain one."""
        from deepspec.train.distributed import World, Wrapped, whole

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
        backend = "cpu:gloo,cuda:nccl" if self.cuda else "gloo"
        torch.distributed.init_process_group(backend, rank=0, world_size=1)
        try:
            tgt = target(SMALL, self.device, torch.float32)
            batch = batch_of(SMALL, self.device, torch.float32, rows=2)
            config, seeds = LossConfig(ce=0.1, tv=0.9, confidence=1.0), torch.arange(2, device=self.device)
            plain, split = drafter_of(SMALL, tgt), drafter_of(SMALL, tgt)
            deepspec.Objective(plain, config)(batch, seeds=seeds)[0].backward()
            wrapped = Wrapped(deepspec.Objective(split, config), World(0, 1, self.device), "fsdp")
            with wrapped.adding(last=True):
                wrapped.module(batch, seeds=seeds)[0].backward()
            sharded = {n: whole(p.grad) for n, p in split.named_parameters() if p.grad is not None}
            difference = apart(sharded, gradients(plain))
        finally:
            torch.distributed.destroy_process_group()
        return {"ok": difference < 1e-4, "gradient": difference}

    def objective(self) -> Result:
        """Time and memory of the divergence at the vocabulary and slots of the paper's recipe, eager and compiled."""
        s, device = self.size, self.device
        N, P = s.anchors * 7, min(s.anchors * 7, s.length)
        g = torch.Generator(device=device).manual_seed(0)
        made = lambda *shape, scale=1.0: torch.randn(*shape, generator=g, device=device) * scale  # noqa: E731
        head = made(s.vocab, s.dim, scale=s.dim**-0.5).bfloat16()
        vocab = Vocab(head, head)
        h = made(N, s.dim, scale=2.0).bfloat16().requires_grad_()
        r, w2 = made(N, s.rank).bfloat16().requires_grad_(), torch.nn.Parameter(made(s.vocab, s.rank, scale=0.1))
        teacher = made(P, s.dim, scale=2.0).bfloat16()
        place = torch.randint(0, P, (N,), generator=g, device=device).sort().values
        label = torch.randint(0, s.vocab, (N,), generator=g, device=device)
        weight = torch.rand(N, generator=g, device=device)
        config = LossConfig(ce=0.1, tv=0.9, chunk=s.chunk)
        flops = 2 * s.vocab * (P * s.dim + N * (2 * s.dim + 3 * s.rank))
        found: Result = {"slots": N, "vocabulary": s.vocab, "dim": s.dim, "chunk": s.chunk}
        sides = {"eager": block_terms}
        if self.cuda:
            sides["compiled"] = torch.compile(block_terms, dynamic=True)
        for name, terms in sides.items():

            def run(terms: Callable[..., Any] = terms) -> None:
                h.grad = r.grad = w2.grad = None
                with self.autocast():
                    loss = Divergence.apply(h, r, w2, vocab, teacher, place, label, weight, config, True, terms)[0]
                loss.backward()

            run()
            peak, took = self.peak(run), self.seconds(run)
            found[name] = {
                "seconds": took,
                "TFLOP/s": flops / took / 1e12,
                "peak_mb": None if peak is None else peak / 2**20,
                "of [slots, V] float32": None if peak is None else peak / (4 * N * s.vocab),
            }
        return {"ok": True, **found}

    def step(self) -> Result:
        """A whole training step of one row: live features, drafter, objective, AdamW; compiled on CUDA."""
        s = self.size
        tgt = self._target()
        drafter = drafter_of(s, tgt)
        config = LossConfig(ce=0.1, tv=0.9, confidence=1.0, slot_decay=0.78, chunk=s.chunk)
        module = compiling.objective(drafter, config, "auto", self.device)
        optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3, fused=True)
        g = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, s.vocab - 1, (1, s.length), generator=g).to(self.device)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        seeds, parts = torch.zeros(1, dtype=torch.long, device=self.device), {"target": [], "drafter": [], "update": []}
        state: Result = {}

        def features() -> None:
            state["batch"] = deepspec.Batch(tokens, mask, *tgt.features(tokens, [s.length], s.taps))

        def learn() -> None:
            with self.autocast():
                loss, weight, _ = module(state["batch"], seeds=seeds)
            (loss / weight).backward()
            state["loss"] = loss / weight

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        def whole() -> None:
            for name, part in (("target", features), ("drafter", learn), ("update", update)):
                parts[name].append(self.seconds(part, 1))

        first = self.seconds(whole, 1)
        losses = []
        for _ in range(6):
            whole()
            losses.append(float(state["loss"]))
        peak = self.peak(whole)
        times = {name: statistics.median(values[1:]) for name, values in parts.items()}
        return {
            "ok": losses[-1] < losses[0],
            "tokens": s.length,
            "slots": s.anchors * 7,
            "first_seconds": first,
            "seconds": times,
            "tokens_per_second": s.length / sum(times.values()),
            "peak_mb": None if peak is None else peak / 2**20,
            "losses": losses,
        }

    def decode(self) -> Result:
        """Plain decoding and decoding with a drafter, on a random target: what a round costs, not what it gains. The
        greedy outputs are compared: in bfloat16 near-ties may fall the other way."""
        from deepspec.eval.clock import Clock

        s, tgt = self.size, self._target()
        drafter = drafter_of(s, tgt, tgt.dtype).eval()
        g = torch.Generator().manual_seed(5)
        found: Result = {"new_tokens": s.new_tokens}
        for rows in (1, s.rows):
            prompts = [torch.randint(0, s.vocab - 1, (64,), generator=g).tolist() for _ in range(rows)]
            outputs = {}
            for name, d in (("baseline", None), ("drafter", drafter)):
                deepspec.generate(tgt, d, prompts, max_new_tokens=8, concurrency=rows)
                clock = Clock(self.device)
                self.wait()
                began = time.perf_counter()
                out = deepspec.generate(tgt, d, prompts, max_new_tokens=s.new_tokens, concurrency=rows, clock=clock)
                self.wait()
                took = time.perf_counter() - began
                rounds = max(1, max(len(x.rounds) for x in out))
                outputs[name] = [x.tokens for x in out]
                found[f"{name}, {rows} rows"] = {
                    "tokens_per_second": rows * s.new_tokens / took,
                    "tau": statistics.mean(x.tau for x in out),
                    "ms_a_round": {k: 1000 * v / rounds for k, v in clock.seconds().items()},
                }
            found[f"equal, {rows} rows"] = sum(a == b for a, b in zip(outputs["baseline"], outputs["drafter"]))
        return {"ok": True, **found}

    def _target(self) -> Target:
        """The target of the paper's size; made once."""
        if not hasattr(self, "_made"):
            self._made = target(self.size, self.device, torch.bfloat16)
        return self._made


SECTIONS = ("flex", "precision", "compile", "fsdp", "objective", "step", "decode")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--minutes", type=float, default=7.0, help="no section starts later than this")
    args = parser.parse_args()
    began = time.perf_counter()
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    if kind == "cuda" and not torch.cuda.is_available():
        print("error: no CUDA device is visible; --device cpu runs the checks at toy sizes", file=sys.stderr)
        return 2
    device = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
    check = Check(device, QWEN3_4B if kind == "cuda" else TOY)
    name = torch.cuda.get_device_name(device) if kind == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    results: Result = {"device": name, "versions": provenance(), "sections": {}}
    print(json.dumps({"device": name, **results["versions"]}), flush=True)
    for section in args.only:
        if time.perf_counter() - began > 60 * args.minutes:
            found: Result = {"skipped": "time is up"}
        else:
            start = time.perf_counter()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found = getattr(check, section)()
            except Exception as error:
                lines = traceback.format_exc().splitlines()
                found = {"ok": False, "error": f"{type(error).__name__}: {error}"[:600], "traceback": lines[-14:]}
            found["section_seconds"] = time.perf_counter() - start
            if kind == "cuda":
                torch.cuda.empty_cache()
        results["sections"][section] = found
        print(json.dumps({"section": section, **found}), flush=True)
        write(args.out, results)
    results["seconds"] = time.perf_counter() - began
    write(args.out, results)
    ran = [f for f in results["sections"].values() if "ok" in f]
    passed = sum(f["ok"] for f in ran)
    print(f"{passed} of {len(args.only)} sections passed in {results['seconds']:.0f} s; written: {args.out}")
    return 0 if passed == len(ran) else 1


def write(path: Path, results: Result) -> None:
    """After each section, whole: what was found is kept though a later section takes the process down."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, suffix=".json") as file:
        json.dump(results, file, indent=2)
    os.replace(file.name, path)


if __name__ == "__main__":
    sys.exit(main())
