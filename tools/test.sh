#!/usr/bin/env bash
# Makes the environment and runs the tests: the fast and the thorough ones on two processes, then those that start
# real processes, then those with real inference servers.
#   bash tools/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/setup.sh --dev
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

run() {  # pytest's code 5, nothing collected, is fine where arguments chose the tests
    local code=0
    .venv/bin/python -m pytest "$@" || code=$?
    if [ "$code" -ne 0 ] && ! { [ "$code" -eq 5 ] && [ "$num_arguments" -gt 0 ]; }; then exit "$code"; fi
}

num_arguments=$#
run -n 2 -m "not system and not thorough and not engines and not slow and not gpu" "$@"
run -n 2 -m "thorough and not system and not engines and not slow and not gpu" "$@"
run -m "system and not engines and not slow and not gpu" "$@"
run -m "engines and not slow and not gpu" "$@"
