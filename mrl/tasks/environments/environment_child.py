"""One environment process as its pool sees it: its socket, and the episodes that it holds."""

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress

import msgspec

from mrl.tasks.environments.episode_script import Script
from mrl.tasks.environments.wire import DropEpisode, Frames, Reply, Request, framed, read_reply

START_S = 120.0
SILENCE_S = 20.0
"""Seconds without a message of a process with running episodes, after which one of them is taken to block it."""
READ_BYTES = 1 << 18
MAX_HANGING = 16
"""Hanging threads of a process, from which on it gets no further episodes and ends with its last one."""


class EnvironmentChild:
    """One process, and the bytes that its socket has not taken yet. Belongs to the pool's thread."""

    def __init__(self, argv: tuple[str, ...], *, is_alone: bool) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        # Arenas of many threads would fill the address space.
        environment = os.environ | {"MALLOC_ARENA_MAX": "2"}
        with theirs:
            self.process = subprocess.Popen(argv, stdin=theirs.fileno(), env=environment)
        self.is_alone, self.is_ready = is_alone, False
        self.scripts: dict[int, Script] = {}
        self._running: set[int] = set()
        self._earliest_s = float("inf")
        """A lower bound of the deadlines of running episodes. With thousands of them the exact one is not computed
        every time."""
        self.heard_at_s = time.monotonic()
        self.hanging = 0
        self._frames, self._unsent = Frames(), bytearray()

    @property
    def wants_to_write(self) -> bool:
        """Whether bytes wait for the socket."""
        return bool(self._unsent)

    @property
    def takes_more(self) -> bool:
        """Whether the process may get further episodes."""
        return not self.is_alone and self.hanging < MAX_HANGING

    @property
    def is_needless(self) -> bool:
        """Whether the process holds no episode and will get none."""
        return not self.scripts and not self.takes_more

    @property
    def deadline_s(self) -> float:
        """Time at which something is late: the start, a sign of life, or an answer."""
        if not self.is_ready:
            return self.heard_at_s + START_S
        is_watched = bool(self._running) and not self.is_alone
        return min(self._earliest_s, self.heard_at_s + SILENCE_S) if is_watched else self._earliest_s

    def late(self, now_s: float) -> list[Script]:
        """Return the episodes whose time is over; once they are dropped, `deadline_s` is exact."""
        running = [self.scripts[number] for number in self._running]
        late = [script for script in running if script.deadline_s <= now_s]
        self._earliest_s = min((one.deadline_s for one in running if one.deadline_s > now_s), default=float("inf"))
        return late

    def ask(self, script: Script) -> None:
        """Send the script's next request."""
        request = script.next_request
        assert request is not None
        script.asked_at_s = time.monotonic()
        if not self._running:
            self.heard_at_s = script.asked_at_s  # no message was expected of the idle process
        self._running.add(script.number)
        self._earliest_s = min(self._earliest_s, script.deadline_s)
        self._send(request)

    def answered(self, script: Script) -> None:
        """Note that an episode has its answer, and is no longer running."""
        self._running.discard(script.number)

    def drop(self, script: Script) -> None:
        """Forget an episode; where it still runs, its thread is broken off."""
        self._running.discard(script.number)
        self.scripts.pop(script.number, None)
        self._send(DropEpisode(script.number))

    def write(self) -> None:
        """Send what the socket takes."""
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):  # an end is found by reading
            del self._unsent[: self.socket.send(self._unsent)]

    def read(self) -> list[Reply] | None:
        """Return the received messages; None from a process that has ended, or sent an invalid message."""
        try:
            data = self.socket.recv(READ_BYTES)
            found = [read_reply(body) for body in self._frames.bodies(data)]
        except BlockingIOError:
            return []
        except (ConnectionError, ValueError, msgspec.DecodeError):
            return None
        self.heard_at_s = time.monotonic()
        return found if data else None

    def end(self) -> int:
        """Kill the process; return its exit code."""
        self.socket.close()
        with suppress(subprocess.TimeoutExpired):  # a process that ends by itself has an exit code of its own
            self.process.wait(0.2)
        self.process.kill()
        return self.process.wait()

    def _send(self, request: Request) -> None:
        self._unsent += framed(request)
        self.write()


def environment_argv(name: str, *, memory_bytes: int, cpu_s: float) -> tuple[str, ...]:
    """Return the command of an environment process."""
    module = "mrl.tasks.environments.environment_process"
    return (sys.executable, "-m", module, name, str(memory_bytes), str(cpu_s))
