"""The learner's side: its totals and signs of life, on a link that finds the allocator again after a restart."""

import math
import threading
import time
from collections.abc import Callable

from mrl.records.codec import encode
from mrl.records.leases import LearnerReport

SILENCE_S = 3.0
BEAT_S = 1.0


class ReportSender:
    """Shared between the learner's thread (`report`, `beat`) and the thread of its link (`on_message`, `on_tick`).

    A report that is lost costs nothing, since reports carry totals.
    """

    def __init__(self, policy: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock, self._clock = threading.Lock(), clock
        self._newest = LearnerReport(policy=policy, trained_tokens=0, busy_s=0.0, data_wait_s=0.0)
        self._said_s = -math.inf
        self._post: Callable[[bytes], object] = lambda _: None
        self._reconnect: Callable[[], object] = lambda: None
        self._unanswered_since_s = math.inf
        self._pending = False

    def open(self, post: Callable[[bytes], object], reconnect: Callable[[], object]) -> None:
        """Give the sender its voice: `post` sends a message, `reconnect` looks the allocator's address up again."""
        self._post, self._reconnect = post, reconnect

    def report(self, report: LearnerReport) -> None:
        """Send the totals of now; never waits."""
        with self._lock:
            self._pending = True
        self._newest, self._said_s = report, self._clock()
        self._post(encode(report))

    def beat(self) -> None:
        """Say that the learner is alive, if it has said nothing for a second: the totals that it said last.

        To be called while it trains and while it waits; a learner that hangs does neither, and loses its share.
        """
        if self._clock() - self._said_s >= BEAT_S:
            self.report(self._newest)

    def on_message(self, _body: bytes) -> None:
        """Take an acknowledgement."""
        with self._lock:
            self._pending, self._unanswered_since_s = False, math.inf

    def on_tick(self, now_s: float) -> None:
        """After long silence look for the allocator again."""
        with self._lock:
            if self._pending:
                self._unanswered_since_s = min(self._unanswered_since_s, now_s)
            silent = now_s - self._unanswered_since_s > SILENCE_S
            if silent:
                self._unanswered_since_s = now_s
        if silent:
            self._reconnect()
