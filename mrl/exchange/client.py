"""The exchange as a learner or worker sees it: nothing here ever waits, and a lost daemon costs peer data only."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from mrl.errors import RecordError
from mrl.exchange.inbox import Inbox
from mrl.records.codec import decode, encode
from mrl.records.exchange import (
    Announce,
    ClientMessage,
    Deliver,
    Done,
    Fetch,
    Hello,
    Ping,
    Put,
    PutAck,
    Unwatch,
    Welcome,
    daemon_message_decoder,
)
from mrl.records.experience import ExperienceRecord, Received, experience_decoder
from mrl.records.version import Version

PING_S = 1.0
SILENCE_S = 3.0
RESEND_S = 2.0
MAX_RESEND_S = 30.0
MAX_PUT_BYTES = 1024 * 1024
MAX_UNACKNOWLEDGED_BYTES = 16 * 1024 * 1024
MAX_UNANSWERED_FETCHES = 256
MAX_IDS = 1024
MAX_WATCHED = 4096


class Link(Protocol):
    """What the client needs of `mrl.transport.background.BackgroundClient`."""

    def post(self, body: bytes) -> bool:
        """Queue a message."""

    def request_reconnect(self) -> None:
        """Look up the daemon's address again."""

    def close(self, timeout_s: float) -> None:
        """End the link."""


OpenLink = Callable[[Callable[[bytes], None], Callable[[float], None]], Link]
"""Makes the link from (on_message, on_tick)."""


@dataclass(slots=True)
class _Unanswered:
    """A message that is sent again until the daemon answers it."""

    body: bytes
    sent_s: float
    num_records: int = 0
    watch: bool = False
    wait_s: float = RESEND_S


@dataclass(frozen=True, slots=True)
class _Question:
    """How a watched prompt was asked for."""

    limit: int
    max_age_versions: int | None


