#!/usr/bin/env bash
# What only a CUDA machine can tell, in one go, without network, in under eight minutes; on a CPU the same checks at toy
# sizes in under four.
#   bash scripts/gpu_check.sh [--device cuda|cpu] [--out FILE.json] [--only SECTION ...]
# It installs nothing: PYTHON names an interpreter with torch >= 2.11 and transformers >= 5.17 (default python3).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_WAIT_POLICY=PASSIVE
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec timeout --signal=INT --kill-after=10 480 "${PYTHON:-python3}" scripts/gpu_check.py "$@"
