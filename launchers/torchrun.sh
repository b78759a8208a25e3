#!/usr/bin/env bash
# The ranks of one learner on a host with several GPUs: launchers/torchrun.sh RUN_FOLDER POLICY NUM_GPUS
# The run folder is one that `mrl train` made; its other roles run elsewhere. Agent and ranks meet in files of a
# temporary folder and talk over the loopback interface, so that no port is open to other machines.
#
# A learner over several hosts, on each of them, with the GPUs that it has there:
#   HOSTS=a,b PLACE=0 [ADDRESS=10.0.0.1] launchers/torchrun.sh RUN_FOLDER POLICY NUM_GPUS
# PLACE is which of HOSTS this one is, from 0; ADDRESS is how the others reach it where its hostname does not say so.
# The first rank writes to the run folder where all of them meet, and they talk over the interface of that address.
set -euo pipefail
ranks="${3:?RUN_FOLDER POLICY NUM_GPUS}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
if [ -n "${HOSTS:-}" ]; then
    IFS=, read -ra names <<< "$HOSTS"
    export MRL_LEARNER_HOSTS="$HOSTS" MRL_LEARNER_PLACE="${PLACE:?which of HOSTS this one is, from 0}"
    export MRL_HOST="${names[$PLACE]:?HOSTS has no such PLACE}"
    if [ -n "${ADDRESS:-}" ]; then export MRL_ADDRESS="$ADDRESS"; fi
else
    export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo
fi
MRL_LOCAL_FOLDER="$(mktemp -d "${TMPDIR:-/tmp}/mrl-by-hand-XXXXXXXX")"
export MRL_LOCAL_FOLDER
meeting="$2-by-hand-$(date +%s)-$$"
exec "${PYTHON:-python}" -m torch.distributed.run --rdzv-backend c10d --rdzv-conf store_type=file,keep_alive_interval=600 \
    --rdzv-endpoint "$MRL_LOCAL_FOLDER/$meeting" --rdzv-id "$meeting" --max-restarts 0 --nproc-per-node "$ranks" \
    -m mrl learner --run-folder "$1" --policy "$2"
