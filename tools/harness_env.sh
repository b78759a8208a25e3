#!/usr/bin/env bash
# Make an environment of packages that ask a run's gateway, those of NAME.txt beside this file, and print its folder.
#   tools/harness_env.sh harnesses|verifiers      in $XDG_CACHE_HOME/mrl; PYTHON names another interpreter
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
name=${1:?harnesses or verifiers}
folder=${XDG_CACHE_HOME:-$HOME/.cache}/mrl/$name
if ! cmp -s "$here/$name.txt" "$folder/made"; then
    rm -rf "$folder"
    "${PYTHON:-python3}" -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet --no-input -r "$here/$name.txt"
    cp "$here/$name.txt" "$folder/made"
fi
echo "$folder"
