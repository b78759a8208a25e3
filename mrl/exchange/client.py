"""The exchange as a learner or worker sees it; a lost daemon costs peer data only.

Nothing waits but `flush`, `fetch_now` and `barrier`, which synchronous runs need, and these within their bounds.
"""

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec

from mrl.errors import RecordError
from mrl.exchange.arrivals import Arrivals
from mrl.exchange.link import Link, OpenLink
from mrl.exchange.outbox import RESEND_S
from mrl.exchange.publisher import Publisher
from mrl.exchange.questions import MAX_IDS, Question, Questions, slices
from mrl.exchange.shared_files import Locate, SharedFiles
from mrl.records.codec import decode, encode
from mrl.records.exchange_messages import (
    Announce,
    Barrier,
    BarrierState,
    Batch,
    ClientMessage,
    Commit,
    Deliver,
    Done,
    Hello,
    Ping,
    PutAck,
    RequestKind,
    Stream,
    Subscribe,
    Welcome,
    daemon_message_decoder,
)
from mrl.records.experience import ExperienceRecord, Received, RecordKind
from mrl.records.version import Version

PING_S = 1.0
SILENCE_S = 3.0
FETCH_NOW_IDS = 32
"""Prompts of one Fetch whose answer is waited for: few, so that no answer outgrows the queues on its way."""


