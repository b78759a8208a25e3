#!/usr/bin/env bash
# Make an environment of packages that a run meets from outside, those of NAME.txt beside this file; print its folder.
#   tools/harness_env.sh harnesses|verifiers|openenv      in $XDG_CACHE_HOME/mrl; PYTHON names another interpreter
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
name=${1:?harnesses, verifiers or openenv}
folder=${XDG_CACHE_HOME:-$HOME/.cache}/mrl/$name
if ! cmp -s "$here/$name.txt" "$folder/made"; then
    rm -rf "$folder"
    "${PYTHON:-python3}" -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet --no-input -r "$here/$name.txt"
    cp "$here/$name.txt" "$folder/made"
fi
echo "$folder"
