"""A process of the benchmark as its parent sees it: asked line by line, measured by its CPU clock, ended by its pid."""

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from bench_peers.part import DEADLINE_S, Settings
from mrl import parent_death

FOLDER = Path(__file__).resolve().parents[1]
END_S = 10.0


class Child:
    """A process `python -m bench_peers` with one part of a system: `producer`, `consumer` or `broker`."""

    def __init__(self, part: str, system: str, settings: Settings) -> None:
        argv = (sys.executable, "-m", "bench_peers", part, system, json.dumps(settings))
        path = os.pathsep.join((str(FOLDER), str(FOLDER.parent), os.environ.get("PYTHONPATH", "")))
        environment = os.environ | {"PYTHONPATH": path}
        self._name = f"{part} of {system}"
        self._process = subprocess.Popen(
            parent_death.command(os.getpid(), argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            bufsize=1,
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def tell(self, message: object) -> None:
        """Write one line of JSON to the process."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Return its next line of JSON. Raises RuntimeError when it ends, or says nothing for twice `DEADLINE_S`."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], 2 * DEADLINE_S)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise RuntimeError(f"the {self._name} {'has ended' if ready else 'does not answer'}")
        return json.loads(line)

    def ask(self, message: object) -> Any:
        """Write one line of JSON and return the answer."""
        self.tell(message)
        return self.answer()

    def close(self) -> None:
        """End the process and close its pipes."""
        end(self._process)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def end(process: subprocess.Popen[Any]) -> None:
    """Terminate a process; kill it when it has not ended after `END_S`."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process, by the kernel's nanosecond clock of that process."""
    return time.clock_gettime((~pid << 3) | 2)  # MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED) of the kernel


def tree_cpu_s() -> float:
    """CPU seconds of this process and of its living descendants."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(one.user + one.system for one in times)


class Load(NamedTuple):
    """CPU seconds of the machine and of some processes until a moment."""

    at_s: float
    busy_s: float
    """CPU seconds of all processes of the machine."""
    own_s: tuple[float, ...]
    """CPU seconds of each given process."""

    @classmethod
    def of(cls, pids: Sequence[int]) -> "Load":
        """Load until now; `own_s` in the order of the pids."""
        times = psutil.cpu_times()
        idle_s = times.idle + times.iowait
        return cls(time.monotonic(), sum(times[:8]) - idle_s, tuple(map(cpu_s, pids)))

    def others_since(self, before: "Load") -> float:
        """Share of the cores that went to other processes since `before`."""
        others_s = (self.busy_s - before.busy_s) - (sum(self.own_s) - sum(before.own_s))
        return max(0.0, others_s / ((self.at_s - before.at_s) * (os.cpu_count() or 1)))


def await_listener(port: int, name: str, process: subprocess.Popen[Any]) -> None:
    """Wait until something listens on the port. Raises RuntimeError when the process ends or nothing listens."""
    end_s = time.monotonic() + DEADLINE_S
    while process.poll() is None and time.monotonic() < end_s:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            time.sleep(0.01)  # another project's server tells in no other way that it is ready
        else:
            return
    raise RuntimeError(f"{name} does not listen on port {port}")
