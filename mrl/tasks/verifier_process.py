"""The inside of one verifier process: `python -m mrl.tasks.verifier_process MODULE:FUNCTION MEMORY_BYTES CPU_S`.

It reads (reference, answer) pairs from stdin and writes one reply each to stdout, until stdin ends; so it ends with the
process that started it, and a hanging verifier of a parent that is gone ends by its own limits. What arrives is
msgpack text from that parent; nothing is unpickled, and nothing imported but the function named at the start.
"""

import importlib
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import IO

import msgspec
import setproctitle

Verifier = Callable[[str, str], float]
"""(reference, answer) -> score."""

LENGTH = struct.Struct("<I")
"""Before every request: its length in bytes."""
REPLY = struct.Struct("<Bd")
"""Status and score; small enough for a pipe to carry it whole."""
READY, JUDGED, OUT_OF_MEMORY, RAISED = range(4)
WALL_FACTOR = 6.0
"""The limit is CPU time; a process that does not even use that is killed after so many times the limit."""

_pair = msgspec.msgpack.Decoder(tuple[str, str])


def main(words: list[str]) -> int:
    """Serve until stdin ends."""
    name, memory_bytes, cpu_s = words
    setproctitle.setproctitle("mrl::verifier")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides when it ends
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    replies = os.dup(1)
    os.dup2(2, 1)  # what a verifier prints must not stand between replies
    module, _, function = name.partition(":")
    verifier: Verifier = getattr(importlib.import_module(module), function)
    if not callable(verifier):
        raise TypeError(f"{name} is no function")
    os.write(replies, REPLY.pack(READY, 0.0))
    while (request := _read(sys.stdin.buffer)) is not None:
        reference, answer = _pair.decode(request)
        # CPU time, so that a loaded machine makes no answer wrong. The default action of the signal ends this process
        # at once, also inside a regular expression or a big multiplication, where Python's handlers never run.
        signal.setitimer(signal.ITIMER_PROF, float(cpu_s))
        signal.setitimer(signal.ITIMER_REAL, 2 * WALL_FACTOR * float(cpu_s))  # the parent kills earlier, if it lives
        status, score = _judge(verifier, reference, answer)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        os.write(replies, REPLY.pack(status, score))
    return 0


def _judge(verifier: Verifier, reference: str, answer: str) -> tuple[int, float]:
    try:
        return JUDGED, float(verifier(reference, answer))
    except MemoryError:
        return OUT_OF_MEMORY, 0.0
    except Exception as error:  # noqa: BLE001 - whatever a verifier raises, its answer counts as failed, and is counted
        sys.stderr.write(f"verifier raised {type(error).__name__}: {str(error)[:200]}\n")
        return RAISED, 0.0


def _read(stream: IO[bytes]) -> bytes | None:
    """One request; None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = stream.read(length)
    return body if len(body) == length else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