class ExchangeClient:
    """One process's end of the conversation. May be called from one or more threads, but not from the link's own."""

    def __init__(
        self,
        *,
        client: str,
        policy: str,
        clock: Callable[[], float] = time.monotonic,
        locate: Locate = lambda: None,
    ) -> None:
        """`client` names the process, unique in the run and equal to its transport identity.

        `locate()` finds the daemon's folder while it runs on this host: records go through files there.
        """
        self.storage = ""
        """Why the daemon stores nothing at the moment ("disk_full"), so that what is published waits here."""
        self._client, self._policy, self._clock = client, policy, clock
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._link: Link | None = None
        self._counts: Counter[str] = Counter()
        self._files = SharedFiles(locate, client)
        self._arrivals = Arrivals(self._counts, self._files)
        self._incarnation = ""
        # An acknowledgement that was meant for an earlier process of this name must fit nothing here.
        self._seq = secrets.randbits(48)
        self._publisher = Publisher(
            client, self._files, self._counts, send=self._send, next_seq=self._next_seq, clock=clock
        )
        self._questions = Questions(client, policy, self._counts, send=self._send, next_seq=self._next_seq, clock=clock)
        self._subscription: Subscribe | None = None
        self._barrier: Barrier | None = None
        self._missing: list[str] = []
        self._progress: Callable[[], int] = lambda: 0
        self._progress_of: dict[str, int] = {}
        self._newest: Announce | None = None
        self._resumed: Announce | None = None
        self._heard_s = self._pinged_s = self._reconnected_s = self._greeted_s = clock()

    @classmethod
    def connect(
        cls,
        open_link: OpenLink,
        *,
        client: str,
        policy: str,
        clock: Callable[[], float] = time.monotonic,
        locate: Locate = lambda: None,
    ) -> "ExchangeClient":
        """A client that talks over the link that `open_link(on_message, on_tick)` makes."""
        self = cls(client=client, policy=policy, clock=clock, locate=locate)
        with self._lock:
            self._link = open_link(self.on_message, self.on_tick)
            self._post(self._hello())
        return self

    @property
    def counts(self) -> dict[str, int]:
        """Totals: stored, refused/<reason>, dropped, dropped_fetches, too_large, unsent, received, unreadable,
        malformed, reconnects, hellos."""
        with self._lock:
            return dict(self._counts)

    def publish(self, records: Sequence[ExperienceRecord], *, room_within_s: float = 0.0) -> None:
        """Hand records to the exchange. What is too large is counted and dropped; so is the oldest when too much waits.

        Before anything is dropped, the daemon has `room_within_s` in all to acknowledge what waits.
        """
        end_s = time.monotonic() + room_within_s
        with self._lock:
            for put in self._publisher.gather(records):
                self._changed.wait_for(partial(self._publisher.has_room, put), end_s - time.monotonic())

    def flush(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until everything published so far was acknowledged or refused.

        False when it was not, and for good once records had to be dropped.
        """
        with self._lock:
            published = self._publisher.send_off()
            is_clear = self._changed.wait_for(lambda: self._publisher.is_clear(published), timeout_s)
            return is_clear and not self._counts["dropped"]

    def announce(self, version: Version, *, resumed: bool = False) -> None:
        """This policy now trains at `version`; `resumed` when that opens a new run epoch after a restart."""
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
        watch: bool,
    ) -> None:
        """Ask what others have on these prompts; what comes is handed out by `take`.

        With `watch`, records that come later are delivered too; at most 4096 prompts are watched, the oldest go.
        """
        with self._lock:
            ids, question = list(dict.fromkeys(prompt_ids)), Question(tuple(kinds), limit, max_age_versions)
            self._arrivals.inbox.expect(ids)
            self._questions.ask(ids, question, watch=watch)

    def fetch_now(
        self,
        prompt_ids: Iterable[str],
        *,
        kinds: Sequence[RecordKind],
        limit: int,
        max_age_versions: int | None,
        timeout_s: float,
    ) -> bool:
        """Ask what others have on these prompts now, and wait at most `timeout_s` until all of it is there for `take`.

        False when time ran out, or the inbox had no room; what came by then is there all the same.
        """
        end_s = time.monotonic() + timeout_s
        with self._lock:
            ids, question = list(dict.fromkeys(prompt_ids)), Question(tuple(kinds), limit, max_age_versions)
            self._arrivals.inbox.expect(ids)
            for part in slices(ids, FETCH_NOW_IDS):
                seq = self._questions.ask_now(part, question)
                if not self._await_answer(seq, end_s - time.monotonic()):
                    return False
        return True

    def subscribe(self, kinds: Sequence[RequestKind]) -> None:
        """Serve requests of these kinds to this policy, together with its other subscribers; `take` hands them out."""
        with self._lock:
            self._subscription = Subscribe(client=self._client, kinds=list(kinds))
            self._post(self._subscription)

    def read(
        self,
        stream: str,
        *,
        kinds: Sequence[RecordKind],
        sources: Sequence[str] = (),
        tasks: Sequence[str] = (),
        max_age_versions: int | None = None,
        after: int = 0,
    ) -> None:
        """Read all records of these kinds, sources and tasks (empty: of all) that came after number `after`.

        `take` hands them out in the order in which they came, each once. A policy has one reader per stream.
        """
        with self._lock:
            wish = Stream(
                client=self._client,
                stream=stream,
                kinds=list(kinds),
                sources=list(sources),
                tasks=list(tasks),
                max_age_versions=max_age_versions,
                after=after,
            )
            self._post(self._arrivals.open(wish))

    def commit(self, stream: str, upto: int) -> None:
        """The effect of the stream's records up to this number is in a durable checkpoint; they may be forgotten."""
        with self._lock:
            message = Commit(client=self._client, policy=self._policy, stream=stream, upto=upto)
            self._arrivals.commit(message)
            self._post(message)

    def barrier(self, number: int, members: Sequence[str], timeout_s: float) -> list[str]:
        """Come to barrier `number` and wait there for the other `members` (policies), at most `timeout_s`.

        Returns the policies that are missing when time ran out, [] when all are there. While the daemon has not
        answered, all others count as missing. Coming again to the same barrier goes on with the wait.
        """
        with self._lock:
            if self._barrier is None or self._barrier.number != number:
                self._missing = [policy for policy in members if policy != self._policy]
            self._barrier = Barrier(client=self._client, policy=self._policy, number=number, members=list(members))
            self._post(self._barrier)
            self._changed.wait_for(lambda: not self._missing, timeout_s)
            return list(self._missing)

    def tell(self, progress: Callable[[], int]) -> None:
        """Say with every Ping how far this policy is, to those who wait for it at a barrier.

        The link's thread asks: a number that changes whenever the policy gets on.
        """
        self._progress = progress

    def progress_of(self, policy: str) -> int:
        """How far a policy that is missing at the barrier said that it was; 0 where it said nothing."""
        with self._lock:
            return self._progress_of.get(policy, 0)

    def unwatch(self, prompt_ids: Iterable[str]) -> None:
        """No longer interested in these prompts."""
        with self._lock:
            self._questions.unwatch(prompt_ids)

    def take(self) -> list[Received]:
        """What came since the last call, each record once per asking."""
        with self._lock:
            return self._arrivals.inbox.take()

    def lost_s(self, now_s: float | None = None) -> float:
        """Seconds without any answer from the daemon; 0 while it answers in time."""
        silent_s = (self._clock() if now_s is None else now_s) - self._heard_s
        return silent_s if silent_s > 2 * PING_S else 0.0

    def close(self, timeout_s: float) -> None:
        """Send what is queued for at most `timeout_s` and end the link."""
        with self._lock:
            self._publisher.send_off()
        if self._link is not None:
            self._link.close(timeout_s)
        with self._lock:
            self._files.close()

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
                    self.storage = ""
                    self._publisher.note_answer(message)
                case Deliver():
                    self._take_in(message)
                case Batch():
                    for said in self._arrivals.read(message):
                        self._post(said)
                case Welcome():
                    self.storage, self._publisher.window_bytes = message.storage, message.window_bytes
                    self._files.is_spool_read = message.reads_spool
                case BarrierState() if self._barrier is not None and message.number == self._barrier.number:
                    self._missing = message.missing
                    self._progress_of.update(zip(message.missing, message.progress, strict=False))
            if is_restarted or (isinstance(message, Welcome) and not message.known):
                self._start_over(at_once=is_restarted)
            self._publisher.send()
            self._changed.notify_all()

    def on_tick(self, now_s: float) -> None:
        """Ping, send again what is unanswered, and look for a daemon that fell silent; the link's thread calls this."""
        progress = self._progress() if now_s - self._pinged_s >= PING_S else 0  # it may wait for what others hold
        with self._lock:
            if self._link is None:
                return
            self._publisher.send_gathered(now_s)
            if now_s - max(self._heard_s, self._reconnected_s) > SILENCE_S:
                self._reconnected_s = now_s
                self._counts["reconnects"] += 1
                self._link.request_reconnect()
                self._post(Ping(client=self._client))
            elif now_s - self._pinged_s >= PING_S and now_s - self._heard_s <= SILENCE_S:
                self._pinged_s = now_s
                self._files.look()
                self._post(Ping(client=self._client, has_spool=self._files.has_spool, progress=progress))
                self._repeat_standing()
                self._publisher.send_again(now_s)
                self._questions.ask_again(now_s)

    def _start_over(self, *, at_once: bool) -> None:
        """Tell a daemon that does not know this client everything that it needs to know."""
        now_s = self._clock()
        if not at_once and now_s - self._greeted_s < RESEND_S and self._counts["hellos"]:
            return
        self._greeted_s = now_s
        self._counts["hellos"] += 1
        self._files.forget_log()
        self._post(self._hello())
        self._repeat_standing()
        self._publisher.start_over()
        self._questions.start_over()

    def _repeat_standing(self) -> None:
        """Say again what has no answer of its own; the daemon ignores what it knows."""
        for message in (self._resumed, self._newest, self._subscription, self._barrier, *self._arrivals.standing()):
            if message is not None:
                self._post(message)

    def _take_in(self, message: Deliver) -> None:
        done = self._arrivals.take_in(message)
        for part in slices(done, MAX_IDS):
            self._post(Done(client=self._client, record_ids=part))
        if len(done) == len(message.records):
            self._questions.note_part(message.seq, message.part, message.parts)

    def _hello(self) -> Hello:
        self._files.look()
        return Hello(client=self._client, policy=self._policy, has_spool=self._files.has_spool)

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def _await_answer(self, seq: int, timeout_s: float) -> bool:
        is_answered = self._changed.wait_for(lambda: self._questions.is_answered(seq), timeout_s)
        self._questions.give_up(seq)
        return is_answered

    def _post(self, message: ClientMessage) -> None:
        self._send(encode(message))

    def _send(self, body: bytes) -> None:
        if self._link is None or not self._link.post(body):
            self._counts["unsent"] += 1
