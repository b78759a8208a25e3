#!/usr/bin/env bash
# Make the environment of evaluation harnesses that docs/serving.md is tested with, and print its folder.
#   tools/harness_env.sh [FOLDER]     by default $XDG_CACHE_HOME/mrl/harnesses; PYTHON names another interpreter
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/mrl/harnesses}
if [ ! -f "$folder/made" ]; then
    rm -rf "$folder"
    "${PYTHON:-python3}" -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet --no-input -r "$here/harnesses.txt"
    touch "$folder/made"
fi
echo "$folder"
