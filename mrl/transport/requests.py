"""Requests that get an answer in the end, over a link that loses messages, falls silent, and finds its server again.

A request is kept, encoded once, until it is answered. It is sent again over a working link, and after a reconnect all
requests are sent once more in order. A report states the whole situation: it is sent once, since the next report says
more, and the answer to a report also answers those before it. The receiver ignores what it has already: every request
may come twice.

`Requests` is the pure core, with neither socket nor clock. `RequestLink` is its shell.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec
import structlog

from mrl.errors import RecordError
from mrl.records.codec import decode

SILENCE_S = 3.0
"""Seconds without a message, while an answer is awaited, after which the server's address is looked up again."""
REPEAT_S, MAX_REPEAT_S = 1.0, 16.0
SLOW_BYTES_S = 4 * 1024 * 1024
"""Bytes per second over a slow link: while a long request crosses it, no other message arrives."""
WINDOW_REQUESTS, WINDOW_BYTES = 256, 4 * 1024 * 1024
MAX_REPORTS = 64

T = TypeVar("T")

log = structlog.get_logger()


@dataclass(slots=True)
class _Request:
    body: bytes
    asked_s: float
    sent_s: float = 0.0
    """Time of the last sending over this link."""
    wait_s: float = REPEAT_S


class Due(NamedTuple):
    """Actions due now: reconnect first where `reconnects`, then send `bodies`."""

    reconnects: bool
    bodies: list[bytes]


