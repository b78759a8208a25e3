"""The client of the exchange in a learner or worker; a lost daemon costs peer data only.

Calls that may wait take a bound: `flush`, `fetch_now` and `barrier`, which synchronous runs need, `publish` with
`room_within_s`, and `close`. All others return at once.
"""

import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import msgspec
import structlog

from mrl.errors import RecordError
from mrl.exchange.client_fetches import ClientFetches, FetchTerms, slices
from mrl.exchange.inbox import Inbox
from mrl.exchange.limits import ClientLimits, Limits
from mrl.exchange.publisher import RecordPublisher
from mrl.records.codec import decode, encode
from mrl.records.exchange_messages import (
    Announce,
    Barrier,
    BarrierState,
    ClientMessage,
    Deliver,
    Done,
    Hello,
    Later,
    Ping,
    PutAck,
    RequestKind,
    Subscribe,
    Welcome,
    daemon_message_decoder,
)
from mrl.records.experience import ExperienceRecord, Received, RecordKind
from mrl.records.version import Version
from mrl.transport.requests import Requests

PING_S = 1.0
"""Seconds between two Pings."""
GREET_AGAIN_S = 2.0
"""Least seconds between two Hellos to a daemon that does not know this client."""

log = structlog.get_logger()


class ExchangeLink(Protocol):
    """Connection below the client; `mrl.transport.background.BackgroundClient` is one."""

    def post(self, body: bytes) -> bool:
        """Queue a message; return whether there was room for it."""

    def restart(self) -> None:
        """Look up the daemon's address again, and drop all queued messages."""

    def close(self, timeout_s: float) -> None:
        """Send queued messages for at most `timeout_s`, and end the link."""


OpenLink = Callable[[Callable[[bytes], None], Callable[[float], None]], ExchangeLink]
"""Makes the link from its callbacks (on_message, on_tick)."""


