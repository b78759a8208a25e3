#!/usr/bin/env bash
# Makes the environment and runs the main job: two policies of different families train together.
#   bash tools/quickstart.sh [--key.path value ...]     arguments go to `mrl train`
# Every call is a new run: runs/quickstart, runs/quickstart-2, ... With --clean or --resume it is runs/quickstart again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/setup.sh

name=()
if [[ " $* " != *" --clean "* && " $* " != *" --resume "* && " $* " != *" --run.name"* && -e runs/quickstart ]]; then
    number=2
    while [ -e "runs/quickstart-$number" ]; do number=$((number + 1)); done
    name=(--run.name "quickstart-$number")
    echo "quickstart: runs/quickstart exists and is kept; this run is runs/quickstart-$number (or use --clean, --resume)"
fi
exec .venv/bin/mrl train configs/quickstart.toml ${name[@]+"${name[@]}"} "$@"
