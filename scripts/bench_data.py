"""Preparing training rows: 20,000 chats of 1,000 tokens and one of 40,000, with a real tokenizer and template.

    python scripts/bench_data.py --tokenizer DIR [--rows 20000] [--tokens 1000]

Prints seconds, CPU seconds of all threads, tokens a second and how much memory grew, for a quarter of the rows and for
all of them in processes of their own: memory beyond the rows' 5 bytes a token should not grow with their number.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from transformers import AutoTokenizer

from deepspec.config import DataConfig
from deepspec.data.loader import load_rows

LONG = 40_000


def write(path: Path, tokenizer, rows: int, tokens: int) -> None:
    """Chats of pseudo-words, about so many tokens each, half prompt and half answer; one of them far longer."""
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(5000)]
    per_word = len(tokenizer(" ".join(words), add_special_tokens=False, verbose=False)["input_ids"]) / len(words)
    with path.open("w") as file:
        for i in range(rows + 1):
            count = int((LONG if i == rows // 2 else tokens) / per_word / 2)
            sides = [" ".join(draw.choices(words, k=count)) for _ in "qa"]
            messages = [{"role": r, "content": t} for r, t in zip(("user", "assistant"), sides)]
            file.write(json.dumps({"id": i, "messages": messages}) + "\n")


def prepare(path: str, folder: str, max_length: int) -> None:
    """Read the file as training does, and print what it took."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, busy = time.perf_counter(), time.process_time()
    config = DataConfig(path=(path,), max_length=max_length, min_supervised=2)
    rows, dropped = load_rows(config.path, tokenizer, (), config, len(tokenizer))
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    held = (rows.tokens.nbytes + rows.loss_mask.nbytes) / 1e6
    print(
        f"{len(rows):,} rows, {len(rows.tokens):,} tokens (longest {rows.lengths.max():,}), dropped {dict(dropped)}: "
        f"{seconds:.1f} s ({busy:.1f} s of CPU), {len(rows.tokens) / seconds:,.0f} tokens/s; arrays {held:.0f} MB, "
        f"memory grew by {(after - before) / 1e3:.0f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--max-length", type=int, default=4096)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.file:
        prepare(args.file, args.tokenizer, args.max_length)
        return
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        for rows in (args.rows // 4, args.rows):
            path = Path(folder) / f"{rows}.jsonl"
            write(path, tokenizer, rows, args.tokens)
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--file", str(path)], check=True)


if __name__ == "__main__":
    main()
