"""The module that stands in for SGLang's kernels where they have no build."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "mrl" / "engines" / "recipes" / "sglang_cpu"


def run(code: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the module answers for every import below its name."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(FOLDER)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    "code",
    [
        "from sgl_kernel import copy_all_layer_kv_cache_cpu",
        "from sgl_kernel.kvcacheio import transfer_kv_direct",
        "import sgl_kernel.a.b; sgl_kernel.a.b.kernel",
        "from sgl_kernel.scalar_type import scalar_types; hash(scalar_types.uint4b8)",
    ],
)
def test_whatever_sglang_imports_is_there(code):
    """Names, submodules, and attributes of either."""
    done = run(code)

    assert done.returncode == 0, done.stderr


def test_a_kernel_that_is_called_fails_by_its_name():
    """Nothing is computed wrongly in silence."""
    done = run("from sgl_kernel.kvcacheio import transfer; transfer(1, x=2)")

    assert done.returncode != 0
    assert "NotImplementedError: sgl_kernel.kvcacheio.transfer" in done.stderr


def test_other_modules_are_still_missing():
    """It answers for its own name alone, and has no attributes that Python itself would look for."""
    assert "ModuleNotFoundError" in run("import sgl_kernel, sgl_other").stderr
    assert run("import sgl_kernel; assert not hasattr(sgl_kernel, '__wrapped__')").returncode == 0
