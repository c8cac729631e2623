#!/usr/bin/env bash
# Run the fast tests in an environment of their own (.venv-test), made on the first run.
#   bash scripts/test.sh [pytest arguments]      e.g. tests/test_tiny.py -k resume
#   bash scripts/test.sh --setup-only            make the environment and stop
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh

ensure_venv .venv-test dev
if [ "${1:-}" = "--setup-only" ]; then
    exit
fi
# Two workers with one thread each: more threads than cores make torch's small operations many times slower. A file's
# tests go to one worker: what they share (a trained run, a group of processes) is made once.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=PASSIVE
exec .venv-test/bin/python -m pytest -m "not slow" -n 2 --dist loadfile "$@"
