"""Verification in processes of its own, with a hard limit of time and memory per answer.

    answers ──▶ idle process ──reply──▶ verdict
                     └── limit reached or died ──▶ failed answer, new process

A verifier of mathematics may hang in code that no signal handler interrupts, take all memory, or take its process with
it. Here it costs one answer: the process is killed, the answer counts as failed, and the next one gets a new process.
"""

import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from mrl.errors import RoleFailed
from mrl.tasks.verifier_process import JUDGED, LENGTH, OUT_OF_MEMORY, READY, REPLY, WALL_FACTOR

MEMORY_BYTES = 1024**3
"""Address space of one process; sympy with all it imports takes a tenth of it."""
MAX_REQUEST_BYTES = 32 * 1024
"""A pipe takes this much at once, so that a write never waits."""
START_S = 120.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a verifier said about one answer, or why it said nothing ("" when it did)."""

    score: float
    failure: str = ""


@dataclass(slots=True)
class VerifierCounts:
    """Since the start. A crash is a process that died, ran out of memory, or a verifier that raised."""

    answers: int = 0
    timeouts: int = 0
    crashes: int = 0


class VerifierPool:
    """At most `processes` processes that each judge one answer at a time by `verifier` ("module:function")."""

    def __init__(
        self,
        verifier: str,
        *,
        processes: int,
        timeout_s: float,
        memory_bytes: int = MEMORY_BYTES,
        wall_factor: float = WALL_FACTOR,
    ) -> None:
        """`timeout_s` is CPU time per answer, and `wall_factor` times that the limit of the clock.

        Nothing is started before the first answer comes.
        """
        self._argv = (sys.executable, "-m", "mrl.tasks.verifier_process", verifier, str(memory_bytes), str(timeout_s))
        self._size, self._wall_s = processes, wall_factor * timeout_s
        self._selector = selectors.DefaultSelector()
        self._children: list[_Child] = []
        self.counts = VerifierCounts()

    def verify(self, pairs: Sequence[tuple[str, str]]) -> list[Outcome]:
        """The outcome for every (reference, answer), in order. Raises RoleFailed when no process can be started."""
        outcomes: dict[int, Outcome] = {}
        waiting: deque[tuple[int, bytes]] = deque()
        for index, pair in enumerate(pairs):
            request = msgspec.msgpack.encode(pair)
            if len(request) <= MAX_REQUEST_BYTES:
                waiting.append((index, request))
            else:
                outcomes[index] = Outcome(0.0, "too_long")
        while waiting or any(child.job is not None for child in self._children):
            self._hand_out(waiting)
            for child, has_spoken in self._due():
                job = child.job
                outcome = self._hear(child) if has_spoken else self._replace(child, "verifier_timeout")
                if outcome is not None and job is not None:
                    outcomes[job] = outcome
        self.counts.answers += len(pairs)
        return [outcomes[index] for index in range(len(pairs))]

    def children(self) -> list["_Child"]:
        """The processes that live now."""
        return list(self._children)

    def close(self) -> None:
        """End all processes."""
        for child in list(self._children):
            self._end(child)
        self._selector.close()

    def _hand_out(self, waiting: "deque[tuple[int, bytes]]") -> None:
        for child in [one for one in self._children if one.process.poll() is not None and one.job is None]:
            self._end(child)
        for child in self._children:
            if waiting and child.is_ready and child.job is None:
                child.give(*waiting.popleft(), deadline_s=time.monotonic() + self._wall_s)
        starting = sum(not child.is_ready for child in self._children)
        while len(self._children) < self._size and starting < len(waiting):
            self._start()
            starting += 1

    def _start(self) -> None:
        process = subprocess.Popen(self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        child = _Child(process, deadline_s=time.monotonic() + START_S)
        self._children.append(child)
        self._selector.register(child.replies, selectors.EVENT_READ, child)

    def _due(self) -> list[tuple["_Child", bool]]:
        """Processes that said something or ended (True), or reached their deadline (False); waits for the first."""
        awaited = [child for child in self._children if child.job is not None or not child.is_ready]
        nearest_s = min(child.deadline_s for child in awaited)
        spoken = [key.data for key, _ in self._selector.select(max(0.0, nearest_s - time.monotonic()))]
        now_s = time.monotonic()
        late = [child for child in awaited if child.deadline_s <= now_s and child not in spoken]
        return [(child, True) for child in spoken] + [(child, False) for child in late]

    def _hear(self, child: "_Child") -> Outcome | None:
        """The outcome that `child` reports; None when no answer is concerned."""
        reply = child.read()
        if len(reply) != REPLY.size:
            return self._replace(child, "")
        status, score = REPLY.unpack(reply)
        if status == READY:
            child.is_ready = True
            return None
        child.job = None
        if status == JUDGED:
            return Outcome(score)
        self.counts.crashes += 1
        if status == OUT_OF_MEMORY:
            self._end(child)  # what it holds, and in what state it is, nobody knows
            return Outcome(0.0, "verifier_memory")
        return Outcome(0.0, "verifier_error")

    def _replace(self, child: "_Child", failure: str) -> Outcome | None:
        """End a process that is late (`failure`) or has ended itself; the next answer gets a new one."""
        was_ready, job = child.is_ready, child.job
        code = self._end(child)
        if not was_ready:
            raise RoleFailed(f"the verifier {self._argv[3]} does not start (exit code {code}); the log above says why")
        if job is None:
            return None
        failure = failure or ("verifier_timeout" if code == -signal.SIGPROF else "verifier_crash")
        self.counts.timeouts += failure == "verifier_timeout"
        self.counts.crashes += failure == "verifier_crash"
        return Outcome(0.0, failure)

    def _end(self, child: "_Child") -> int:
        """Kill the process and forget it; returns its exit code."""
        self._children.remove(child)
        self._selector.unregister(child.replies)
        return child.end()


class _Child:
    """One process, and the number of the answer that it judges (None when idle)."""

    def __init__(self, process: "subprocess.Popen[bytes]", *, deadline_s: float) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process, self._requests, self.replies = process, process.stdin, process.stdout
        self.deadline_s = deadline_s
        self.is_ready = False
        self.job: int | None = None

    def give(self, job: int, request: bytes, *, deadline_s: float) -> None:
        """Send one answer. A process that has just died is found by what it does not say."""
        self.job, self.deadline_s = job, deadline_s
        try:
            os.write(self._requests.fileno(), LENGTH.pack(len(request)) + request)
        except BrokenPipeError:
            self.process.wait()

    def read(self) -> bytes:
        """The reply, or b"" from a process that has ended."""
        return os.read(self.replies.fileno(), REPLY.size)

    def end(self) -> int:
        """Kill it unless it has ended."""
        self.process.kill()
        code = self.process.wait()
        self._requests.close()
        self.replies.close()
        return code
