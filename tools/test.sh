#!/usr/bin/env bash
# Makes the environment and runs the tests: the fast ones on three processes, since some wait; the thorough ones on two;
# those that start real processes on two, and beside them those with real inference servers, one at a time.
#   bash tools/test.sh [pytest arguments]
# Without arguments the environments of the servers are made first where they are missing, beside the other tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/setup.sh --dev
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
tests=(.venv/bin/python -m pytest --durations=8)

judge() {  # pytest's code; 5, nothing collected, is fine where arguments chose the tests
    if [ "$1" -ne 5 ] || [ "$num_arguments" -eq 0 ]; then return "$1"; fi
}

run() {
    local code=0
    "${tests[@]}" "$@" || code=$?
    judge "$code"
}

make_engines() {
    for engine in vllm sglang; do .venv/bin/mrl engine-env "$engine" --cpu; done
}

num_arguments=$#
beside_log=$(mktemp)  # what goes on in the background; shown at its end
beside=""

leave() {  # what is under way is interrupted as by Ctrl-C, so that it ends what it has started
    if [ -n "$beside" ]; then
        kill -INT -- "-$beside" 2>/dev/null || true
        wait "$beside" || true
        cat "$beside_log"
    fi
    rm -f "$beside_log"
}
trap leave EXIT
set -m  # each background job is a group of its own, and hears signals
run -n 3 -m "not system and not thorough and not engines and not slow and not gpu" "$@"
if [ "$num_arguments" -eq 0 ]; then make_engines >"$beside_log" 2>&1 & beside=$!; fi
run -n 2 -m "thorough and not system and not engines and not slow and not gpu" "$@"
if [ -n "$beside" ]; then
    made=0
    wait "$beside" || made=$?
    beside=""
    if [ "$made" -ne 0 ]; then cat "$beside_log" >&2; exit 1; fi
fi

"${tests[@]}" -m "engines and not slow and not gpu" "$@" >"$beside_log" 2>&1 & beside=$!
code=0
# The tests of a file share runs, and those of hosts share daemons: a file stays in one process.
run -n 2 --dist loadfile -m "system and not engines and not slow and not gpu" "$@" || code=$?
engines=0
wait "$beside" || engines=$?
beside=""
cat "$beside_log"
judge "$engines" || code=$?
exit "$code"
