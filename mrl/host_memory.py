"""Memory of this host that this process may use: a container or a SLURM job may have less than the whole.

Files of the kernel tell the limit of a control group (cgroups v2 and v1). Nothing announces that the limit is reached:
the process that writes to one page more is killed.
"""

from collections.abc import Iterator
from pathlib import Path

import psutil

OF_PROCESS, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
V2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
"""(file with a group's limit, file with its use, keys of memory.stat for the use that the kernel can reclaim)."""


def host_memory_bytes() -> int:
    """Bytes of memory on the host, or the lowest limit of this process's control groups if that is less."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _limits())])


def free_memory_bytes() -> int:
    """Bytes that this process can still write to, swap included."""
    free = min([psutil.virtual_memory().available, *(max(0, limit - used) for limit, used in _limits())])
    return free + psutil.swap_memory().free


def _limits() -> Iterator[tuple[int, int]]:
    """(limit, use) in bytes of each control group with a limit that this process is in."""
    try:
        lines = OF_PROCESS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = GROUPS / "memory" if controllers else GROUPS
        # In a container `path` may be the host's, of which the container sees only the end or nothing.
        folder = root / path.lstrip("/")
        for group in (folder, *(parent for parent in folder.parents if parent.is_relative_to(root))):
            try:
                yield _limit(group, *(V1 if controllers else V2))
            except (OSError, ValueError):  # the group's files are not there, or it has no limit
                continue


def _limit(group: Path, limit: str, used: str, kept: tuple[str, ...]) -> tuple[int, int]:
    told = dict(line.split() for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines())
    given_back = sum(int(told.get(one, "0")) for one in kept)
    return int((group / limit).read_text()), int((group / used).read_text()) - given_back
