#!/usr/bin/env bash
# Lint and tests: ./scripts/test.sh [--fast] [pytest arguments]. --fast leaves out the slow, distributed and GPU tests.
set -euo pipefail

CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null
source scripts/setup.sh test

if [[ ${1:-} == --fast ]]; then
    shift
    set -- -m "not dist and not slow and not gpu" "$@"
fi
# Tests start several processes each; more threads would only get into each other's way.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
exec "$PYTHON" -m pytest "$@"
