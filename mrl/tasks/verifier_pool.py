"""Verification in processes of its own, with a hard limit of time and memory per answer.

    groups of answers ──▶ queue ──▶ idle process ──reply──▶ verdict; with the last one of a group, its future
                                        └── limit reached or died ──▶ failed answer, new process

A verifier may hang in code that no signal handler interrupts, take all memory, take its process with it, or wait long
for a service elsewhere. Here that costs one answer: the process is killed, the answer counts as failed, and the next
answer gets a new process. Other answers do not wait for it: groups complete out of order, and while any answer waits,
no process that can judge it is idle. Where answers queue, those of the group that was begun first are judged first.
"""

import heapq
import itertools
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from mrl.errors import RoleFailed
from mrl.plugins import VERIFIER, find_plugin
from mrl.records.codec import MAX_MESSAGE_BYTES
from mrl.tasks.rewards import EXITED, MEMORY, TIMEOUT, TOO_LONG, Outcome, failed
from mrl.tasks.sealed.sealing import Sealing, sealed_environment
from mrl.tasks.verifier_child import VerifierChild
from mrl.tasks.verifier_process import EXTRAS, WALL_FACTOR, VerifierCall, VerifierReady

MEMORY_BYTES = 1024**3
"""Address space of one process; sympy with all its imports takes a tenth of it."""
MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES
START_S = 120.0
OVER_LIMIT = (-signal.SIGPROF, -signal.SIGALRM)
"""Exit codes of a process that ended itself at its limit of CPU time, or of the clock."""


_ready = msgspec.msgpack.Decoder(VerifierReady)
_outcome = msgspec.msgpack.Decoder(Outcome)


@dataclass(slots=True)
class VerifierCounts:
    """Totals since the pool's start."""

    handed_in: int = 0
    answers: int = 0
    """Judged answers, whatever their outcome."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failures among `answers`, by kind."""
    spent: Counter[str] = field(default_factory=Counter)
    """Cost of the verdicts by name, where the verifier states it."""


@dataclass(slots=True, eq=False)
class _Group:
    """Answers that were handed in together."""

    size: int
    future: Future[list[Outcome]] = field(default_factory=Future)
    outcomes: dict[int, Outcome] = field(default_factory=dict)

    def settle(self, place: int, outcome: Outcome) -> None:
        """Note the outcome of one answer; with the last one, the future has its result."""
        self.outcomes[place] = outcome
        if len(self.outcomes) == self.size and not self.future.done():
            self.future.set_result([self.outcomes[place] for place in range(self.size)])


class _Job(NamedTuple):
    """One answer that waits for a process, or has one. The least by (rank, serial) is the next."""

    rank: int
    serial: int
    group: _Group
    place: int
    call: VerifierCall


_Child = VerifierChild[_Job]


