"""Decoding speed: plain decoding in our loop against transformers' own greedy `generate`, and drafters against both.

    python scripts/bench_decode.py --target DIR [--drafter DIR ...] --prompts FILE.jsonl [--batch 1 8] [--new 64]

Same prompts, dtype, threads and number of new tokens; runs are interleaved and repeated, medians of tokens/s are shown.
Prompts are cut to one length a batch, so that `generate` needs no padding: its best case.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import deepspec
from deepspec.data.prompts import load_prompts


def hf_generate(model: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Greedy `generate` of exactly `new` tokens."""
    ids = torch.tensor(prompts, device=model.device)
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return out[:, ids.shape[1] :].tolist()


def timed(run: Any, device: torch.device) -> tuple[float, Any]:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    result = run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", nargs="*", default=[])
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--new", type=int, default=64, help="new tokens a request")
    parser.add_argument("--requests", type=int, default=8, help="requests a measurement")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", help="also write the figures here")
    args = parser.parse_args()

    from transformers import AutoModelForCausalLM

    target = deepspec.Target.load(args.target, dtype=args.dtype)
    from deepspec.modeling.loading import dtype_of, resolve

    reference = (
        AutoModelForCausalLM.from_pretrained(resolve(args.target)[0], dtype=dtype_of(args.dtype))
        .to(target.device)
        .eval()
    )
    reference.generation_config.eos_token_id = None
    loaded = load_prompts(Path(args.prompts), target.tokenizer)
    width = min(32, *(len(p.prompt_ids) for p in loaded[: args.requests]))
    prompts = [p.prompt_ids[:width] for p in loaded[: args.requests]]
    drafters = {Path(d).parent.name or d: deepspec.load_drafter(d, target) for d in args.drafter}

    def ours(drafter: Any, batch: int) -> Any:
        return lambda: [
            g.tokens for g in deepspec.generate(target, drafter, prompts, max_new_tokens=args.new, concurrency=batch)
        ]

    def theirs(batch: int) -> Any:
        return lambda: [
            t for i in range(0, len(prompts), batch) for t in hf_generate(reference, prompts[i : i + batch], args.new)
        ]

    print(f"{args.target}, {args.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
          f"{len(prompts)} prompts of {width} tokens, {args.new} new")  # fmt: skip
    figures: dict[str, Any] = {}
    for batch in args.batch:
        runs = {"generate": theirs(batch), "baseline": ours(None, batch)} | {
            n: ours(d, batch) for n, d in drafters.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        outputs = {}
        for repeat in range(args.repeats + 1):
            for name, run in runs.items():
                took, outputs[name] = timed(run, target.device)
                if repeat:  # the first is a warm-up
                    seconds[name].append(took)
        total = len(prompts) * args.new
        speed = {name: total / statistics.median(s) for name, s in seconds.items()}
        pairs = {n: statistics.median(a / b for a, b in zip(seconds["generate"], seconds[n])) for n in runs}
        for name in runs:
            same = sum(a == b for a, b in zip(outputs[name], outputs["generate"]))
            print(f"batch {batch}  {name:12s} {speed[name]:8.1f} tokens/s   {pairs[name]:5.2f} x generate   "
                  f"outputs equal to generate's: {same}/{len(prompts)}")  # fmt: skip
        figures[str(batch)] = {"tokens_per_second": speed, "ratio_to_generate": pairs}
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
