#!/usr/bin/env bash
# Recipe of SGLang's environment: installs it for the python of a new environment, and proves it by an import.
#   bash mrl/engines/recipes/sglang.sh PYTHON cpu|gpu CONSTRAINTS
# Lists are complete, so nothing else is resolved.
# cpu: for tests without a GPU; what SGLang declares would bring torch and kernels for CUDA. Its kernel package has a
#      stand-in (sglang_cpu/), and torchvision, which it imports and does not use here, is kept from registering
#      operators of the torch that it was built for.
# gpu: the official package, and CUDA's compiler, by which it makes kernels when it starts. Its wheels lie as a toolkit
#      does but for the names of libraries, and have to be of one version with the headers of the CUDA runtime.
set -euo pipefail
python=$1 device=$2 constraints=$3
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
pip() { "$python" -m pip install --no-input --progress-bar off "$@"; }

if [ "$device" = gpu ]; then
    pip --no-deps -r "$constraints"
    toolkit=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/cu13
    ln -s lib "$toolkit/lib64"
    ln -s libcudart.so.13 "$toolkit/lib/libcudart.so"
else
    # shellcheck disable=SC2046
    pip --no-deps $(bash "$here/torch_index.sh" "$python") -r <(grep -E '^torch(vision)?==' "$constraints")
    pip --no-deps -r <(grep -vE '^torch(vision)?==' "$constraints")
    packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp "$here/sglang_cpu/sgl_kernel.py" "$packages/"
    : >"$packages/torchvision/_meta_registrations.py"
    export SGLANG_USE_CPU_ENGINE=1
fi
"$python" -W ignore -c 'import sglang.srt.entrypoints.http_server, sglang.version as v, torch; print(v.__version__, torch.__version__)'