class Requests:
    """Requests and reports to one server that await an answer, by number. Numbers rise by one; both kinds share them.

    The server answers in the order in which it is asked. So an answer to one request does not mean that later ones are
    lost; they wait on. A request that was overtaken by the answers to later ones was lost, or its answer was.
    """

    def __init__(
        self,
        *,
        first_number: int = 1,
        window_requests: int = WINDOW_REQUESTS,
        window_bytes: int = WINDOW_BYTES,
        repeat_s: float = REPEAT_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.window_requests, self.window_bytes = window_requests, window_bytes
        """Most requests under way at once, and most bytes of them. One request always may be, whatever its length."""
        self.next_number = first_number
        self.newest_report = self.num_bytes = 0
        """Number of the newest report, and bytes of all unanswered requests."""
        self.repeats = self.reconnects = 0
        """Requests that were sent again, and links that were given up."""
        self._repeat_s, self._silence_s = repeat_s, silence_s
        self._unanswered: dict[int, _Request] = {}
        self._unsent: dict[int, _Request] = {}
        """Unanswered requests that have not been sent over this link, in order."""
        self._sent_bytes = 0
        self._reports: dict[int, float] = {}
        """Number -> time of each unanswered report."""
        self._heard_s = self._reconnected_s = -math.inf
        self._newest_answer = (first_number - 1, -math.inf)

    def __len__(self) -> int:
        return len(self._unanswered)

    @property
    def oldest(self) -> int | None:
        """Number of the oldest unanswered request."""
        return next(iter(self._unanswered), None)

    def post(self, body: bytes, now_s: float) -> int:
        """Keep a request until it is answered; return its number."""
        number, self.next_number = self.next_number, self.next_number + 1
        request = _Request(body, now_s, wait_s=self._repeat_s)
        self._unanswered[number] = self._unsent[number] = request
        self.num_bytes += len(body)
        return number

    def report(self, now_s: float) -> int:
        """Note a report that the caller sends now, outside any window; return its number."""
        number, self.next_number = self.next_number, self.next_number + 1
        self.newest_report, self._reports[number] = number, now_s
        if len(self._reports) > MAX_REPORTS:
            del self._reports[list(self._reports)[1]]  # the first one dates the silence
        return number

    def asked_s(self, number: int) -> float | None:
        """Return the time at which a request or report was handed in, if it is still unanswered."""
        request = self._unanswered.get(number)
        return self._reports.get(number) if request is None else request.asked_s

    def answered(self, number: int | None, now_s: float) -> bool:
        """Note an answer to this number, or with None any other message of the server.

        Return False when no answer to the number is awaited: it came before, or belongs to an earlier life.
        """
        self._heard_s = now_s
        if number is None or not self.forget(number):
            return False
        self._newest_answer = (number, now_s)
        return True

    def forget(self, number: int) -> bool:
        """Await no answer any more to a request, or to a report and those before it; return whether one was awaited."""
        if number in self._reports:
            self._reports = {other: made_s for other, made_s in self._reports.items() if other > number}
            return True
        request = self._unanswered.pop(number, None)
        if request is None:
            return False
        self.num_bytes -= len(request.body)
        if self._unsent.pop(number, None) is None:
            self._sent_bytes -= len(request.body)
        return True

    def waited_s(self, now_s: float) -> float:
        """Return the seconds of waiting for an answer without any message of the server; 0 when none is awaited."""
        first = next(iter(self._unanswered.values()), None)
        first_s = min(now_s if first is None else first.asked_s, next(iter(self._reports.values()), now_s))
        return max(0.0, now_s - max(self._heard_s, first_s))

    def due(self, now_s: float) -> Due:
        """Return the actions due at `now_s`: a new link after silence, and requests to send."""
        patience_s = self._silence_s + self._sent_bytes // SLOW_BYTES_S
        if reconnects := min(self.waited_s(now_s), now_s - self._reconnected_s) > patience_s:
            self._reconnected_s = now_s
            self.reconnects += 1
            self.start_over()
        lost = [request for number, request in self._unanswered.items() if self._is_lost(number, request, now_s)]
        for request in lost:
            request.sent_s, request.wait_s = now_s, min(2 * request.wait_s, MAX_REPEAT_S)
        self.repeats += len(lost)
        return Due(reconnects, [request.body for request in lost] + self.first(now_s))

    def first(self, now_s: float) -> list[bytes]:
        """Return requests to send for the first time over this link, as many as the window has room for."""
        bodies: list[bytes] = []
        while self._unsent:
            number, request = next(iter(self._unsent.items()))
            num_sent = len(self._unanswered) - len(self._unsent)
            is_full = num_sent >= self.window_requests or self._sent_bytes + len(request.body) > self.window_bytes
            if num_sent and is_full:
                break
            del self._unsent[number]
            self._sent_bytes += len(request.body)
            request.sent_s = now_s
            bodies.append(request.body)
        return bodies

    def start_over(self) -> None:
        """Treat all unanswered requests as unsent, for a new link or a new server."""
        self.repeats += len(self._unanswered) - len(self._unsent)
        self._unsent, self._sent_bytes = dict(self._unanswered), 0
        for request in self._unanswered.values():
            request.wait_s = self._repeat_s

    def _is_lost(self, number: int, request: _Request, now_s: float) -> bool:
        """Whether to send the request again. A server silent since it was sent needs another link, not another copy."""
        if number in self._unsent or self._heard_s <= request.sent_s:
            return False
        newest, answered_s = self._newest_answer
        waits_since_s = max(request.sent_s, answered_s) if number > newest else request.sent_s
        return now_s - waits_since_s >= request.wait_s + len(request.body) // SLOW_BYTES_S


class RequestLink:
    """Posts due requests and logs a silent server. Shared between its owner's thread and the link's thread."""

    def __init__(self, whom: str, requests: Requests) -> None:
        """`whom` names the server in the log."""
        self.core = requests
        """The core, for an owner whose own lock guards all its calls here."""
        self._whom, self._lock = whom, threading.RLock()  # an answer may come while the request is posted
        self._post: Callable[[bytes], object] = lambda _: None
        self._reconnect: Callable[[], object] = lambda: None
        self._has_heard, self._told_s = False, 0.0
        """Whether the server ever answered, and the seconds of silence at the last log line."""

    def open(self, post: Callable[[bytes], object], reconnect: Callable[[], object]) -> None:
        """Connect the link: `post` sends a message, `reconnect` looks the server's address up again.

        Messages queued on the abandoned link should be dropped with it (`BackgroundClient.restart`).
        """
        self._post, self._reconnect = post, reconnect

    def post(self, body: bytes, now_s: float) -> int:
        """Send a request until it is answered; return its number."""
        with self._lock:
            number = self.core.post(body, now_s)
            self._send(self.core.first(now_s))
            return number

    def report(self, body: bytes, now_s: float) -> int:
        """Send a report once; return its number."""
        with self._lock:
            number = self.core.report(now_s)
            self._post(body)
            return number

    def answered(self, number: int | None, now_s: float) -> bool:
        """See `Requests.answered`."""
        with self._lock:
            if self._told_s:
                log.info("answers again", whom=self._whom, after_s=round(self.core.waited_s(now_s), 1))
            self._has_heard, self._told_s = True, 0.0
            is_new = self.core.answered(number, now_s)
            self._send(self.core.first(now_s))
            return is_new

    def read(self, body: bytes, using: msgspec.msgpack.Decoder[T]) -> T | None:
        """Decode a message of the server; log one that cannot be decoded, and return None."""
        try:
            return decode(body, using)
        except RecordError as error:
            log.warning("unreadable answer", whom=self._whom, error=str(error))
            return None

    def on_tick(self, now_s: float) -> None:
        """Send requests that are due; after silence, over a new link."""
        with self._lock:
            waited_s, due = self.core.waited_s(now_s), self.core.due(now_s)
            if due.reconnects:
                if waited_s >= 2 * self._told_s:  # first, and whenever the silence is twice as long
                    self._told_s = waited_s
                    say = log.warning if self._has_heard else log.info  # one that starts has yet to answer
                    say("no answer", whom=self._whom, for_s=round(waited_s, 1), reconnects=self.core.reconnects)
                self._reconnect()
            self._send(due.bodies)

    def _send(self, bodies: list[bytes]) -> None:
        for body in bodies:
            self._post(body)
