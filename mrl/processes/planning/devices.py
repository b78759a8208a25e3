"""GPUs that this host shows, by the names that CUDA_VISIBLE_DEVICES takes; every process calls its own "cuda"."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import takewhile
from pathlib import Path

import structlog

DRIVER_S = 10.0
"""Seconds to wait for nvidia-smi; a broken driver never answers."""
ABANDON_S = 1.0
DEVICE_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Environment that makes CUDA number GPUs by their place on the bus, as nvidia-smi does; by default the fastest GPU is
the first."""
_GPU = re.compile(r"GPU \d+:.*\(UUID: (GPU-[^)\s]+)\)")
_NAME = re.compile(r"\d|GPU-|MIG-")
_MIG = re.compile(r"\s+MIG .*\(UUID: (MIG-[^)\s]+)\)")

log = structlog.get_logger()


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """Return the GPUs that this host offers: the names in CUDA_VISIBLE_DEVICES if it is set, else the driver's ids.

    As in CUDA, a word that is no name ends the list: -1 hides all GPUs, and so does SLURM's NoDevFiles.

    Where the driver lists no GPU the names are numbers, one for each /dev/nvidiaN: CUDA counts from 0 whatever N is.
    """
    if "CUDA_VISIBLE_DEVICES" in environment:
        return list(takewhile(_NAME.match, map(str.strip, environment["CUDA_VISIBLE_DEVICES"].split(","))))
    return list(_shown(environment.get("PATH", ""), devices))


@cache
def _shown(path: str, devices: Path) -> tuple[str, ...]:
    num_devices = sum(found.name[6:].isdigit() for found in devices.glob("nvidia*"))
    said, why_not = ask_driver(["-L"], path=path)
    if said is not None and (gpus := listed_gpus(said)):
        return tuple(gpus)
    if num_devices:
        why = why_not or "nvidia-smi -L lists no GPU"
        log.warning("GPUs named by number", gpus=num_devices, reason=f"{why}; set CUDA_VISIBLE_DEVICES to name them")
    return tuple(map(str, range(num_devices)))


def listed_gpus(lines: Iterable[str]) -> list[str]:
    """Return the ids in the answer of `nvidia-smi -L`; for a GPU cut into parts (MIG), the ids of its parts."""
    found: list[list[str]] = []
    for line in lines:
        if whole := _GPU.match(line):
            found.append([whole[1]])
        elif (part := _MIG.match(line)) and found:
            found[-1].append(part[1])
    return [name for whole, *parts in found for name in (parts or [whole])]


def sizes_mib(gpus: Sequence[str]) -> dict[str, float]:
    """Return GPU -> MiB of memory, as the driver reports; a GPU whose memory it does not report is left out."""
    said, _ = ask_driver(["--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"])
    found: dict[str, float] = {}
    for index, uuid, mib in (map(str.strip, line.split(",")) for line in said or () if line.count(",") == 2):
        if mib.isdigit():
            found |= {name: float(mib) for name in gpus if name == index or (name != "" and uuid.startswith(name))}
    return found


def ask_driver(
    words: Sequence[str], *, path: str | None = None, within_s: float = DRIVER_S
) -> tuple[list[str] | None, str]:
    """Return the lines that nvidia-smi prints, or None and the reason why there are none."""
    program = shutil.which("nvidia-smi", path=os.environ.get("PATH", "") if path is None else path)
    if program is None:
        return None, "nvidia-smi was not found"
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen([program, *words], stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    except OSError as error:
        return None, f"nvidia-smi: {error.strerror}"
    try:
        said, complaint = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        _abandon(process)
        return None, f"nvidia-smi did not answer within {within_s:g} s"
    if process.returncode:
        return (
            None,
            f"nvidia-smi failed with exit code {process.returncode}: {' '.join((complaint or said).split())[:200]}",
        )
    return said.splitlines(), ""


def _abandon(process: subprocess.Popen[str]) -> None:
    """Kill a process with its group; a process inside a hanging driver does not end by that, and is not awaited."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in filter(None, (process.stdout, process.stderr)):
        pipe.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(ABANDON_S)
