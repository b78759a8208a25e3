#!/usr/bin/env bash
# One learner on one host with several GPUs: launchers/torchrun.sh RUN_FOLDER POLICY NUM_GPUS
# The run folder is one that `mrl train` made; its other roles run elsewhere.
set -euo pipefail
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
exec "${PYTHON:-python}" -m torch.distributed.run --standalone --max-restarts 0 --nproc-per-node "${3:?RUN_FOLDER POLICY NUM_GPUS}" \
    -m mrl learner --run-folder "$1" --policy "$2"
