#!/usr/bin/env bash
# What mrl does on a GPU, measured in stages of at most ten minutes each; one JSON line for each figure.
#   bash tools/gpu_hour.sh                       the stages, what each measures, and how long it takes
#   bash tools/gpu_hour.sh STAGE[/PART]          contact, learner, weights, run, resume, vllm, or all of them in order: all
#   bash tools/gpu_hour.sh STAGE --cpu           the same code on a CPU with tiny shapes
#   bash tools/gpu_hour.sh --carry [FOLDER]      where there is a network: the wheels that a machine without one lacks
# Figures also go to gpu_hour.jsonl in --out FOLDER (default $OUT, or runs/gpu_hour). See docs/gpu-hour.md.
# PYTHON names the interpreter; the default is .venv's, or the first python3 on PATH.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-}
if [ -z "$python" ]; then
    if [ -x "$root/.venv/bin/python" ]; then python="$root/.venv/bin/python"; else python=python3; fi
fi
unset PYTHONDONTWRITEBYTECODE  # with it every process compiles torch and transformers anew
export PYTHONPATH="$root:$root/tools${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=false
exec "$python" -m gpu_hour "$@"
