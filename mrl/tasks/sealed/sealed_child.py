"""One piece of work in a fresh, sealed process: forked from this one, read once, and gone.

The process has this one's memory, and nothing else: see `seal`. Its reply is not trusted: it is bounded, and decoded
only after its end.
"""

import gc
import math
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from mrl.tasks.sealed.seal import Seal, die_with

DONE, RAISED, OUT_OF_MEMORY, LATE, DIED = range(5)
MAX_REPLY_BYTES = 64 * 1024
"""Longest reply: as much as a pipe holds, so that nobody has to read while the work goes on."""
MAX_REASON_CHARS = 200


class Ended(NamedTuple):
    """Status of an ended process, and its reply: the result, or the reason when the work raised."""

    status: int
    reply: bytes = b""


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """Limits of one process. The wall-clock limit is for work that waits instead of computing."""

    memory_bytes: int
    cpu_s: float
    wall_s: float


def run_sealed(work: Callable[[], bytes], seal: Seal, limits: ChildLimits) -> Ended:
    """Return the result of `work` in a process of its own, which is gone on return.

    Work that is late, dies, or writes more than MAX_REPLY_BYTES has no result. Raises OSError when no process can be
    made.
    """
    read_end, write_end = os.pipe()
    parent = os.getpid()
    try:
        pid = os.fork()
        if not pid:
            _inside(work, seal, limits, parent=parent, reply=write_end)
    finally:
        os.close(write_end)
    try:
        said, is_late = _heard(read_end, deadline_s=time.monotonic() + limits.wall_s)
    finally:
        os.close(read_end)
        os.kill(pid, signal.SIGKILL)  # it has written its reply, or more than it may
        _, status, used = os.wait4(pid, 0)
    is_late = is_late or _is_over_time(status, used.ru_utime + used.ru_stime, limits)
    if is_late or not said or said[0] not in (DONE, RAISED, OUT_OF_MEMORY) or len(said) > MAX_REPLY_BYTES:
        return Ended(LATE if is_late else DIED)
    return Ended(said[0], said[1:])


def _heard(replies: int, *, deadline_s: float) -> tuple[bytes, bool]:
    """Read until the other end closes or the reply is too long; return it, and whether the deadline came first."""
    said = b""
    poll = select.poll()
    poll.register(replies, select.POLLIN)
    while len(said) <= MAX_REPLY_BYTES:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not poll.poll(math.ceil(left_s * 1000)):
            return b"", True
        more = os.read(replies, MAX_REPLY_BYTES)
        if not more:
            break
        said += more
    return said, False


def _is_over_time(status: int, used_s: float, limits: ChildLimits) -> bool:
    """Whether a time limit ended the process: the timer of CPU time, or the kernel's own limit behind it."""
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return ended_by == signal.SIGPROF or (ended_by in (signal.SIGKILL, signal.SIGXCPU) and used_s >= limits.cpu_s)


def _inside(work: Callable[[], bytes], seal: Seal, limits: ChildLimits, *, parent: int, reply: int) -> NoReturn:
    """Run the work in the forked process, and end it whatever happens: no other code of this program runs there."""
    try:
        die_with(parent)
        gc.disable()
        # The default action of the signal ends this process at once, also inside a regular expression or a big
        # multiplication. Work that stops the timer meets the kernel's limit, which counts whole seconds.
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
        seal.close_up(reply=reply, memory_bytes=limits.memory_bytes, cpu_s=math.ceil(limits.cpu_s) + 1)
        os.write(reply, _result(work))
    finally:
        os._exit(0)


def _result(work: Callable[[], bytes]) -> bytes:
    try:
        return bytes([DONE]) + work()
    except MemoryError:
        return bytes([OUT_OF_MEMORY])
    except BaseException as error:  # noqa: BLE001 - the process's outer edge; whatever is raised costs this work alone
        reason = ascii(f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS])
        return bytes([RAISED]) + reason.encode()
