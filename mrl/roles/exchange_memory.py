"""How the exchange's process holds its memory: what it lets go of returns to the system, and there is a hard end."""

import ctypes
import resource
from pathlib import Path

import structlog

MIB = 1024 * 1024
SPARE_BYTES = 512 * MIB
"""What may be allocated beside the budget. Far above what the worst client was seen to bring about (150 MB): what is
mapped and not touched counts too, such as stacks of threads."""

# Parameters of glibc's malloc, from malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_ALLOCATION = {
    # Each thread that allocates would keep free memory of its own, and none of it for the others.
    _ARENA_MAX: 1,
    # Not set, it grows to 32 MiB with the first messages of such a length, whose holes in the heap then stay. Below it
    # lies the usual message of 1 MiB, which need not be mapped and filled with zeros anew each time.
    _MMAP_THRESHOLD: 2 * MIB,
    _TRIM_THRESHOLD: 4 * MIB,
}

log = structlog.get_logger()


def compact_heap() -> bool:
    """Let resident memory follow what is held; to be called before threads start. False where malloc is not glibc's."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        is_set = False
    else:
        is_set = all(mallopt(name, value) for name, value in _ALLOCATION.items())
    if not is_set:
        log.warning("the heap cannot be kept compact with this C library: resident memory may exceed its bound")
    return is_set


def data_bytes() -> int:
    """What this process has allocated: on a machine of many cores libraries alone take gigabytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    return pages * resource.getpagesize()


def limit_memory(num_bytes: int) -> None:
    """Let no more data than this be allocated by this process; a lower limit that is in force already stays."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or hard > num_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))
