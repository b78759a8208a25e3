"""One environment process: `python -m mrl.tasks.environments.environment_process NAME MEMORY_BYTES CPU_S`.

It holds many episodes. Each has a thread of its own for its whole life, so that an episode which waits for seconds
delays no other, and per-thread state of an environment (a database, a browser) stays with it. The main thread reads
requests from the socket on stdin and sends beats. It breaks off an episode that has used more than CPU_S of processor
time, by an exception in the episode's thread, which then closes its environment. It cannot break off code that holds
the interpreter lock; then its own silence tells the pool. Threads that do not end all the same are counted. The process
ends with the one that started it.
"""

import ctypes
import json
import os
import queue
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

import msgspec
import setproctitle

from mrl.errors import RecordError
from mrl.tasks.environments.contract import (
    EXITED,
    MEMORY,
    RAISED,
    TIMEOUT,
    WRONG_TYPE,
    Environment,
    EnvironmentTurn,
)
from mrl.tasks.environments.opening import open_environment
from mrl.tasks.environments.user_class import BadReturn, ClassMistake
from mrl.tasks.environments.wire import (
    DropEpisode,
    EpisodeReply,
    FinishEpisode,
    Frames,
    OpenEpisode,
    ProcessBeat,
    ProcessReady,
    Reply,
    Request,
    StepEpisode,
    framed,
    read_request,
)
from mrl.tasks.rewards import CodeLine, place_of

STACK_BYTES = 512 * 1024
"""Stack of an episode's thread. The default takes sixteen times as much of the process's address space."""
BEAT_S = 1.0
WATCH_S = 0.25
LEAVE_S = 2.0
"""Seconds that a dropped episode may take to close, before its thread counts as hanging."""
READ_BYTES = 1 << 16


class _BrokenOff(BaseException):
    """Raised in the thread of an episode that was dropped."""


class _Episode:
    """One episode in its thread."""

    def __init__(self, make: Callable[[], Environment], say: Callable[[Reply], None]) -> None:
        self._make, self._say = make, say
        self._environment: Environment | None = None
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._live, daemon=True)
        self.is_running, self.is_dropped = False, False

    def ask(self, request: Request) -> None:
        """Queue a request, at most one at a time; the thread sends the answer."""
        self.is_running = not isinstance(request, DropEpisode)
        self._requests.put(request)
        if self.thread.ident is None:
            self.thread.start()

    def cpu_s(self) -> float:
        """Return the processor time of the thread so far, in seconds."""
        try:
            return time.clock_gettime(time.pthread_getcpuclockid(self.thread.ident or 0))
        except OSError:  # it has just ended
            return 0.0

    def break_off(self) -> None:
        """End the thread when it next runs Python code."""
        self.is_dropped = True
        if self.thread.ident is not None and self.thread.is_alive():
            kind = ctypes.py_object(_BrokenOff)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread.ident), kind)

    def _live(self) -> None:
        for part in (self._play, self._close, self._close):  # a late breaking off may cut the first close
            with suppress(BaseException):  # the thread's outer edge; nobody awaits this episode any more
                part()

    def _play(self) -> None:
        while not self.is_dropped and not isinstance(request := self._requests.get(), DropEpisode):
            try:
                self._environment = self._environment or self._make()
                turn = answered(self._environment, request)
            except _BrokenOff:
                raise
            except BaseException as error:  # noqa: BLE001 - whatever an environment raises ends its episode alone
                turn = failure_of(error)
            self.is_running = False
            if not self.is_dropped:
                self._say(EpisodeReply(request.episode, turn))

    def _close(self) -> None:
        """Close the environment once, whatever it raises."""
        if self._environment is None:
            return
        try:
            self._environment.close()
        except _BrokenOff:
            raise
        except BaseException:  # noqa: BLE001 - the episode has its reward
            pass
        self._environment = None


