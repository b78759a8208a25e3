"""Memory of a process tree as summed PSS: a page's bytes are divided between the processes that map it."""

import os

import psutil

MIB = 1024 * 1024


def process_values(num_restarts: int) -> dict[str, float]:
    """Return as metrics the number and memory of this process and its descendants, and the restarts among them.

    Processes that end meanwhile are left out.
    """
    try:
        pids = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
    except psutil.Error:
        pids = [os.getpid()]
    return {
        "process/pss_mib": sum(_pss_bytes(f"/proc/{one}/smaps_rollup") for one in pids) / MIB,
        "process/count": float(len(pids)),
        "process/restarts": float(num_restarts),
    }


def _pss_bytes(path: str) -> int:
    try:
        with open(path, encoding="ascii") as file:
            for line in file:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0
