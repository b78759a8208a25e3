"""A process of the drill, started, killed, stopped and watched by its parent; its output goes into a file."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mrl import parent_death

TOOLS = Path(__file__).resolve().parents[1]
POLL_S = 0.002


class Process:
    """A command that can be run again and again. One run of it is a life."""

    def __init__(self, argv: Sequence[str], log: Path) -> None:
        self.argv = tuple(argv)
        """Command line of the next life."""
        self._log = log
        path = os.pathsep.join((str(TOOLS), str(TOOLS.parent)))
        self._environment = {**os.environ, "PYTHONPATH": path}
        self._process: subprocess.Popen[bytes] | None = None
        self._log_begin = 0

    @property
    def pid(self) -> int:
        """Pid of the process that runs, or ran last; 0 before the first start."""
        return self._process.pid if self._process is not None else 0

    @property
    def exit_code(self) -> int | None:
        """Exit code, or minus the number of the signal that ended it; None while it runs, 0 before the first start."""
        return self._process.poll() if self._process is not None else 0

    def start(self) -> None:
        """Begin a new life."""
        self._log_begin = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                parent_death.command(os.getpid(), self.argv), stdout=log, stderr=log, env=self._environment
            )

    def said(self) -> str:
        """Output of this life."""
        with self._log.open("rb") as log:
            log.seek(self._log_begin)
            return log.read().decode(errors="replace")

    def last_words(self) -> str:
        """Last line of this life's output."""
        return self.said().strip().rpartition("\n")[2][-500:]

    def signal(self, number: int) -> None:
        """Send the process a signal."""
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process with SIGKILL, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def finish(self, timeout_s: float) -> int:
        """End the process with SIGTERM and return its exit code. Raises TimeoutExpired."""
        self.signal(signal.SIGTERM)
        assert self._process is not None
        return self._process.wait(timeout_s)

    def status_bytes(self, field: str) -> int:
        """Field of /proc/PID/status in bytes, for example VmHWM; 0 when the process is gone."""
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


def module_argv(module: str, *arguments: str) -> tuple[str, ...]:
    """Command line that runs one of the drill's modules."""
    return (sys.executable, "-m", f"exchange_drill.{module}", *arguments)


def wait_until(condition: Callable[[], object], what: str, timeout_s: float) -> None:
    """Wait until a condition is true. Raises RuntimeError, which names `what`, when it is not in time."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            raise RuntimeError(f"{what}: not within {timeout_s:g} s")
        time.sleep(POLL_S)
