"""What the pinned wheels for GPUs ask of a machine, and what of that this one lacks."""

import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

PYTHON = (3, 11)
DRIVER = 580
"""Least driver of CUDA 13, which the wheels of both engines are built for."""
GLIBC = {"vllm": (2, 28), "sglang": (2, 34)}
"""By the tags of the wheels; see `recipes/`."""
COMPILES = ("sglang",)
"""Engines that compile kernels of their own for CUDA when they start; vLLM does without."""
CUDA = Path("/usr/local/cuda")
"""Where they look for a compiler if nothing names another place."""
DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Machine:
    """What of a machine decides whether a wheel runs there; None where that is not known."""

    driver: int | None
    glibc: tuple[int, ...] | None
    has_python: bool
    has_nvcc: bool
    """CUDA's compiler, where engines look for it."""


def this_machine() -> Machine:
    """The driver's major version, the C library's, whether there is a Python of the environments' version, and CUDA's
    compiler.
    """
    name, version = platform.libc_ver()
    glibc = tuple(int(part) for part in re.findall(r"\d+", version)) if name == "glibc" and version else None
    try:
        found = re.search(r"Kernel Module\D*?(\d+)\.\d+", DRIVER_FILE.read_text().replace("x86_64", ""))
    except OSError:
        found = None
    python = f"python{PYTHON[0]}.{PYTHON[1]}"
    has_python = sys.version_info[:2] == PYTHON or shutil.which(python) is not None
    return Machine(int(found[1]) if found else None, glibc, has_python, _has_nvcc())


def _has_nvcc() -> bool:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None and shutil.which("nvcc") is not None:
        return True
    return os.access(Path(home or CUDA) / "bin" / "nvcc", os.X_OK)


def lacks(engine: str, machine: Machine) -> list[str]:
    """One line for each thing that keeps the pinned wheels of `engine` from running on GPUs of `machine`."""
    lines = []
    if machine.driver is not None and machine.driver < DRIVER:
        lines.append(
            f"{engine} on GPUs: driver {machine.driver}; wanted >= {DRIVER}, for wheels of CUDA 13; cure: a newer "
            "driver, or server.python of an environment that was built for this one"
        )
    if machine.glibc is not None and machine.glibc < GLIBC[engine]:
        got, wanted = (".".join(map(str, version)) for version in (machine.glibc, GLIBC[engine]))
        lines.append(f"{engine} on GPUs: glibc {got}; wanted >= {wanted}; cure: a newer system, or a container of one")
    if not machine.has_python:
        wanted = ".".join(map(str, PYTHON))
        cure = f"install python{wanted}, or name it: PYTHON=... mrl engine-env {engine}"
        lines.append(f"{engine} on GPUs: no Python {wanted}, which its environment is made with; cure: {cure}")
    if engine in COMPILES and machine.driver is not None and not machine.has_nvcc:
        lines.append(
            f"{engine} on GPUs: no nvcc by CUDA_HOME, CUDA_PATH, PATH or in {CUDA}, with which it compiles kernels "
            "when it starts; cure: a toolkit of CUDA 13, and CUDA_HOME where it lies elsewhere"
        )
    return lines
