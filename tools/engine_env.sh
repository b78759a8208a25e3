#!/usr/bin/env bash
# Makes the environment of an inference engine and prints its python as the last line. Safe to call again: then it
# takes no time. Two calls at once: the second waits, then finds it made.
#   bash tools/engine_env.sh vllm|sglang          for an NVIDIA GPU, the official packages
#   bash tools/engine_env.sh vllm|sglang --cpu    without a GPU, for tests (see tools/engines/)
#   bash tools/engine_env.sh vllm|sglang --path   only says where its python is, or would be
#   bash tools/engine_env.sh vllm|sglang --check  only says whether the index has what the list for GPUs names, and
#                                                 whether that fits together; it reads some MB (by uv, UV_INDEX_URL)
# Environments lie in $MRL_ENGINE_HOME (default ~/.cache/mrl/engines), named by a hash of constraints and recipe.
# PYTHON names the interpreter (3.11); the default is the first suitable one on PATH.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { echo "engine_env: $*" >&2; }
die() { say "$*"; exit 2; }

find_python() {  # the pinned packages are those of one minor version
    local candidate
    for candidate in ${PYTHON:-python3.11 python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python 3.11 found (looked for ${PYTHON:-python3.11 python3}); install it, or name it: PYTHON=/path/to/python3.11"
}

check() {  # uv asks an index for metadata alone, where pip would download wheels of several GB
    local list="$1" python="$2" making
    making=$(mktemp -d)
    # shellcheck disable=SC2064
    trap "rm -rf '$making'" EXIT
    "$python" -m pip install --quiet --no-input --target "$making/uv" uv || die "pip has no uv, which asks for metadata alone"
    sed -n 's/^# relaxed: \([^ ]*\).*/\1/p' "$list" >"$making/relaxed"
    if ! "$making/uv/bin/uv" pip compile --quiet --no-header --only-binary :all: --override "$making/relaxed" \
        --python-version 3.11 --python-platform x86_64-manylinux_2_34 "$list" >"$making/resolved"; then
        die "$list does not resolve"
    fi
    if ! diff <(grep -oE '^[^# ]+' "$list") <(grep -oE '^[^# ]+' "$making/resolved") >&2; then
        die "$list (<) is not what it resolves to (>)"
    fi
    say "$(grep -cE '^[^#]' "$list") packages resolve"
}

install() {  # one line every 15 s while the recipe works, its whole output only when it fails
    local log="$1" start=$SECONDS recipe
    shift
    set -m  # a process group of its own, so that pip ends with it
    "$@" >"$log" 2>&1 &
    recipe=$!
    set +m
    trap 'kill -- "-$recipe" 2>/dev/null; wait "$recipe" || true; rm -rf "$making"; exit 130' INT TERM
    while kill -0 "$recipe" 2>/dev/null; do
        sleep 1
        if [ $(((SECONDS - start) % 15)) -eq 0 ]; then say "$((SECONDS - start)) s, $(tail -n 1 "$log" | cut -c 1-100)"; fi
    done
    trap - INT TERM
    wait "$recipe"
}

main() {  # read as a whole before it begins, so that the file may change meanwhile
    local engine="" device=gpu only_path="" only_check="" word python folder
    for word in "$@"; do
        case "$word" in
            vllm | sglang) engine=$word ;;
            --cpu) device=cpu ;;
            --path) only_path=yes ;;
            --check) only_check=yes ;;
            *) die "unknown argument '$word'; wanted vllm or sglang, --cpu, --path, --check" ;;
        esac
    done
    [ -n "$engine" ] || die "no engine named; wanted vllm or sglang"

    python=$(find_python) || exit 2
    if [ -n "$only_check" ]; then
        if [ "$device" = cpu ]; then die "--check is for the lists for GPUs; those for CPUs leave out what their packages name"; fi
        check "$root/tools/engines/$engine-gpu.txt" "$python"
        exit 0
    fi
    folder=$(cd "$root" && "$python" -m mrl.engines.environment "$engine" "$device") || exit 2
    if [ -n "$only_path" ] || [ -x "$folder/bin/python" ]; then
        echo "$folder/bin/python"
        exit 0
    fi

    mkdir -p "$(dirname "$folder")"
    if command -v flock >/dev/null; then
        exec 9>"$folder.lock"
        flock -n 9 || { say "another call makes it; waiting"; flock 9; }
        if [ -x "$folder/bin/python" ]; then echo "$folder/bin/python"; exit 0; fi
    fi

    rm -rf "$folder".making.*  # of calls that were killed: whoever makes it holds the lock
    making=$(mktemp -d "$folder.making.XXXX")
    chmod 755 "$making"
    say "making $folder (3 to 10 GB on disk, some minutes)"
    "$python" -m venv "$making" || die "python -m venv failed; on Debian and Ubuntu: apt install python3-venv"
    if ! install "$making/recipe.log" bash "$root/tools/engines/$engine.sh" "$making/bin/python" "$device" "$root/tools/engines/$engine-$device.txt"; then
        mv "$making/recipe.log" "$folder.failed.log"
        rm -rf "$making"
        tail -n 20 "$folder.failed.log" >&2
        die "the recipe of $engine failed; its whole output: $folder.failed.log"
    fi
    mv "$making" "$folder"  # whole and proven, or not there
    say "done in $SECONDS s"
    echo "$folder/bin/python"
}

main "$@"; exit
