"""Load of a host: its CPU, its memory, the disk of the run folder, and its GPUs.

A thread measures, because a faulty driver or network disk may never answer: then no more values come, and no other
thread waits.
"""

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from mrl.host_memory import free_memory_bytes, host_memory_bytes
from mrl.metrics.gpu_load import GpuLoad

MIB = 1024 * 1024
HERE = "here"
"""Name of the one host of a run whose configuration names no hosts."""


class HostLoad:
    """Measures this host every `every_s` seconds, in a thread beside the thread that takes the values."""

    def __init__(self, folder: Path, gpus: Sequence[str], *, host: str, every_s: float) -> None:
        """With `every_s` = 0 nothing is measured."""
        self._folder, self._gpus, self._every_s = folder, gpus, every_s
        self._host = (host or HERE).replace("/", ":")
        self._gpu_prefix = f"{self._host}:" if host else ""
        self._newest: dict[str, float] = {}
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        if every_s:
            threading.Thread(target=self._measure, name="host-load", daemon=True).start()

    def take(self) -> dict[str, float]:
        """Return the newest metrics, if measured since the last call, else none. Never waits for a measurement."""
        with self._lock:
            taken, self._newest = self._newest, {}
        return taken

    def close(self) -> None:
        """End the measurements."""
        self._is_over.set()

    def _measure(self) -> None:
        gpus = GpuLoad(self._gpus)
        psutil.cpu_percent()  # the first call has nothing to compare with
        while not self._is_over.wait(self._every_s):
            values = self._values(gpus)
            with self._lock:
                self._newest = values

    def _values(self, gpus: GpuLoad) -> dict[str, float]:
        free_bytes = free_memory_bytes()
        found = {
            "cpu_share": psutil.cpu_percent() / 100,
            "memory_mib": max(0, host_memory_bytes() - free_bytes) / MIB,
            "memory_free_mib": free_bytes / MIB,
        }
        with suppress(OSError):  # the folder is gone, or its disk is: the other values stay
            found["disk_free_mib"] = psutil.disk_usage(str(self._folder)).free / MIB
        values = {f"host/{what}/{self._host}": value for what, value in found.items()}
        for place, told in enumerate(gpus.values()):
            values |= {f"gpu/{what}/{self._gpu_prefix}{place}": value for what, value in told.items()}
        return values
