"""The learner's side: its totals, once a step, on a link that finds the allocator again after a restart."""

import math
import threading
from collections.abc import Callable

from mrl.records.codec import encode
from mrl.records.leases import LearnerReport

SILENCE_S = 3.0


class ReportSender:
    """Shared between the learner's thread (`report`) and the thread of its link (`on_message`, `on_tick`).

    A report that is lost costs nothing, since reports carry totals.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
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
        self._post(encode(report))

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
