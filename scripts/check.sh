#!/usr/bin/env bash
# What a change must pass: format, lint, types, fast tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/test.sh --setup-only
.venv-test/bin/ruff format --check .
.venv-test/bin/ruff check .
.venv-test/bin/mypy
bash scripts/test.sh "$@"
