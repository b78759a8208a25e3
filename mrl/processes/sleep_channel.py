"""The socket between a unit's node and a worker whose engine may sleep on a GPU unit; it is the worker's stdin.

Node -> worker: "sleep"; "wake EPOCH". Worker -> node: "asleep"; "awake EPOCH"; "sleepless" when its engine cannot
sleep. No other process has an end of the socket. Each message arrives whole or not at all. When one side dies, the
other side finds the socket closed.
"""

import os
import select
import socket
from collections.abc import Callable

from mrl.processes.planning.unit_workers import UNIT_LINE

LOOK_S = 1.0
MAX_WORD_BYTES = 64
SLEEP, WAKE, ASLEEP, AWAKE, SLEEPLESS = "sleep", "wake", "asleep", "awake", "sleepless"


def line() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a new socket pair; neither ever blocks."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(False)
    return ends


def say(end: socket.socket, *words: object) -> bool:
    """Send a message of several words; return False when the other side is gone or does not read."""
    try:
        end.send(" ".join(map(str, words)).encode())
    except OSError:
        return False
    return True


def heard(end: socket.socket) -> list[str]:
    """Return the messages that arrived since the last call; the last is "" when the other side is gone."""
    found: list[str] = []
    while not found or found[-1]:
        try:
            found.append(end.recv(MAX_WORD_BYTES).decode(errors="replace"))
        except BlockingIOError:
            break
        except OSError:
            found.append("")
    return found


class SleepChannel:
    """The worker's end of the socket to its node."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._is_due = False

    @classmethod
    def of_this_process(cls) -> "SleepChannel | None":
        """Take the socket from this process's stdin, which is empty afterwards; None for a worker without one."""
        if not os.environ.get(UNIT_LINE):
            return None
        end = socket.socket(fileno=os.dup(0))
        end.setblocking(False)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        return cls(end)

    def is_due(self) -> bool:
        """Whether the node has ordered the worker to sleep."""
        self._is_due |= SLEEP in heard(self._end)
        return self._is_due

    def refuse(self) -> None:
        """Tell the node that the engine cannot sleep."""
        self._is_due = False
        say(self._end, SLEEPLESS)

    def rest(self, stopping: Callable[[], bool]) -> int | None:
        """Tell the node that the engine sleeps and await its answer; return the epoch to wake up under, None to end.

        The worker samples nothing until the call returns.
        """
        self._is_due = False
        say(self._end, ASLEEP)
        while not stopping():
            select.select([self._end], [], [], LOOK_S)
            said = heard(self._end)
            for number, words in enumerate(said, 1):
                if not words:  # the node is gone; no other process could wake the engine
                    return None
                word, _, epoch = words.partition(" ")
                if word == WAKE and epoch.isdigit():
                    self._is_due = SLEEP in said[number:]
                    return int(epoch)
        return None

    def awake(self, epoch: int) -> None:
        """Tell the node that the engine is awake under `epoch` and can sample."""
        say(self._end, AWAKE, epoch)