class _Process:
    """All episodes of this process."""

    def __init__(self, name: str, cpu_s: float, channel: socket.socket) -> None:
        self._make, self._cpu_s, self._channel = open_environment(name), cpu_s, channel
        self._lock = threading.Lock()
        self._episodes: dict[int, _Episode] = {}
        self._leaving: list[tuple[_Episode, float]] = []
        """Dropped episodes whose threads may not have ended, with the time of the drop."""

    def serve(self) -> None:
        """Serve until the socket ends."""
        self._say(ProcessReady())
        frames, beat_s, told = Frames(), 0.0, 0
        while True:
            if select.select([self._channel], [], [], WATCH_S)[0]:
                if not (data := self._channel.recv(READ_BYTES)):
                    return
                for body in frames.bodies(data):
                    self._take(read_request(body))
            running = {number: one for number, one in list(self._episodes.items()) if one.is_running}
            self._watch(running)
            hanging = self._count_hanging()
            if hanging != told or (running and time.monotonic() - beat_s >= BEAT_S):
                beat_s, told = time.monotonic(), hanging
                self._say(ProcessBeat(hanging))

    def _take(self, request: Request) -> None:
        episode = self._episodes.get(request.episode)
        if isinstance(request, DropEpisode):
            if episode is not None:
                self._part_with(request.episode)
                if episode.is_running:
                    episode.break_off()
                episode.ask(request)
            return
        if episode is None:
            episode = self._episodes[request.episode] = _Episode(self._make, self._say)
        try:
            episode.ask(request)
        except (RuntimeError, MemoryError) as error:  # no thread can be started
            self._say(
                EpisodeReply(request.episode, EnvironmentTurn.failed(MEMORY, f"no thread can be started: {error}"))
            )

    def _part_with(self, number: int) -> None:
        if (episode := self._episodes.pop(number, None)) is not None:
            self._leaving.append((episode, time.monotonic()))

    def _count_hanging(self) -> int:
        """Return how many threads should have ended, and had the time to."""
        self._leaving = [(one, since_s) for one, since_s in self._leaving if one.thread.is_alive()]
        return sum(time.monotonic() - since_s > LEAVE_S for _, since_s in self._leaving)

    def _watch(self, running: dict[int, _Episode]) -> None:
        """Break off episodes that have used up their processor time."""
        for number, episode in running.items():
            if episode.cpu_s() > self._cpu_s and episode.is_running:
                self._part_with(number)
                episode.break_off()
                words = f"the environment used more than {self._cpu_s:g} s of CPU time"
                self._say(EpisodeReply(number, EnvironmentTurn.failed(TIMEOUT, words)))

    def _say(self, message: Reply) -> None:
        data = framed(message)
        with self._lock:
            self._channel.sendall(data)


def answered(environment: Environment, request: Request) -> EnvironmentTurn:
    """Return the environment's answer to a request. Raises any exception of the environment."""
    match request:
        case OpenEpisode(seed=seed, row=row):
            return environment.reset(seed, json.loads(row))
        case StepEpisode(turn=turn):
            return environment.step(turn)
        case FinishEpisode(reason=reason, turn=turn):
            return environment.finish(reason, turn)
    raise AssertionError(request)


def failure_of(error: BaseException) -> EnvironmentTurn:
    """Return the end of an episode by an exception, with the line of code that raised it."""
    if isinstance(error, BadReturn):
        return EnvironmentTurn.failed(error.kind, str(error))
    if isinstance(error, RecordError):
        return EnvironmentTurn.failed(WRONG_TYPE, str(error))
    frames = [CodeLine(one.filename, one.lineno or 0, one.name) for one in traceback.extract_tb(error.__traceback__)]
    package = os.path.dirname(os.path.abspath(__file__))
    own = [one for one in frames if os.path.dirname(os.path.abspath(one.file)) != package]
    place = f" ({place_of(own)})" * bool(own)
    if isinstance(error, MemoryError):
        return EnvironmentTurn.failed(MEMORY, f"out of memory{place}")
    kind = EXITED if isinstance(error, SystemExit | KeyboardInterrupt) else RAISED
    return EnvironmentTurn.failed(kind, f"{type(error).__name__}: {error}{place}")


def main(words: list[str]) -> int:
    """Serve until the socket ends."""
    name, memory_bytes, cpu_s = words
    setproctitle.setproctitle("mrl::environment")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides when it ends
    channel = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # what an environment prints goes to the log
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if int(memory_bytes):
        resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    threading.stack_size(STACK_BYTES)
    try:
        _Process(name, float(cpu_s), channel).serve()
    except ClassMistake as mistake:
        print(mistake, file=sys.stderr)
        return 2
    except (ConnectionError, msgspec.DecodeError):  # the pool is gone
        return 0
    finally:
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # hanging threads of episodes must not keep the process
