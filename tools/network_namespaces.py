"""Hosts on one machine, for drills: network namespaces, each with its own address and loopback. Only root makes them.

Files, processes and clocks are those of the machine; everything else crosses by the network alone.
"""

import ctypes
import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAMED = Path("/run/netns")
"""Folder in which iproute2 keeps namespaces that have a name."""
_CLONE_NEWNET = 0x40000000


class Namespaces:
    """Hosts that share this machine's files and nothing of its network: each has one address on a common bridge."""

    numbers = itertools.count()  # the kernel frees the names of links some time after their namespace is deleted

    def __init__(self, count: int) -> None:
        self._tag = f"m{os.getpid() % 100_000}n{next(self.numbers) % 100}"
        self.hosts = [f"{self._tag}-{number}" for number in range(1, count + 1)]
        net = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        self.addresses = [f"{net}.{number}" for number in range(1, count + 1)]

    def open(self) -> None:
        """Make the namespaces. Raises CalledProcessError where the kernel has none to give."""
        ip("link", "add", self._tag, "type", "bridge")
        ip("link", "set", self._tag, "up")
        for host, address in zip(self.hosts, self.addresses, strict=True):
            ip("netns", "add", host)
            ip("link", "add", f"v{host}", "type", "veth", "peer", "name", "eth0", "netns", host)
            ip("link", "set", f"v{host}", "master", self._tag, "up")
            ip("-n", host, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", host, "link", "set", device, "up")

    def cut(self, host: str, *, whole: bool = False) -> None:
        """Cut a host off the network, or with `whole` connect it again."""
        ip("link", "set", f"v{host}", "up" if whole else "down")

    def close(self) -> None:
        """Delete the namespaces and the bridge."""
        for words in (*(("netns", "del", host) for host in self.hosts), ("link", "del", self._tag)):
            subprocess.run(["ip", *words], capture_output=True, timeout=120, check=False)


@contextmanager
def namespaces(count: int) -> Iterator[Namespaces]:
    """Make `count` namespaces until the end of the block. Raises CalledProcessError as `Namespaces.open`."""
    made = Namespaces(count)
    try:
        made.open()
        yield made
    finally:
        made.close()


def ip(*words: str) -> None:
    """Run iproute2's `ip`. Raises CalledProcessError."""
    subprocess.run(["ip", *words], capture_output=True, text=True, timeout=120, check=True)


def enter(host: str) -> None:
    """Move this thread, and processes that it starts from now on, into a namespace. Raises OSError."""
    descriptor = os.open(NAMED / host, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {host}")
    finally:
        os.close(descriptor)