class ExchangeClient:
    """One process's end of the conversation. All methods return at once and may be called from one or more threads."""

    def __init__(self, *, client: str, policy: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`client` names the process, unique in the run and equal to its transport identity."""
        self._client, self._policy, self._clock = client, policy, clock
        self._lock = threading.RLock()
        self._link: Link | None = None
        self._counts: Counter[str] = Counter()
        self._incarnation = ""
        self._seq = 0
        self._puts: dict[int, _Unanswered] = {}
        self._put_bytes = 0
        self._fetches: dict[int, _Unanswered] = {}
        self._watched: dict[str, _Question] = {}
        self._inbox = Inbox()
        self._newest: Announce | None = None
        self._resumed: Announce | None = None
        self._heard_s = self._pinged_s = self._reconnected_s = self._greeted_s = clock()

    @classmethod
    def connect(
        cls, open_link: OpenLink, *, client: str, policy: str, clock: Callable[[], float] = time.monotonic
    ) -> "ExchangeClient":
        """A client that talks over the link that `open_link(on_message, on_tick)` makes."""
        self = cls(client=client, policy=policy, clock=clock)
        with self._lock:
            self._link = open_link(self.on_message, self.on_tick)
            self._post(Hello(client=client, policy=policy))
        return self

    @property
    def counts(self) -> dict[str, int]:
        """Totals: stored, refused/<reason>, dropped, invalid, unsent, received, malformed, reconnects, hellos."""
        with self._lock:
            return dict(self._counts)

    def publish(self, records: Sequence[ExperienceRecord]) -> None:
        """Hand records to the exchange. Invalid ones are counted and dropped; so are the oldest when too many wait."""
        with self._lock:
            valid = [record for record in records if self._is_valid(record)]
            for part in _parts(valid):
                self._seq += 1
                body = encode(Put(client=self._client, seq=self._seq, records=part))
                self._puts[self._seq] = _Unanswered(body, self._clock(), len(part))
                self._put_bytes += len(body)
                self._send(body)
            while self._put_bytes > MAX_UNACKNOWLEDGED_BYTES:
                self._counts["dropped"] += self._forget_put(next(iter(self._puts)))

    def announce(self, version: Version, *, resumed: bool = False) -> None:
        """This policy now trains at `version`; `resumed` when that opens a new run epoch after a restart."""
        with self._lock:
            message = Announce(client=self._client, policy=self._policy, version=version, resumed=resumed)
            self._newest = msgspec.structs.replace(message, resumed=False)
            if resumed:
                self._resumed = message
            self._post(message)

    def fetch(self, prompt_ids: Iterable[str], *, limit: int, max_age_versions: int | None, watch: bool) -> None:
        """Ask which others succeeded on these prompts; what comes is handed out by `take`.

        With `watch`, successes that come later are delivered too; at most 4096 prompts are watched, the oldest go.
        """
        with self._lock:
            ids = list(dict.fromkeys(prompt_ids))
            self._inbox.expect(ids)
            if watch:
                self._watch(ids, _Question(limit, max_age_versions))
            self._ask(ids, _Question(limit, max_age_versions), watch=watch)

    def unwatch(self, prompt_ids: Iterable[str]) -> None:
        """No longer interested in these prompts."""
        with self._lock:
            ids = [prompt_id for prompt_id in prompt_ids if self._watched.pop(prompt_id, None) is not None]
            for part in _slices(ids):
                self._post(Unwatch(client=self._client, prompt_ids=part))

    def take(self) -> list[Received]:
        """What came since the last call, each record once per asking."""
        with self._lock:
            return self._inbox.take()

    def lost_s(self, now_s: float | None = None) -> float:
        """Seconds without any answer from the daemon; 0 while it answers in time."""
        silent_s = (self._clock() if now_s is None else now_s) - self._heard_s
        return silent_s if silent_s > 2 * PING_S else 0.0

    def close(self, timeout_s: float) -> None:
        """Send what is queued for at most `timeout_s` and end the link."""
        if self._link is not None:
            self._link.close(timeout_s)

    def on_message(self, body: bytes) -> None:
        """Take in one message of the daemon; the link's thread calls this."""
        with self._lock:
            try:
                message = decode(body, daemon_message_decoder)
            except RecordError:
                self._counts["malformed"] += 1
                return
            self._heard_s = self._clock()
            is_restarted = self._incarnation not in ("", message.incarnation)
            self._incarnation = message.incarnation
            match message:
                case PutAck():
                    self._forget_put(message.seq)
                    self._counts["stored"] += message.stored
                    self._counts.update({f"refused/{reason}": number for reason, number in message.refused.items()})
                case Deliver():
                    self._take_in(message)
            if is_restarted or (isinstance(message, Welcome) and not message.known):
                self._start_over(at_once=is_restarted)

    def on_tick(self, now_s: float) -> None:
        """Ping, send again what is unanswered, and look for a daemon that fell silent; the link's thread calls this."""
        with self._lock:
            if self._link is None:
                return
            if now_s - max(self._heard_s, self._reconnected_s) > SILENCE_S:
                self._reconnected_s = now_s
                self._counts["reconnects"] += 1
                self._link.request_reconnect()
                self._post(Ping(client=self._client))
            elif now_s - self._pinged_s >= PING_S and now_s - self._heard_s <= SILENCE_S:
                self._pinged_s = now_s
                self._post(Ping(client=self._client))
                self._repeat_announcements()
                self._resend(now_s)

    def _start_over(self, *, at_once: bool) -> None:
        """Tell a daemon that does not know this client everything that it needs to know."""
        now_s = self._clock()
        if not at_once and now_s - self._greeted_s < RESEND_S and self._counts["hellos"]:
            return
        self._greeted_s = now_s
        self._counts["hellos"] += 1
        self._post(Hello(client=self._client, policy=self._policy))
        self._repeat_announcements()
        for put in self._puts.values():
            put.sent_s = now_s
            self._send(put.body)
        self._fetches = {seq: fetch for seq, fetch in self._fetches.items() if not fetch.watch}
        for fetch in self._fetches.values():
            fetch.sent_s = now_s
            self._send(fetch.body)
        by_question: dict[_Question, list[str]] = {}
        for prompt_id, question in self._watched.items():
            by_question.setdefault(question, []).append(prompt_id)
        for question, ids in by_question.items():
            self._ask(ids, question, watch=True)

    def _repeat_announcements(self) -> None:
        """An announcement has no answer, so it is repeated; the daemon ignores what it knows."""
        for message in (self._resumed, self._newest):
            if message is not None:
                self._post(message)

    def _resend(self, now_s: float) -> None:
        for waiting in (*self._puts.values(), *self._fetches.values()):
            if now_s - waiting.sent_s >= waiting.wait_s:
                waiting.sent_s, waiting.wait_s = now_s, min(2 * waiting.wait_s, MAX_RESEND_S)
                self._send(waiting.body)

    def _take_in(self, message: Deliver) -> None:
        self._fetches.pop(message.seq, None)
        taken = self._inbox.put(zip(message.records, message.ages_versions, strict=False))
        self._counts["received"] += len(taken)
        for part in _slices([record.record_id for record in message.records if self._inbox.has_seen(record)]):
            self._post(Done(client=self._client, record_ids=part))

    def _watch(self, prompt_ids: list[str], question: _Question) -> None:
        for prompt_id in prompt_ids:
            self._watched.pop(prompt_id, None)
            self._watched[prompt_id] = question
        while len(self._watched) > MAX_WATCHED:
            del self._watched[next(iter(self._watched))]

    def _ask(self, prompt_ids: list[str], question: _Question, *, watch: bool) -> None:
        for part in _slices(prompt_ids):
            self._seq += 1
            body = encode(
                Fetch(
                    client=self._client,
                    policy=self._policy,
                    prompt_ids=part,
                    limit=question.limit,
                    max_age_versions=question.max_age_versions,
                    watch=watch,
                    seq=self._seq,
                )
            )
            self._fetches[self._seq] = _Unanswered(body, self._clock(), watch=watch)
            self._send(body)
        while len(self._fetches) > MAX_UNANSWERED_FETCHES:
            del self._fetches[next(iter(self._fetches))]
            self._counts["dropped_fetches"] += 1

    def _is_valid(self, record: ExperienceRecord) -> bool:
        """Encoding checks no bounds, and the daemon would drop a whole Put for one invalid record."""
        try:
            decode(encode(record), experience_decoder)
        except RecordError:
            self._counts["invalid"] += 1
            return False
        return True

    def _forget_put(self, seq: int) -> int:
        """Returns how many records that Put held."""
        put = self._puts.pop(seq, None)
        if put is None:
            return 0
        self._put_bytes -= len(put.body)
        return put.num_records

    def _post(self, message: ClientMessage) -> None:
        self._send(encode(message))

    def _send(self, body: bytes) -> None:
        if self._link is None or not self._link.post(body):
            self._counts["unsent"] += 1


def _parts(records: list[ExperienceRecord]) -> Iterator[list[ExperienceRecord]]:
    """Consecutive parts, each small enough for one Put."""
    part: list[ExperienceRecord] = []
    part_bytes = 0
    for record in records:
        num_bytes = len(encode(record))
        if part and (part_bytes + num_bytes > MAX_PUT_BYTES or len(part) == MAX_IDS):
            yield part
            part, part_bytes = [], 0
        part.append(record)
        part_bytes += num_bytes
    if part:
        yield part


def _slices(ids: list[str]) -> Iterator[list[str]]:
    return (ids[start : start + MAX_IDS] for start in range(0, len(ids), MAX_IDS))
