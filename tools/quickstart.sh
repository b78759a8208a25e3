#!/usr/bin/env bash
# Makes the environment and runs the main job: two policies of different families train together.
#   bash tools/quickstart.sh [--key.path value ...]     arguments go to `mrl quickstart`
# Every call is a new run: runs/quickstart, runs/quickstart-2, ... With --clean or --resume it is runs/quickstart again.
# Ends by saying how to call `mrl` next.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/setup.sh
exec .venv/bin/mrl quickstart "$@"