class VerifierPool:
    """At most `processes` processes that each judge one answer at a time by `verifier` ("module:function").

    Any thread may hand in. The processes belong to one thread of the pool.
    """

    def __init__(
        self,
        verifier: str,
        *,
        processes: int,
        timeout_s: float,
        memory_bytes: int = MEMORY_BYTES,
        wall_factor: float = WALL_FACTOR,
        sealing: Sealing | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`timeout_s` is the limit of CPU time per answer, and `wall_factor` times that the limit of the clock.

        `environment` is that of the processes; None gives them this process's own. With `sealing` every answer is
        judged in a fresh, sealed process, which the pool's own processes fork. Nothing is started before the first
        answer comes.
        """
        self._argv = verifier_argv(verifier, memory_bytes=memory_bytes, timeout_s=timeout_s, sealing=sealing)
        self._environment = environment if sealing is None else sealed_environment(os.environ)
        self._is_sealed = sealing is not None
        self._verifier = verifier
        self._size, self._cpu_s, self._wall_s = processes, timeout_s, wall_factor * timeout_s
        self._lock = threading.Lock()
        self._handed_in: list[_Job] = []
        self._serials = itertools.count()
        self._is_closing = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="verifier-pool", daemon=True)
        # All attributes below belong to the thread.
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._children: list[_Child] = []
        self._waiting: list[_Job] = []
        """Jobs without a process, as a heap."""
        self._groups: set[_Group] = set()
        """Groups that are not fully judged. Their futures must end, whatever goes wrong with an answer."""
        self.counts = VerifierCounts()

    def submit(self, calls: Sequence[VerifierCall], *, rank: int = 0) -> "Future[list[Outcome]]":
        """Return a future of the verifier's outcomes for these calls, in order; never waits.

        Among answers that queue, those of a lower `rank` come first, and then those that were handed in first. The
        future raises RoleFailed when no process can be started, and is cancelled when the pool closes before.
        """
        group = _Group(len(calls))
        if not calls:
            group.future.set_result([])
            return group.future
        jobs = [_Job(rank, next(self._serials), group, place, one) for place, one in enumerate(calls)]
        with self._lock:
            if self._is_closing:
                group.future.cancel()
                return group.future
            self._handed_in += jobs
            self.counts.handed_in += len(jobs)
            if self._thread.ident is None:
                self._thread.start()
        os.eventfd_write(self._wake, 1)
        return group.future

    def close(self) -> None:
        """End all processes, and cancel all that is not judged by then."""
        with self._lock:
            is_first, self._is_closing = not self._is_closing, True
        if not is_first:
            return
        os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None:
            self._thread.join()
        self._selector.close()
        os.close(self._wake)

    # The methods below run in the pool's thread.

    def _serve(self) -> None:
        while not self._is_closing:
            try:
                self._hand_out()
                for child, has_spoken in self._due():
                    self._attend(child, has_spoken)
            except Exception as error:  # noqa: BLE001 - the thread's outer edge: whoever awaits the verdicts raises it
                self._fail(error)
        for group in self._unsettled():
            group.future.cancel()
        for child in list(self._children):
            self._end(child)

    def _take_in(self) -> None:
        with self._lock:
            fresh, self._handed_in = self._handed_in, []
        for job in fresh:
            heapq.heappush(self._waiting, job)
            self._groups.add(job.group)

    def _hand_out(self) -> None:
        self._take_in()
        for child in [one for one in self._children if one.process.poll() is not None and one.job is None]:
            self._end(child)
        for child in self._children:
            while self._waiting and child.is_ready and child.job is None:
                self._give(child, heapq.heappop(self._waiting))
        starting = sum(not child.is_ready for child in self._children)
        while len(self._children) < self._size and starting < len(self._waiting):
            self._start()
            starting += 1

    def _give(self, child: _Child, job: _Job) -> None:
        request = _encoded(job.call, child.extras)
        if len(request) <= MAX_REQUEST_BYTES:
            child.give(job, request, deadline_s=time.monotonic() + self._wall_s)
            if child.unsent:
                self._selector.register(child.requests, selectors.EVENT_WRITE, child)
        else:
            what = f"{len(request):,} bytes to judge; a verifier process accepts at most {MAX_REQUEST_BYTES:,}"
            self._settle(job, failed(TOO_LONG, what))

    def _start(self) -> None:
        process = subprocess.Popen(
            self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=self._environment,
        )
        child = _Child(process, deadline_s=time.monotonic() + START_S)
        self._children.append(child)
        self._selector.register(child.replies, selectors.EVENT_READ, child)

    def _due(self) -> list[tuple[_Child, bool]]:
        """Wait for an event; return processes that said something or ended (True), or reached their deadline (False).

        New answers end the wait, and so does a process that takes more of a long request.
        """
        awaited = [child for child in self._children if child.job is not None or not child.is_ready]
        left_s = min((child.deadline_s for child in awaited), default=None)
        events = self._selector.select(None if left_s is None else max(0.0, left_s - time.monotonic()))
        spoken = list[_Child]()
        for key, mask in events:
            if key.data is None:
                os.eventfd_read(self._wake)
            elif mask & selectors.EVENT_READ:
                spoken.append(key.data)
            elif not key.data.send_on():
                self._selector.unregister(key.fileobj)
        now_s = time.monotonic()
        late = [child for child in awaited if child.deadline_s <= now_s and child not in spoken]
        return [(child, True) for child in spoken] + [(child, False) for child in late]

    def _attend(self, child: _Child, has_spoken: bool) -> None:
        job = child.job
        outcome = self._hear(child) if has_spoken else self._replace(child, is_late=True)
        if outcome is not None and job is not None:
            self._settle(job, outcome)

    def _hear(self, child: _Child) -> Outcome | None:
        """Return the outcome that `child` reports; None when no answer is concerned."""
        said = child.read()
        try:
            if not child.is_ready:
                child.extras, child.is_ready = _ready.decode(said).extras, True
                return None
            outcome = _outcome.decode(said)
        except msgspec.DecodeError:  # it has ended, or writes its stack while a limit ends it
            return self._replace(child, said)
        child.job = None
        if outcome.failure == MEMORY and not self._is_sealed:
            self._end(child)  # its memory and its state are unknown
        return outcome

    def _replace(self, child: _Child, said: bytes = b"", *, is_late: bool = False) -> Outcome | None:
        """End a process that is late or has ended itself; return its answer's outcome. The next gets a new process."""
        was_ready, job = child.is_ready, child.job
        place = child.last_words(said, is_late=is_late) if was_ready and (said or is_late) else ""
        code = self._end(child)
        if not was_ready:
            raise RoleFailed(f"the verifier {self._verifier} does not start (exit code {code}); see the log above")
        if job is None:
            return None
        if is_late or code in OVER_LIMIT:
            what = f"no reply within {self._cpu_s:g} s of CPU time or {self._wall_s:g} s of wall-clock time"
            return failed(TIMEOUT, what, place)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return failed(EXITED, f"the verifier's process {how}", place)

    def _settle(self, job: _Job, outcome: Outcome) -> None:
        self.counts.answers += 1
        self.counts.spent.update(outcome.spent)
        if outcome.failure:
            self.counts.failures[outcome.failure] += 1
        job.group.settle(job.place, outcome)
        if job.group.future.done():
            self._groups.discard(job.group)

    def _fail(self, error: Exception) -> None:
        """Fail all groups handed in so far, since no process starts."""
        unsettled = self._unsettled()
        self._waiting = []
        self._groups.clear()
        for child in list(self._children):
            self._end(child)
        for group in unsettled:
            if not group.future.done():
                group.future.set_exception(error)

    def _unsettled(self) -> list[_Group]:
        self._take_in()
        return list(self._groups)

    def _end(self, child: _Child) -> int:
        """Kill the process and forget it; return its exit code."""
        self._children.remove(child)
        self._selector.unregister(child.replies)
        if child.unsent:
            self._selector.unregister(child.requests)
        return child.end()


def verifier_argv(
    verifier: str, *, memory_bytes: int, timeout_s: float, sealing: Sealing | None = None
) -> tuple[str, ...]:
    """Return the command of one verifier process; it finds `verifier` where this one finds modules, or in its folder.

    Raises PluginError for a name without a colon that is no entry point, or that several have.
    """
    if ":" not in verifier:
        verifier = find_plugin(VERIFIER, verifier, (), where="verifier").target
    limits = str(memory_bytes), str(timeout_s)
    if sealing is None:
        return (sys.executable, "-m", "mrl.tasks.verifier_process", verifier, *limits)
    trust = "trusted" if sealing.is_trusted else "sealed"
    return (sys.executable, "-m", "mrl.tasks.sealed.sealed_verifier", verifier, sealing.evaluator, *limits, trust)


def _encoded(call: VerifierCall, extras: Sequence[str]) -> bytes:
    """Encode a request without extras that the verifier does not take. Half a character and the like become "?"."""
    asked = call._replace(**dict.fromkeys(set(EXTRAS) - set(extras), ""))
    try:
        return msgspec.msgpack.encode(asked)
    except UnicodeEncodeError:
        return msgspec.msgpack.encode([part.encode(errors="replace").decode() for part in asked])
