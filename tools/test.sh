#!/usr/bin/env bash
# Makes the environment and runs the tests: the fast ones on three processes, since some wait; the thorough ones on two;
# those that start real processes, and wait for them, on three; then those with real inference servers on two.
#   bash tools/test.sh [pytest arguments]
# Without arguments the environments of the servers are made first where they are missing, beside the other tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/setup.sh --dev
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

run() {  # pytest's code 5, nothing collected, is fine where arguments chose the tests
    local code=0
    .venv/bin/python -m pytest --durations=8 "$@" || code=$?
    if [ "$code" -ne 0 ] && ! { [ "$code" -eq 5 ] && [ "$num_arguments" -gt 0 ]; }; then exit "$code"; fi
}

make_engines() {  # in the background; what it says is shown before the tests that need it
    for engine in vllm sglang; do .venv/bin/mrl engine-env "$engine" --cpu; done
    bash tools/harness_env.sh openenv
}

num_arguments=$#
engines_log=$(mktemp)
making=""
trap 'rm -f "$engines_log"; if [ -n "$making" ]; then kill "$making" 2>/dev/null || true; fi' EXIT
run -n 3 -m "not system and not thorough and not engines and not slow and not gpu" "$@"
if [ "$num_arguments" -eq 0 ]; then make_engines >"$engines_log" 2>&1 & making=$!; fi
run -n 2 -m "thorough and not system and not engines and not slow and not gpu" "$@"
# The tests of a file share runs, and those of hosts share daemons: a file stays in one process.
run -n 3 --dist loadfile -m "system and not engines and not slow and not gpu" "$@"
if [ -n "$making" ]; then
    wait "$making" || { cat "$engines_log" >&2; exit 1; }
    making=""
fi
run -n 2 --dist loadfile -m "engines and not slow and not gpu" "$@"
