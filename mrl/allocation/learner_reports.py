"""A learner's side of the allocation: its totals and signs of life.

They go over a link that finds the allocator again after a restart.
"""

import math
import time
from collections.abc import Callable

from mrl.records.codec import encode
from mrl.records.leases import LearnerReport
from mrl.transport.requests import RequestLink, Requests

BEAT_S = 1.0


class ReportSender:
    """Sends a learner's reports to the allocator.

    Shared between the learner's thread (`report`, `beat`) and the thread of its link (`on_message`). A report that is
    lost costs nothing, since reports carry totals.
    """

    def __init__(self, policy: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._newest = LearnerReport(policy=policy, trained_tokens=0, busy_s=0.0, data_wait_s=0.0)
        self._said_s = -math.inf
        self.requests = RequestLink("allocator", Requests())

    def report(self, report: LearnerReport) -> None:
        """Send the learner's present totals; never waits."""
        self._newest, self._said_s = report, self._clock()
        self.requests.report(encode(report), self._said_s)

    def beat(self) -> None:
        """Send the last totals again as a sign of life, if nothing was sent for a second.

        To be called while the learner trains and while it waits; a learner that hangs does neither, and loses its
        share.
        """
        if self._clock() - self._said_s >= BEAT_S:
            self.report(self._newest)

    def on_message(self, _body: bytes) -> None:
        """Take an acknowledgement of the newest totals, or of totals that these replace."""
        self.requests.answered(self.requests.core.newest_report, self._clock())
