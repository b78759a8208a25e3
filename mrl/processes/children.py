"""One child process: its start, its signals, its end and its log. Only supervisors use this module."""

import errno
import json
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil

from mrl.config.run_folder import LOCAL_FOLDER
from mrl.fork_server import ForkedProcess, ForkServer
from mrl.parent_death import SUPERVISOR_PID, command
from mrl.processes import sleep_channel
from mrl.processes.planning.devices import DEVICE_ORDER
from mrl.processes.planning.hosts import MRL
from mrl.processes.planning.log_lines import rank_code, reason_in
from mrl.processes.planning.plan import ProcessSpec, environment
from mrl.processes.planning.restarts import USER_ERROR
from mrl.processes.planning.torchrun import LIFE, LOCAL
from mrl.processes.planning.unit_workers import UNIT

CAN_FORK = hasattr(os, "pidfd_open")
"""Whether the kernel (Linux) can tell of the end of a process that is another process's child."""
FORKED = {"learner": "mrl.processes.learner", "worker": "mrl.processes.worker"}
"""Role that imports torch -> its module."""
MAX_READ_BYTES = 1024 * 1024
TAIL_LINES = 60


class Child:
    """A process of the plan through all its lives; its log is one file per attempt of the run.

    The process leads a session and process group of its own. It writes its log without a pipe, so that a slow
    supervisor never blocks it. The kernel kills it when the supervisor dies.
    """

    def __init__(self, spec: ProcessSpec, log: Path, *, life: str = "") -> None:
        """`life` begins the name of every life; it differs between two supervisors of one attempt."""
        self.spec, self.log = spec, log
        self.started_s = 0.0
        self.born_s = 0.0
        """Monotonic time at which this life began; unlike `started_s`, it is never moved forward."""
        self.beat_s: float | None = None
        """Monotonic time of the last heartbeat; None before the first of this life."""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        """Last log lines of this life."""
        self.told_to_end: signal.Signals | None = None
        """Signal by which the process was told that the run ends."""
        self.line: socket.socket | None = None
        """This side of the socket to a worker on a unit (`sleep_channel`); None for other processes."""
        self._life = life or log.parent.name
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._num_lives = 0
        self._earlier_account: tuple[int, int] | None = None
        self._read_bytes = log.stat().st_size if log.exists() else 0  # skips what was written under another supervisor
        self._torn = b""

    @property
    def alive(self) -> bool:
        """Whether the process was started and `poll` has not found it ended."""
        return self._process is not None

    def start(self, around: Mapping[str, str], *, now_s: float, crash: Path, forks: ForkServer | None = None) -> None:
        """Start the process, as a fork of `forks` where possible. `crash` is the folder for accounts of its crashes.

        Raises OSError when the log cannot be written or no process can be made.
        """
        self.started_s, self.born_s, self.beat_s = now_s, now_s, None
        self._earlier_account = _mark(self._account_in(crash))
        self.tail.clear()
        self._num_lives += 1
        life = f"{self._life}-{self._num_lives}"
        local = around.get(LOCAL_FOLDER, "")
        argv = tuple(word.replace(LIFE, life).replace(LOCAL, local) for word in self.spec.argv)
        bound = {**DEVICE_ORDER, **around, **self.spec.env, SUPERVISOR_PID: str(os.getpid())}
        with self.log.open("ab") as log, self._stdin() as stdin:
            if forks is not None and is_forked(self.spec):
                self._process = forks.fork(argv[len(MRL) :], bound, stdin.fileno(), log.fileno())
            self._process = self._process or subprocess.Popen(
                command(os.getpid(), argv),
                stdin=stdin.fileno(),
                stdout=log,
                stderr=log,
                env=bound,
                start_new_session=True,
            )

    @contextmanager
    def _stdin(self) -> Iterator[socket.socket | IO[bytes]]:
        if not self.spec.has_line:
            with open(os.devnull, "rb") as nothing:
                yield nothing
            return
        self.line, its_end = sleep_channel.line()
        with its_end:
            yield its_end

    def poll(self) -> int | None:
        """Return the exit code of a process just found ended, else None; first kills the rest of its group."""
        if self._process is None:
            return None
        # The zombie keeps its pid, and so its group id, until it is reaped: the kill can hit no other process.
        if not _has_ended(self._process):
            return None
        self._signal_group(signal.SIGKILL)
        code = self._process.wait()
        self._process = None
        if self.line is not None:
            self.line.close()
            self.line = None
        return code

    def send(self, number: signal.Signals) -> None:
        """Signal the process group; SIGKILL also goes to all descendants (torchrun's ranks lead own sessions)."""
        if self._process is None:
            return
        descendants = _descendants(self._process.pid) if number == signal.SIGKILL else []
        self._signal_group(number)
        for process in descendants:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    def ask_for_stacks(self) -> None:
        """Have the role, or the ranks below torchrun, write their stacks (`mrl.processes.role_runtime`)."""
        if self._process is None:
            return
        for pid in (self._process.pid, *(process.pid for process in _descendants(self._process.pid))):
            with suppress(ProcessLookupError):
                if _catches(pid, signal.SIGUSR1):  # the signal would end other processes, such as torchrun
                    os.kill(pid, signal.SIGUSR1)

    def new_lines(self) -> list[str]:
        """Return whole log lines written since the last call, at most a MiB; they also go to `tail`."""
        try:
            with self.log.open("rb") as file:
                file.seek(self._read_bytes)
                data = file.read(MAX_READ_BYTES)
        except FileNotFoundError:
            return []
        self._read_bytes += len(data)
        *whole, self._torn = (self._torn + data).split(b"\n")
        self._torn = self._torn[-MAX_READ_BYTES:]
        lines = [line.decode(errors="replace").rstrip("\r") for line in whole]
        self.tail.extend(lines)
        return lines

    def account(self, code: int, *, free_bytes: int) -> tuple[int, str]:
        """Return exit code and reason of the life that has just ended, as its log tells them.

        With no free byte on the log's disk (`free_bytes`) a failure is a user error: the log may be incomplete, and
        another life would end alike.
        """
        lines = [*self.tail, self._torn.decode(errors="replace")]
        if self.spec.role == "learner":
            code = rank_code(code, lines)
        reason = reason_in(lines)
        if code > 0 and not free_bytes:
            return USER_ERROR, reason if "space" in reason else f"{os.strerror(errno.ENOSPC)}: {self.log} ({reason})"
        return code, reason

    def write_crash(self, folder: Path, code: int, reason: str, now_unix_s: float) -> None:
        """Write crash/<name>.json, unless this life of the process wrote a better one itself."""
        path = self._account_in(folder)
        if _mark(path) not in (None, self._earlier_account):
            return
        account = {"name": self.spec.name, "exit_code": code, "reason": reason, "time_unix_s": now_unix_s}
        folder.mkdir(exist_ok=True)
        path.write_text(json.dumps(account | {"last_lines": list(self.tail)}, indent=2) + "\n", encoding="utf-8")

    def _account_in(self, folder: Path) -> Path:
        return folder / self.log.with_suffix(".json").name

    def _signal_group(self, number: signal.Signals) -> None:
        assert self._process is not None
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):  # the process does not lead its group yet, or the group is gone
            self._process.send_signal(number)


def start_forks() -> ForkServer:
    """Start the server whose forks are the ranks and workers on the CPU. Raises OSError when that is impossible."""
    return ForkServer(tuple(FORKED.values()), {**DEVICE_ORDER, **os.environ, **environment(1)})


def is_forked(spec: ProcessSpec) -> bool:
    """Whether a process may be a fork of one that has imported torch: a rank or worker without a GPU.

    Processes on a unit are never forks: they are found by the environment that they were started with.
    """
    is_mrl = spec.argv[: len(MRL)] == MRL
    return CAN_FORK and spec.role in FORKED and is_mrl and not {"CUDA_VISIBLE_DEVICES", UNIT} & spec.env.keys()


def _has_ended(process: "subprocess.Popen[bytes] | ForkedProcess") -> bool:
    if isinstance(process, ForkedProcess):
        return process.has_ended()
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _mark(path: Path) -> tuple[int, int] | None:
    """Return (inode, mtime in ns) of a file, which differ for a file put in its place; None when there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal; False where the kernel does not tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)