class ExchangeClient:
    """A process's end of the conversation with the exchange.

    Several threads may share a client. The link's own thread calls `on_message` and `on_tick` and nothing else.
    """

    def __init__(
        self,
        *,
        client: str,
        policy: str,
        clock: Callable[[], float] = time.monotonic,
        limits: ClientLimits = ClientLimits(),  # noqa: B008 - frozen
    ) -> None:
        """`client` is the name of the process: unique in the run, and equal to its transport identity."""
        self.storage = ""
        """Why the daemon stores nothing ("disk_full"), so that published records wait here; empty while it stores."""
        self._client, self._policy, self._clock, self._limits = client, policy, clock, limits
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._link: ExchangeLink | None = None
        self._counts: Counter[str] = Counter()
        self._incarnation = ""
        # First numbers are random: an answer that was meant for an earlier process of this name must fit nothing here.
        self._puts = Requests(
            first_number=1 + secrets.randbits(48), window_bytes=Limits().min_window_bytes, silence_s=math.inf
        )
        self._asked = Requests(first_number=1 + secrets.randbits(48))
        self._publisher = RecordPublisher(client, self._puts, self._counts, limits, self._send)
        self._questions = ClientFetches(
            client, policy, self._asked, counts=self._counts, limits=limits, send=self._send
        )
        self._inbox = Inbox(self._counts, limits)
        self._subscription: Subscribe | None = None
        self._barrier: Barrier | None = None
        self._missing: list[str] = []
        self._progress: Callable[[], int] = lambda: 0
        self._progress_of: dict[str, int] = {}
        self._newest: Announce | None = None
        self._resumed: Announce | None = None
        self._last_ping = 0
        self._heard_s = self._pinged_s = self._greeted_s = clock()

    @classmethod
    def connect(
        cls,
        open_link: OpenLink,
        *,
        client: str,
        policy: str,
        clock: Callable[[], float] = time.monotonic,
        limits: ClientLimits = ClientLimits(),  # noqa: B008 - frozen
    ) -> "ExchangeClient":
        """Return a client that talks over the link that `open_link(on_message, on_tick)` makes."""
        self = cls(client=client, policy=policy, clock=clock, limits=limits)
        with self._lock:
            self._link = open_link(self.on_message, self.on_tick)
            self._post(Hello(client=client, policy=policy))
        return self

    @property
    def counts(self) -> dict[str, int]:
        """Totals by name.

        The names: stored, refused/<reason>, later, dropped, dropped_fetches, too_large, unsent, received, unreadable,
        malformed, reconnects, hellos.
        """
        with self._lock:
            return dict(self._counts)

    def losses(self) -> dict[str, float]:
        """Return metrics of published records that go to no peer, by reason; totals of this process."""
        with self._lock:
            return {f"exchange/{why}": float(self._counts[why]) for why in ("too_large", "dropped")}

    def publish(self, records: Sequence[ExperienceRecord], *, room_within_s: float = 0.0) -> None:
        """Hand records to the exchange.

        A record that is too large for a message is counted and dropped. When more than
        `ClientLimits.unacknowledged_bytes` wait, the oldest records are dropped and counted. Before that, the daemon
        has `room_within_s` in all to acknowledge some.
        """
        end_s = time.monotonic() + room_within_s
        with self._lock:
            for num_bytes in self._publisher.gather(records, self._clock()):
                self._changed.wait_for(partial(self._publisher.has_room, num_bytes), end_s - time.monotonic())

    def flush(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until all records published so far were acknowledged or refused.

        Returns whether they were. Once records had to be dropped, returns False for good.
        """
        with self._lock:
            last = self._publisher.send_off(self._clock())
            is_clear = self._changed.wait_for(lambda: self._publisher.is_clear(last), timeout_s)
            return is_clear and not self._counts["dropped"]

    def announce(self, version: Version, *, resumed: bool = False) -> None:
        """Tell the exchange that this policy now trains at `version`.

        `resumed` marks a version that opens a new run epoch after a restart.
        """
        with self._lock:
            message = Announce(client=self._client, policy=self._policy, version=version, resumed=resumed)
            self._newest = msgspec.structs.replace(message, resumed=False)
            if resumed:
                self._resumed = message
            self._post(message)

    def fetch(
        self,
        prompt_ids: Iterable[str],
        *,
        kinds: Sequence[RecordKind],
        limit: int,
        max_age_versions: int | None,
    ) -> None:
        """Ask for the peers' records on these prompts without waiting; `take` hands them out.

        The daemon also watches the prompts and delivers later records. At most 4096 prompts are watched; beyond that
        the oldest watches end.
        """
        with self._lock:
            ids, question = list(dict.fromkeys(prompt_ids)), FetchTerms(tuple(kinds), limit, max_age_versions)
            self._inbox.expect(ids)
            self._questions.ask(ids, question, self._clock())

    def fetch_now(
        self,
        prompt_ids: Iterable[str],
        *,
        kinds: Sequence[RecordKind],
        limit: int,
        max_age_versions: int | None,
        timeout_s: float,
    ) -> bool:
        """Ask for the peers' records on these prompts, and wait at most `timeout_s` until `take` can hand them all out.

        The inbox has room for all of them: a group of long answers is megabytes. Returns False when time ran out;
        records that came by then can be taken all the same.
        """
        end_s = time.monotonic() + timeout_s
        with self._lock:
            ids, question = list(dict.fromkeys(prompt_ids)), FetchTerms(tuple(kinds), limit, max_age_versions)
            self._inbox.expect(ids)
            self._inbox.is_awaited = True
            try:
                return all(self._answered(part, question, end_s) for part in slices(ids, self._limits.awaited_prompts))
            finally:
                self._inbox.is_awaited = False

    def _answered(self, prompt_ids: list[str], question: FetchTerms, end_s: float) -> bool:
        number = self._questions.ask_now(prompt_ids, question, self._clock())
        self._changed.wait_for(partial(self._questions.is_answered, number), end_s - time.monotonic())
        if self._questions.is_answered(number):
            return True
        self._questions.give_up(number)
        return False

    def subscribe(self, kinds: Sequence[RequestKind]) -> None:
        """Serve requests of these kinds to this policy, together with its other subscribers; `take` hands them out."""
        with self._lock:
            self._subscription = Subscribe(client=self._client, kinds=list(kinds))
            self._post(self._subscription)

    def barrier(self, number: int, members: Sequence[str], timeout_s: float) -> list[str]:
        """Arrive at barrier `number`, and wait there for the other `members` (policies) for at most `timeout_s`.

        Returns the policies that are missing when time runs out, [] when all are there. Until the daemon has answered,
        all others count as missing. Another call with the same number goes on with the wait.
        """
        with self._lock:
            if self._barrier is None or self._barrier.number != number:
                self._missing = [policy for policy in members if policy != self._policy]
            self._barrier = Barrier(client=self._client, policy=self._policy, number=number, members=list(members))
            self._post(self._barrier)
            self._changed.wait_for(lambda: not self._missing, timeout_s)
            return list(self._missing)

    def tell(self, progress: Callable[[], int]) -> None:
        """Tell this policy's progress with every Ping, for policies that wait for it at a barrier.

        The link's thread calls `progress`, which returns a number that changes whenever the policy gets on.
        """
        self._progress = progress

    def progress_of(self, policy: str) -> int:
        """Return the last progress that a policy missing at the barrier told; 0 where it told none."""
        with self._lock:
            return self._progress_of.get(policy, 0)

    def unwatch(self, prompt_ids: Iterable[str]) -> None:
        """Stop watching these prompts."""
        with self._lock:
            self._questions.unwatch(prompt_ids)

    def take(self) -> list[Received]:
        """Return the records that came since the last call, each once per Fetch of its prompt."""
        with self._lock:
            if self._inbox.is_full:
                self._pinged_s = -math.inf  # ping at once, so that the daemon hears of the room
            return self._inbox.take()

    def lost_s(self, now_s: float | None = None) -> float:
        """Return the seconds since the daemon's last message; 0 while it answers in time."""
        silent_s = (self._clock() if now_s is None else now_s) - self._heard_s
        return silent_s if silent_s > 2 * PING_S else 0.0

    def close(self, timeout_s: float) -> None:
        """Send queued messages for at most `timeout_s`, and end the link."""
        with self._lock:
            self._publisher.send_off(self._clock())
        if self._link is not None:
            self._link.close(timeout_s)

    def on_message(self, body: bytes) -> None:
        """Handle one message of the daemon; the link's thread calls this."""
        with self._lock:
            try:
                message = decode(body, daemon_message_decoder)
            except RecordError:
                self._counts["malformed"] += 1
                return
            now_s = self._heard_s = self._clock()
            self._asked.answered(None, now_s)
            self._puts.answered(None, now_s)
            is_restarted = self._incarnation not in ("", message.incarnation)
            self._incarnation = message.incarnation
            match message:
                case PutAck():
                    self._note_storage("", now_s)
                    self._publisher.note_answer(message, now_s)
                case Later():
                    self._counts["later"] += 1
                    self._note_storage(message.storage, now_s)
                case Deliver():
                    self._take_in(message, now_s)
                case Welcome():
                    self._asked.answered(self._last_ping, now_s)
                    self._puts.window_bytes = message.window_bytes
                    self._note_storage(message.storage, now_s)
                case BarrierState() if self._barrier is not None and message.number == self._barrier.number:
                    self._missing = message.missing
                    self._progress_of.update(zip(message.missing, message.progress, strict=False))
            if is_restarted or (isinstance(message, Welcome) and not message.known):
                self._greet_again(now_s, at_once=is_restarted)
            self._changed.notify_all()

    def on_tick(self, now_s: float) -> None:
        """Ping, repeat unanswered messages, and look for a daemon that fell silent; the link's thread calls this."""
        progress = self._progress() if now_s - self._pinged_s >= PING_S else 0  # may block, so without the lock
        with self._lock:
            if self._link is None:
                return
            asked = self._asked.due(now_s)
            if asked.reconnects:
                self._counts["reconnects"] += 1
                self._link.restart()
                self._pinged_s = -math.inf
                self._publisher.start_over(now_s)
                # After so long the daemon may have given up deliveries, so watched prompts are fetched again.
                self._questions.start_over(now_s)
            if now_s - self._pinged_s >= PING_S:
                self._pinged_s = now_s
                self._last_ping = self._asked.report(now_s)
                self._post(Ping(client=self._client, progress=progress, is_full=self._inbox.is_full))
                self._repeat_standing()
            for body in [] if asked.reconnects else asked.bodies:
                self._send(body)
            self._publisher.on_tick(now_s)

    def _note_storage(self, storage: str, now_s: float) -> None:
        """Note whether the daemon stores. Once it does again, send the records again that it did not take."""
        before, self.storage = self.storage, storage
        if storage and not before:
            log.warning("the exchange cannot store records", reason=storage)
        elif before and not storage:
            log.info("the exchange stores records again")
            self._publisher.start_over(now_s)

    def _greet_again(self, now_s: float, *, at_once: bool) -> None:
        """Tell a daemon that does not know this client everything that it needs to know."""
        if not at_once and now_s - self._greeted_s < GREET_AGAIN_S and self._counts["hellos"]:
            return
        self._greeted_s = now_s
        self._counts["hellos"] += 1
        self._post(Hello(client=self._client, policy=self._policy))
        self._repeat_standing()
        self._publisher.start_over(now_s)
        self._questions.start_over(now_s)

    def _repeat_standing(self) -> None:
        """Repeat messages that get no answer of their own; the daemon ignores those that it knows."""
        for message in (self._resumed, self._newest, self._subscription, self._barrier):
            if message is not None:
                self._post(message)

    def _take_in(self, message: Deliver, now_s: float) -> None:
        requests = self._inbox.take_in(message)
        if requests is None:
            return
        deliveries = [message.delivery] if message.delivery else []
        if deliveries or requests:
            self._post(Done(client=self._client, deliveries=deliveries, requests=requests))
        self._questions.note_part(message, now_s)
        self._questions.send(now_s)

    def _post(self, message: ClientMessage) -> None:
        self._send(encode(message))

    def _send(self, body: bytes) -> None:
        if self._link is None or not self._link.post(body):
            self._counts["unsent"] += 1
