"""From prompts to training rows: `prompts` -> `answers` -> `chat` (tokens and loss mask) -> `loader`.

Nothing is imported here: `python -m deepspec.data --help` and a run on token rows need no tokenizer library.
"""
