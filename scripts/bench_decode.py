"""Decoding speed: plain decoding in our loop against transformers' own greedy `generate`, and drafters against both.

    python scripts/bench_decode.py --target DIR [--drafter DIR ...] --prompts FILE.jsonl [--batch 1 8] [--new 64]

Same prompts, dtype, threads and number of new tokens; runs are interleaved and repeated, medians are shown. Prompts are
cut to one length, so that `generate` needs no padding: its best case. Of each drafter: tau, the speed-up over our
baseline, and whether tau * T_target / (T_draft + T_verify), seconds a round, explains it.

`--refill N` measures how busy refill keeps the slots instead: N requests of equal budgets against N whose budgets
spread 10 to 1 around the same mean, in `--batch` slots.
"""

import argparse
import functools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import deepspec
from deepspec.data.prompts import load_prompts
from deepspec.eval.clock import Clock
from deepspec.eval.settings import make_schedule


def hf_generate(model: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Greedy `generate` of exactly `new` tokens."""
    ids = torch.tensor(prompts, device=model.device)
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return out[:, ids.shape[1] :].tolist()


def timed(run: Any, device: torch.device, clock: str) -> tuple[float, Any]:
    now = time.process_time if clock == "cpu" else time.perf_counter
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = now()
    result = run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return now() - began, result


class Ours:
    """Runs of one contender; what each took, and what its rounds were made of."""

    def __init__(self, args: argparse.Namespace, target: deepspec.Target, drafter: Any) -> None:
        self.args, self.target, self.drafter = args, target, drafter
        self.clocks: list[Clock] = []
        self.generations: list[deepspec.Generation] = []

    def run(self, prompts: list[list[int]], new: int | list[int], batch: int) -> list[list[int]]:
        args = self.args
        self.clocks.append(Clock(self.target.device))
        self.generations = deepspec.generate(
            self.target, self.drafter, prompts, max_new_tokens=new, concurrency=batch, verify=args.verify,
            draft=args.draft, sampling=deepspec.Sampling(temperature=args.temperature), clock=self.clocks[-1],
            schedule=make_schedule(args.schedule),
        )  # fmt: skip
        return [g.tokens for g in self.generations]

    def tau(self) -> float:
        rounds = sum(len(g.rounds) for g in self.generations)
        return sum(len(g.tokens) - 1 for g in self.generations) / rounds

    def per_round(self, part: str) -> float:
        """Milliseconds a round of the batch, the median over the repeats."""
        return 1e3 * statistics.median(c.seconds().get(part, 0.0) / c.counts["verify"] for c in self.clocks[1:])


def load_reference(args: argparse.Namespace, target: deepspec.Target) -> Any:
    """The target as transformers has it."""
    from transformers import AutoModelForCausalLM

    from deepspec.modeling.loading import resolve

    loaded = AutoModelForCausalLM.from_pretrained(resolve(args.target)[0], dtype=target.dtype)
    loaded.generation_config.eos_token_id = None
    return loaded.to(target.device).eval()


def compare(args: argparse.Namespace, target: deepspec.Target, drafters: dict[str, Any], every: Any) -> dict:
    reference = None if args.no_generate else load_reference(args, target)
    figures: dict[str, Any] = {}
    for batch in args.batch:
        prompts = every[: args.requests or max(2, batch)]
        contenders = {name: Ours(args, target, d) for name, d in {"baseline": None, **drafters}.items()}
        runs: dict[str, Any] = {}
        if args.temperature == 0 and not args.no_generate:
            runs["generate"] = lambda batch=batch, prompts=prompts: [
                t
                for i in range(0, len(prompts), batch)
                for t in hf_generate(reference, prompts[i : i + batch], args.new)
            ]
        runs |= {n: functools.partial(c.run, prompts, args.new, batch) for n, c in contenders.items()}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        outputs = {}
        for repeat in range(args.repeats + 1):
            for name, run in runs.items():
                took, outputs[name] = timed(run, target.device, args.clock)
                if repeat:  # the first is a warm-up
                    seconds[name].append(took)
        total = len(prompts) * args.new
        base = contenders["baseline"]
        for name in runs:
            row: dict[str, Any] = {"tokens_per_second": total / statistics.median(seconds[name])}
            line = f"batch {batch}  {name:10s} {row['tokens_per_second']:8.1f} tokens/s"
            if "generate" in runs:
                row["to_generate"] = statistics.median(a / b for a, b in zip(seconds["generate"], seconds[name]))
                line += f"  {row['to_generate']:5.2f} x generate"
            row["equal"] = sum(a == b for a, b in zip(outputs[name], outputs["baseline"]))
            line += f"  equal to baseline {row['equal']}/{len(prompts)}"
            if name in drafters:
                mine = contenders[name]
                parts = {p: mine.per_round(p) for p in ("draft", "verify")} | {"target": base.per_round("verify")}
                row |= {f"{p}_ms": ms for p, ms in parts.items()} | {"tau": mine.tau()}
                row["speedup"] = statistics.median(a / b for a, b in zip(seconds["baseline"], seconds[name]))
                row["efficiency"] = row["speedup"] / row["tau"]
                row["explained"] = row["tau"] * parts["target"] / (parts["draft"] + parts["verify"])
                line += (
                    f"\n  speed-up {row['speedup']:.2f}  tau {row['tau']:.2f}  efficiency {row['efficiency']:.2f}"
                    f"  T_draft {parts['draft']:.1f}  T_verify {parts['verify']:.1f}  T_target {parts['target']:.1f} ms"
                    f"  tau T_target / (T_draft + T_verify) {row['explained']:.2f}"
                )
            print(line, flush=True)
            figures.setdefault(str(batch), {})[name] = row
    return figures


def refill(args: argparse.Namespace, target: deepspec.Target, drafters: dict[str, Any], prompts: Any) -> dict:
    """Tokens/s of budgets that spread 10 to 1, as a share of that of equal ones."""
    many = [prompts[i % len(prompts)] for i in range(args.refill)]
    spread = [round(args.new * (1 + 9 * (i * 7 % 10) / 9) / 5.5) for i in range(args.refill)]
    equal = [round(sum(spread) / len(spread))] * args.refill
    figures: dict[str, Any] = {}
    for batch in args.batch:
        for name, drafter in {"baseline": None, **drafters}.items():
            speeds: dict[str, list[float]] = {"equal": [], "spread": []}
            for repeat in range(args.repeats + 1):
                for kind, budgets in (("equal", equal), ("spread", spread)):
                    ours = Ours(args, target, drafter)
                    cut = args.refill if repeat else 2 * batch  # the first is a warm-up
                    run = functools.partial(ours.run, many[:cut], budgets[:cut], batch)
                    took, outputs = timed(run, target.device, args.clock)
                    if repeat:
                        speeds[kind].append(sum(map(len, outputs)) / took)
            row: dict[str, Any] = {kind: statistics.median(s) for kind, s in speeds.items()}
            row["share"] = statistics.median(a / b for a, b in zip(speeds["spread"], speeds["equal"]))
            print(f"{batch} slots  {name:10s} budgets {min(spread)} to {max(spread)}: {row['spread']:.1f} tokens/s, "
                  f"all {equal[0]}: {row['equal']:.1f}, share {row['share']:.2f}", flush=True)  # fmt: skip
            figures.setdefault(str(batch), {})[name] = row
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", nargs="*", default=[])
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--new", type=int, default=64, help="new tokens a request")
    parser.add_argument("--requests", type=int, help="requests a measurement; by default the batch, at least 2")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0 there is no generate to compare with")
    parser.add_argument("--no-generate", action="store_true", help="leave transformers out")
    parser.add_argument("--schedule", default="verify_all")
    parser.add_argument("--compile", action="store_true", help="rounds in fixed shapes through torch.compile")
    parser.add_argument("--verify", default="token", choices=["token", "block"])
    parser.add_argument("--draft", default="sample", choices=["sample", "greedy"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall",
                        help="cpu: own CPU seconds, for ratios where others share the machine")  # fmt: skip
    parser.add_argument("--refill", type=int, help="measure refill with this many requests")
    parser.add_argument("--json", help="also write the figures here")
    args = parser.parse_args()

    target = deepspec.Target.load(args.target, dtype=args.dtype)
    if args.compile:
        target.compile()
    loaded = load_prompts(Path(args.prompts), target.tokenizer)
    loaded = loaded[: args.requests or max(2, *args.batch)]
    width = min(32, *(len(p.prompt_ids) for p in loaded))
    every = [p.prompt_ids[:width] for p in loaded]
    drafters = {Path(d).parent.name or d: deepspec.load_drafter(d, target) for d in args.drafter}
    for drafter in drafters.values() if args.compile else ():
        drafter.compile()
    print(f"{args.target}, {target.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
          f"{len(every)} prompts of {width} tokens, {args.new} new, temperature {args.temperature:g}, "
          f"{args.schedule}, {args.verify}, {args.draft}")  # fmt: skip
    figures = (refill if args.refill else compare)(args, target, drafters, every)
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
