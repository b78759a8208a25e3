"""The process of an inference server, with all processes that it starts: started, watched, ended without remainder."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from mrl.engines.temporary_folder import TemporaryFolder
from mrl.parent_death import command

TAIL_LINES = 12
SAYS_NOTHING = re.compile(r'^[\s^~]*$|\bFile ".*", line \d+|\d+%\|| \d+% Completed')
"""Lines of a log that tell nothing: places in code, the marks drawn below them, and progress bars."""
OWN_PYTHON = frozenset({"PYTHONPATH", "PYTHONHOME"})
"""Environment variables about mrl's interpreter, which a server does not inherit. The server has an interpreter of its
own, and would import packages found there, often of another version of Python, before those of its environment."""
TEXT_BYTES = 64 * 1024
TERM_S = 10.0
END_POLL_S = 0.02


class ServerProcess:
    """A child that the kernel ends with this process; the child's descendants are remembered, to be ended with it.

    Start it from a thread that lives as long as the server shall: the kernel looks at the thread, not the process.
    The child stays in the process group of this process, so a signal to the group ends it, too. Its temporary folder is
    removed with it, since servers leave sockets and metrics files there.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        temporary: TemporaryFolder | None = None,
    ) -> None:
        """Start the server; its output is appended to `log`. It owns `temporary`, by default a new temporary folder.

        Raises OSError.
        """
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = temporary or TemporaryFolder()
        around = {name: value for name, value in os.environ.items() if name not in OWN_PYTHON}
        with log.open("ab") as file:
            self._log_start = file.tell()
            self._process = subprocess.Popen(
                command(os.getpid(), tuple(argv)),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**around, "TMPDIR": str(self._temporary.path), **environment},
            )
        self._root = psutil.Process(self._process.pid)
        self._descendants: set[psutil.Process] = set()

    @property
    def pid(self) -> int:
        """Process id of the server itself."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Exit code of the server; None while it lives, when its present descendants are remembered."""
        code = self._process.poll()
        if code is None:
            self._remember()
        return code

    def listens_at(self, port: int) -> bool:
        """Whether this server, or a process that it started, listens at a TCP port, as the kernel says."""
        return any(port in _listening(process) for process in (self._root, *self._descendants))

    def text(self) -> str:
        """Return the end of the server's log since this start."""
        with self.log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, end - TEXT_BYTES))
            return file.read().decode("utf-8", errors="replace")

    def tail(self) -> str:
        """Return the last telling lines of the server's log since this start, joined into one line."""
        lines = [line.strip() for line in self.text().splitlines() if not SAYS_NOTHING.search(line)]
        return " | ".join(lines[-TAIL_LINES:])

    def end(self, within_s: float = TERM_S) -> None:
        """End all processes: SIGTERM, then SIGKILL to those left after `within_s`. May be called again.

        Processes that remove shared memory of dead processes are killed only after another `within_s`.
        """
        self._remember()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)  # a stopped process does not hear SIGTERM
            self._process.terminate()
        self._await_end(within_s)
        for process in self._living():
            if not _removes_memory(process):
                _kill(process)
        self._process.kill()
        self._process.wait()
        self._await_end(within_s)
        for process in self._living():
            _kill(process)
        self._temporary.remove()

    def _await_end(self, within_s: float) -> None:
        """Wait until no process runs, at most `within_s`; one that lost its parent may stay a zombie for long."""
        deadline_s = time.monotonic() + within_s
        while self._living() and time.monotonic() < deadline_s:
            time.sleep(END_POLL_S)

    def _remember(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self._descendants.update(self._root.children(recursive=True))

    def _living(self) -> list[psutil.Process]:
        """Processes that still run; psutil knows a pid that was given to another process by its time of creation."""
        members = list(self._descendants)
        if self._process.poll() is None:
            members.append(self._root)
        return [process for process in members if process.is_running() and not _is_zombie(process)]


def _listening(process: psutil.Process) -> set[int]:
    """TCP ports at which a process listens; none once the process has ended."""
    try:
        return {one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    except psutil.NoSuchProcess:
        return set()


def free_port(host: str) -> int:
    """Return a TCP port that was free a moment ago; it may be taken when a server binds it."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def _removes_memory(process: psutil.Process) -> bool:
    """Whether a process is Python's resource tracker, which ends by itself after the last process that it tracks."""
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
