"""One verifier process as its pool sees it: its request, its replies, and its end."""

import itertools
import os
import re
import signal
import subprocess
from contextlib import suppress
from typing import Generic, TypeVar

from mrl.tasks.rewards import CodeLine, place_of
from mrl.tasks.verifier_process import LENGTH

MAX_REPLY_BYTES = 64 * 1024
LAST_WORDS_S = 1.0
"""Seconds for a process that reached a limit to tell its line of code."""
_CODE_LINE = re.compile(r'File "([^"]*)", line (\d+) in (\S+)')

J = TypeVar("J")


class VerifierChild(Generic[J]):
    """One process, and the answer that it judges (None when idle)."""

    def __init__(self, process: "subprocess.Popen[bytes]", *, deadline_s: float) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process, self.requests, self.replies = process, process.stdin, process.stdout
        os.set_blocking(self.requests.fileno(), False)
        self.unsent = memoryview(b"")
        """The part of the request for which the pipe had no room."""
        self.deadline_s = deadline_s
        self.is_ready = False
        self.extras: tuple[str, ...] = ()
        """Arguments that the verifier takes beside reference and answer."""
        self.job: J | None = None

    def give(self, job: J, request: bytes, *, deadline_s: float) -> None:
        """Send one answer, or as much of it as the pipe has room for."""
        self.job, self.deadline_s = job, deadline_s
        self.unsent = memoryview(LENGTH.pack(len(request)) + request)
        self.send_on()

    def send_on(self) -> bool:
        """Send more of the request; return whether any is left.

        A process that has just died is noticed later, by the end of its replies.
        """
        try:
            self.unsent = self.unsent[os.write(self.requests.fileno(), self.unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.unsent = self.unsent[:0]
            self.process.wait()
        return bool(self.unsent)

    def read(self) -> bytes:
        """Return the reply, or b"" from a process that has ended."""
        return os.read(self.replies.fileno(), MAX_REPLY_BYTES)

    def last_words(self, said: bytes, *, is_late: bool) -> str:
        """Return the code line of a process that reached a limit, if it can tell; `said` has been read already."""
        if is_late:
            self.process.send_signal(signal.SIGALRM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(LAST_WORDS_S)
        os.set_blocking(self.replies.fileno(), False)
        with suppress(BlockingIOError):
            said += self.read()
        return _place_in(said.decode(errors="replace"))

    def end(self) -> int:
        """Kill the process unless it has ended; return its exit code."""
        self.process.kill()
        code = self.process.wait()
        self.requests.close()
        self.replies.close()
        return code


def _place_in(stack: str) -> str:
    """Return the lines of a verifier's code in a stack that `faulthandler` wrote, the innermost first."""
    lines = [CodeLine(file, int(line), function) for file, line, function in _CODE_LINE.findall(stack)]
    own = itertools.takewhile(lambda line: not line.file.endswith("verifier_process.py"), lines)
    return place_of([*own][::-1])
