"""Requirements of the pinned wheels for GPUs, and which of them this machine lacks."""

import os
import platform
import re
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

PYTHON = (3, 11)
DRIVER = 580
"""Lowest major version of the NVIDIA driver for CUDA 13, for which the wheels of both engines are built."""
GLIBC = {"vllm": (2, 28), "sglang": (2, 34)}
"""Engine -> lowest version of glibc, by the tags of its wheels; see `recipes/`."""
DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Machine:
    """Properties of a machine that decide whether a wheel runs there; None where a property is not known."""

    driver: int | None
    glibc: tuple[int, ...] | None
    has_python: bool
    can_compile: bool
    """Whether there is a C++ compiler and, if this Python has the version of the environments, Python's headers."""


def this_machine() -> Machine:
    """Look at this machine: major version of the driver, version of glibc, whether there is a Python of the
    environments' version, and whether code that Triton writes can be compiled.
    """
    name, version = platform.libc_ver()
    glibc = tuple(int(part) for part in re.findall(r"\d+", version)) if name == "glibc" and version else None
    try:
        found = re.search(r"Kernel Module\D*?(\d+)\.\d+", DRIVER_FILE.read_text().replace("x86_64", ""))
    except OSError:
        found = None
    python = f"python{PYTHON[0]}.{PYTHON[1]}"
    is_it = sys.version_info[:2] == PYTHON
    has_headers = not is_it or Path(sysconfig.get_path("include"), "Python.h").is_file()
    can_compile = has_headers and shutil.which(os.environ.get("CXX", "c++")) is not None
    return Machine(int(found[1]) if found else None, glibc, is_it or shutil.which(python) is not None, can_compile)


def lacks(engine: str, machine: Machine) -> list[str]:
    """Return a line for each property that keeps the pinned wheels of `engine` from running on GPUs of `machine`."""
    lines = []
    if machine.driver is not None and machine.driver < DRIVER:
        lines.append(
            f"{engine} on GPUs: driver {machine.driver}; wanted >= {DRIVER}, for wheels of CUDA 13; cure: install a "
            "newer driver, or set server.python to an environment that was built for this driver"
        )
    if machine.glibc is not None and machine.glibc < GLIBC[engine]:
        got, wanted = (".".join(map(str, version)) for version in (machine.glibc, GLIBC[engine]))
        lines.append(
            f"{engine} on GPUs: glibc {got}; wanted >= {wanted}; cure: use a newer system, or a container with one"
        )
    if not machine.has_python:
        wanted = ".".join(map(str, PYTHON))
        cure = f"install python{wanted}, or name its path: PYTHON=... mrl engine-env {engine}"
        lines.append(f"{engine} on GPUs: no Python {wanted}, which its environment needs; cure: {cure}")
    if machine.driver is not None and not machine.can_compile:
        lines.append(
            f"{engine} on GPUs: no C++ compiler (c++, or CXX), or no Python.h, needed to compile kernels at its start; "
            f"cure: install g++, and python{PYTHON[0]}.{PYTHON[1]}-dev for a Python of the distribution"
        )
    return lines
