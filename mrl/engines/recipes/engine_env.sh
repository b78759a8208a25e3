#!/usr/bin/env bash
# What `mrl engine-env` runs.
#   engine_env.sh make ENGINE cpu|gpu FOLDER PYTHON   makes an environment and prints its python as the last line; two
#                                                     calls at once: the second waits, then finds it made
#   engine_env.sh check ENGINE gpu "" PYTHON          says whether the index has what the list names, and whether that
#                                                     fits together; it reads some MB (by uv, UV_INDEX_URL)
# The variable PYTHON names another interpreter (3.11); else it is the first suitable one: of PATH, then the last word.
set -euo pipefail
unset PYTHONPATH PYTHONHOME  # pip would take what lies there for installed
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

say() { echo "engine-env: $*" >&2; }
die() { say "$*"; exit 2; }

find_python() {  # the pinned packages are those of one minor version
    local candidate
    for candidate in ${PYTHON:-python3.11 python3 "$1"}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python 3.11 found (looked for ${PYTHON:-python3.11 python3 $1}); install it, or name its path: PYTHON=/path/to/python3.11"
}

pinned() { grep -oE '^[^# ]+' "$1" | grep -vE -f "$2"; }

check() {  # uv asks an index for metadata alone, where pip would download wheels of several GB
    local list="$1" python="$2" making
    making=$(mktemp -d)
    # shellcheck disable=SC2064
    trap "rm -rf '$making'" EXIT
    "$python" -m pip install --quiet --no-input --target "$making/uv" uv || die "cannot install uv with pip; uv reads package metadata without downloading wheels"
    sed -n 's/^# relaxed: \([^ ]*\).*/\1/p' "$list" >"$making/relaxed"
    if ! "$making/uv/bin/uv" pip compile --quiet --no-header --only-binary :all: --override "$making/relaxed" \
        --python-version 3.11 --python-platform x86_64-manylinux_2_34 "$list" >"$making/resolved"; then
        die "$list does not resolve"
    fi
    # What is relaxed is the index's newest, whichever that is on the day.
    sed -E 's/[<>=!~].*/==/; s/^/^/' "$making/relaxed" >"$making/free"
    if ! diff <(pinned "$list" "$making/free") <(pinned "$making/resolved" "$making/free") >&2; then
        die "the packages of $list (<) differ from what it resolves to (>)"
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
    local action=$1 engine=$2 device=$3 folder=$4 python
    python=$(find_python "$5") || exit 2
    if [ "$action" = check ]; then
        check "$here/$engine-$device.txt" "$python"
        exit 0
    fi

    mkdir -p "$(dirname "$folder")"
    if command -v flock >/dev/null; then
        exec 9>"$folder.lock"
        flock -n 9 || { say "another process is making this environment; waiting"; flock 9; }
        if [ -x "$folder/bin/python" ]; then echo "$folder/bin/python"; exit 0; fi
    fi

    rm -rf "$folder".making.*  # of calls that were killed: whoever makes it holds the lock
    making=$(mktemp -d "$folder.making.XXXX")
    chmod 755 "$making"
    say "making $folder (3 to 10 GB on disk, some minutes)"
    "$python" -m venv "$making" || die "python -m venv failed; on Debian and Ubuntu: apt install python3-venv"
    if ! install "$making/recipe.log" bash "$here/$engine.sh" "$making/bin/python" "$device" "$here/$engine-$device.txt"; then
        mv "$making/recipe.log" "$folder.failed.log"
        rm -rf "$making"
        tail -n 20 "$folder.failed.log" >&2
        die "the recipe of $engine failed; full output: $folder.failed.log"
    fi
    mv "$making" "$folder"  # whole and proven, or not there
    say "done in $SECONDS s"
    echo "$folder/bin/python"
}

main "$@"; exit
