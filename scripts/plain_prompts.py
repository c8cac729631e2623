"""Prompts for a target without a chat template: "Question: ... Answer:" as token ids.

python scripts/plain_prompts.py --target DIR --questions FILE.jsonl... --out prompts.jsonl [--limit 160]
"""

import argparse
import json
from pathlib import Path

from deepspec import cli
from deepspec.cache import write_text
from deepspec.checked import InputError
from deepspec.modeling.loading import load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--questions", nargs="+", type=Path, required=True, help='one {"turns": [question]} a line')
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=400, help="prompts of each file")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.target)
    if tokenizer is None:
        raise InputError(f"--target: {args.target!r} has no tokenizer")
    lines = []
    for file in args.questions:
        for i, line in enumerate(file.read_text().splitlines()[: args.limit]):
            text = f"Question: {json.loads(line)['turns'][0]}\nAnswer:"
            ids = tokenizer(text).input_ids
            lines.append(json.dumps({"id": f"{file.stem}-{i}", "task": file.stem, "prompt_ids": ids}))
    write_text(args.out, "\n".join(lines) + "\n")
    print(f"{len(lines)} prompts: {args.out}")


if __name__ == "__main__":
    cli.main(main)
