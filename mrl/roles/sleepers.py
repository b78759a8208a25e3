"""What is on a host's units and sleeps: workers that said so, and that this node has stopped, thread by thread.

A stopped process computes nothing, whatever it said. It runs again when this node lets it, or by a stranger's SIGCONT;
then it still waits for the node's word (`mrl.launch.sleep_line`), and is stopped again as soon as somebody looks.
"""

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

AT_REST = frozenset("TtZX")
"""States of a thread in /proc: stopped, traced, or ended."""


class Sleepers:
    """Workers by name."""

    def __init__(self) -> None:
        self._resting: set[str] = set()

    def __contains__(self, worker: str) -> bool:
        return worker in self._resting

    def add(self, worker: str) -> None:
        """It says that it sleeps."""
        self._resting.add(worker)

    def remove(self, worker: str) -> None:
        """It is to wake up, or to end."""
        self._resting.discard(worker)

    def is_stopped(self, worker: str, pids: Iterable[int]) -> bool:
        """Whether a worker said that it sleeps and every thread of its processes is stopped; stops those that run."""
        running = [pid for pid in pids if not at_rest(pid)]
        if worker not in self._resting:
            return False
        for pid in running:
            send(pid, signal.SIGSTOP)
        return not running


def at_rest(pid: int) -> bool:
    """Whether no thread of a process can run; of one that is gone none can."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except FileNotFoundError:
        return True
    return all(_state(thread) in AT_REST for thread in threads)


def _state(thread: Path) -> str:
    try:
        return (thread / "stat").read_text(encoding="ascii", errors="replace").rpartition(") ")[2][:1]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def send(pid: int, number: signal.Signals) -> None:
    """Signal one process, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
