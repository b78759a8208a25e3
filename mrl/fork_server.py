"""A server process that has imported what roles import (roles: learner, worker, ...); each role is a fork of it.

The import of torch and transformers takes four seconds of a core. A run on a CPU has at least two processes for each
policy, and every process would import the same. A fork takes a tenth of a second, and shares the imported memory.

Roles on a GPU are not forked: CUDA, and what torch reads of the environment for CUDA, do not survive a fork.

The server is one thread that forks and nothing else. It dies with the supervisor, and its forks with it.
"""

import errno
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress

from mrl.parent_death import CORES, bind, command, die_with_parent
from mrl.process_start import importing

MAX_MESSAGE_BYTES = 128 * 1024
ANSWER_S = 60.0
"""Seconds to wait for the server's answer. A fork takes a tenth of a second; on a machine that swaps, longer."""
ENDINGS = {signal.SIGTERM, signal.SIGHUP, signal.SIGINT}
"""Signals that a batch system sends to every process of a job. The server blocks them: roles save a checkpoint then,
and would die with the server. The server ends when its supervisor does."""
READY = b"ready"


class ForkedProcess:
    """Handle of a fork, like `subprocess.Popen`. The fork stays a zombie until `wait`, so its pid is not reused."""

    def __init__(self, server: "ForkServer", pid: int) -> None:
        """Raises OSError when the process cannot be watched; the process is then killed."""
        self.pid = pid
        self._server = server
        try:
            self._ends = os.pidfd_open(pid)
        except OSError:
            self.send_signal(signal.SIGKILL)
            server.ask({"reap": pid})
            raise

    def has_ended(self) -> bool:
        """Whether the process has ended, by itself or with its server."""
        return _is_readable(self._ends)

    def wait(self) -> int:
        """Exit code of the process, which has ended; -N when signal N killed it."""
        os.close(self._ends)
        try:
            return self._server.ask({"reap": self.pid})["code"]
        except OSError:
            return -signal.SIGKILL  # the server's death kills its forks

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to this process alone, not to its session."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


class ForkServer:
    """Handle of the fork server in the supervisor: starts the server process and asks it for forks."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the server, which imports `modules` and is then ready. Raises OSError when it cannot be started."""
        self._environment = dict(environment)
        self._end, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._end.settimeout(ANSWER_S)
        self._is_ready = self._is_over = False
        self._began_s = time.monotonic()
        with its_end:
            self._process = subprocess.Popen(
                command(os.getpid(), (sys.executable, "-m", "mrl.fork_server", *modules)),
                stdin=its_end.fileno(),
                stdout=2,  # prints of imported modules must not mix with the output of a command
                env=self._environment,
                start_new_session=True,
            )

    @property
    def is_ready(self) -> bool:
        """Whether the server can fork, as far as is known."""
        return self._is_ready and not self._is_over

    def is_settled(self, patience_s: float) -> bool:
        """Whether the server is ready or never will be: it has died, or has imported for longer than `patience_s`."""
        if self._is_over or self._process.poll() is not None:
            self._is_over = True
        elif not self._is_ready and _is_readable(self._end.fileno()):
            self._is_ready = self._end.recv(MAX_MESSAGE_BYTES) == READY
        elif not self._is_ready and time.monotonic() - self._began_s > patience_s:
            self.close()
        return self._is_ready or self._is_over

    def fork(self, words: Sequence[str], environment: Mapping[str, str], stdin: int, log: int) -> ForkedProcess | None:
        """Fork a process that runs `python -m mrl` with the arguments `words` and leads a session of its own.

        Returns None when that is impossible, for example because the server has ended.
        """
        if not self.is_ready:
            return None
        values = {name: value for name, value in environment.items() if self._environment.get(name) != value}
        request = {"words": list(words), "set": values, "drop": sorted(self._environment.keys() - environment.keys())}
        try:
            return ForkedProcess(self, self.ask(request, [stdin, log])["pid"])
        except OSError:
            return None

    def ask(self, request: Mapping[str, object], descriptors: Sequence[int] = ()) -> dict[str, int]:
        """Send a request and return the server's answer.

        Raises OSError when the server could not do it. A server that does not answer is ended, with OSError as well.
        """
        if self._is_over:
            raise ConnectionResetError
        message = json.dumps(request).encode()
        if len(message) > MAX_MESSAGE_BYTES:  # the environment changed by that much since the server's start
            raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
        try:
            socket.send_fds(self._end, [message], descriptors)
            answer = self._end.recv(MAX_MESSAGE_BYTES)
        except (ConnectionError, TimeoutError):
            answer = b""
        if not answer:
            self.close()  # else a late answer would be taken for the answer to the next request
            raise ConnectionResetError
        told: dict[str, int] = json.loads(answer)
        if "errno" in told:
            raise OSError(told["errno"], os.strerror(told["errno"]))
        return told

    def close(self) -> None:
        """End the server, and with it every fork that still runs."""
        self._is_over = True
        self._process.kill()  # first: a server that finds its socket closed would print a traceback
        self._process.wait()
        self._end.close()


def _is_readable(descriptor: int) -> bool:
    poll = select.poll()  # `select.select` takes no descriptor above 1023
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _become(request: Mapping[str, object], descriptors: Sequence[int], server_pid: int) -> int:
    """Make this fork like a process started anew (session, signals, files, environment, cores, seeds); run its command.

    Returns the command's exit code.
    """
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)
    stdin, log = descriptors
    for number, place in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(number, place)
    for number in descriptors:
        os.close(number)
    die_with_parent()
    if os.getppid() != server_pid:  # the server died before `die_with_parent` took effect
        return 1
    for name in request["drop"]:  # type: ignore[attr-defined]
        os.environ.pop(name, None)
    os.environ.update(request["set"])  # type: ignore[call-overload]
    if os.environ.get(CORES):
        bind({int(core) for core in os.environ[CORES].split(",")})
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    if drawn := sys.modules.get("numpy.random"):
        drawn.seed()  # the module `random` reseeds itself after a fork
    sys.argv = ["mrl", *request["words"]]  # type: ignore[misc]
    try:
        runpy.run_module("mrl", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - the outer edge of a process
        traceback.print_exc()
        return 1
    return 0


def _serve(end: socket.socket) -> None:
    pid = os.getpid()
    while True:
        message, descriptors, *_ = socket.recv_fds(end, MAX_MESSAGE_BYTES, 2)
        if not message:
            return
        request = json.loads(message)
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            answer = {"code": os.waitstatus_to_exitcode(status)}
        else:
            try:
                child = os.fork()
                answer = {"pid": child}
            except OSError as error:  # too many processes, or no memory for one more
                child, answer = -1, {"errno": error.errno or errno.EAGAIN}
            if child == 0:
                end.close()
                code = _become(request, descriptors, pid)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        for number in descriptors:
            os.close(number)
        end.send(json.dumps(answer).encode())


def _main(modules: Sequence[str]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
    end = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    with importing():
        for name in modules:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # garbage collection skips these objects, so their pages stay shared
    end.send(READY)
    _serve(end)


if __name__ == "__main__":
    _main(sys.argv[1:])
