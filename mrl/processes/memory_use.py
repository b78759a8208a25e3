"""Memory of a process tree as summed PSS: a page's bytes are divided between the processes that map it."""

from typing import NamedTuple

import psutil

MIB = 1024 * 1024


class Footprint(NamedTuple):
    """Number and memory of a process and its descendants."""

    num_processes: int
    pss_mib: float


def footprint_of(pid: int) -> Footprint:
    """Return the footprint of `pid` and all its descendants; processes that end meanwhile are left out."""
    try:
        root = psutil.Process(pid)
        pids = [pid, *(child.pid for child in root.children(recursive=True))]
    except psutil.Error:
        return Footprint(0, 0.0)
    sizes = [_pss_bytes(f"/proc/{one}/smaps_rollup") for one in pids]
    return Footprint(len(pids), sum(sizes) / MIB)


def _pss_bytes(path: str) -> int:
    try:
        with open(path, encoding="ascii") as file:
            for line in file:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0
