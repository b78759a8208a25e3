"""Every decision of the exchange daemon, with no socket, clock or file in sight."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from mrl.errors import RecordError
from mrl.exchange.barriers import Barriers
from mrl.exchange.kinds import quotas
from mrl.exchange.matching import Matching
from mrl.exchange.sessions import Session, remember
from mrl.exchange.shelf import Entry, Shelf
from mrl.exchange.subscriptions import Subscriptions
from mrl.exchange.versions import VersionBook
from mrl.exchange.watches import Watches
from mrl.records.codec import MAX_MESSAGE_BYTES, decode, encode
from mrl.records.exchange import (
    Announce,
    Barrier,
    BarrierState,
    ClientMessage,
    DaemonMessage,
    Deliver,
    Done,
    Fetch,
    Hello,
    Ping,
    PolicyShelf,
    Put,
    PutAck,
    Stat,
    StatRequest,
    Subscribe,
    Unwatch,
    Welcome,
    client_message_decoder,
)
from mrl.records.experience import ExperienceRecord, ScoreRecord, ScoreRequestRecord

MAX_DELIVER_BYTES = 1024 * 1024
MAX_REMEMBERED_IDS = 32_768
MAX_POLICIES = 256

Outgoing = list[tuple[bytes, DaemonMessage]]
Journal = Callable[[Sequence[bytes]], str]
"""Makes encoded entries durable before it returns: "" when it did, otherwise why not, for example "disk_full"."""


class ExchangeCore:
    """Takes client messages, returns what to send to whom. `handle` never raises for anything a client sent."""

    def __init__(
        self,
        *,
        incarnation: str,
        budget_bytes: int,
        per_prompt: int,
        max_age_versions: int,
        journal: Journal,
        started_s: float,
        max_watches_per_client: int = 4096,
        max_watches: int = 65_536,
    ) -> None:
        self.malformed: Counter[str] = Counter()
        """Input that was dropped, by kind; the socket loop adds what never reached the core."""
        self.versions = VersionBook()
        self._subscriptions = Subscriptions()
        self.shelf = Shelf(quotas=quotas(per_prompt), budget_bytes=budget_bytes, on_removal=self._subscriptions.drop)
        self._incarnation, self._started_s = incarnation, started_s
        self._budget_bytes, self._max_age_versions, self._journal = budget_bytes, max_age_versions, journal
        self._watches = Watches(max_per_client=max_watches_per_client, max_total=max_watches)
        self._matching = Matching(self.shelf, self.versions, self._watches)
        self._barriers = Barriers()
        self._sessions: dict[bytes, Session] = {}
        self._remembered_ids: dict[str, None] = {}
        self._policies: dict[str, None] = {}
        self._put: Counter[str] = Counter()
        self._refused: dict[str, Counter[str]] = {}
        self._abandoned = 0

    def restore(self, entries: Iterable[ExperienceRecord | Announce | Done]) -> None:
        """Rebuild the memory from what a journal kept, in its order."""
        for entry in entries:
            if isinstance(entry, Announce):
                self._note_version(entry)
            elif isinstance(entry, Done):
                self._remove_served(entry.record_ids)
            elif self._admits(entry.source) and not self._refusal(entry, entry.source):
                self._hold(entry, len(encode(entry)))
        for held in self.shelf.policies.values():
            held.evicted.clear()

    def snapshot(self) -> Iterator[bytes]:
        """The encoded entries from which `restore` makes an equal memory."""
        yield from map(encode, self.versions.announcements())
        yield from map(encode, self.shelf.records())

    def receive(self, client: bytes, body: bytes, now_s: float) -> Outgoing:
        """Decode and handle one message; malformed ones are counted and dropped."""
        try:
            message = decode(body, client_message_decoder)
        except RecordError:
            self.malformed["record"] += 1
            return []
        return self.handle(client, message, now_s)

    def handle(self, client: bytes, message: ClientMessage, now_s: float) -> Outgoing:
        """Act on one message of `client` (its transport identity) and return the messages to send."""
        session = self._sessions.get(client)
        if session is not None:
            session.heard_s = now_s
        match message:
            case Put():
                return self._handle_put(client, session, message, now_s)
            case Fetch():
                return self._handle_fetch(client, session, message, now_s)
            case Done() if session is not None:
                return self._handle_done(session, message, now_s)
            case Subscribe() | Barrier() if session is None:
                return [(client, self._welcome(known=False))]
            case Subscribe() if session is not None:
                self._subscriptions.subscribe(client, session.policy, message.kinds, now_s)
                return self._hand_out(now_s)
            case Barrier() if session is not None:
                told = self._barriers.arrive(client, session.policy, message.number, message.members)
                return [(other, self._barrier_state(number, missing)) for other, number, missing in told]
            case Announce():
                if self._note_version(message):
                    self._journal([encode(message)])
            case Unwatch():
                for prompt_id in message.prompt_ids:
                    self._watches.remove(client, prompt_id)
            case Hello():
                return self._handle_hello(client, message, now_s)
            case Ping():
                return [(client, self._welcome(known=session is not None))]
            case StatRequest():
                return [(client, self.stat(now_s))]
        return []

    def tick(self, now_s: float) -> Outgoing:
        """Deliver again what nobody acknowledged, and forget clients that fell silent."""
        for client in [client for client, session in self._sessions.items() if session.is_silent(now_s)]:
            self._forget(client)
        out: Outgoing = []
        for client, session in self._sessions.items():
            entries = map(self.shelf.get, session.overdue(now_s))
            out += self._deliveries(client, [entry for entry in entries if entry is not None])
        return out + self._hand_out(now_s)

    def stat(self, now_s: float) -> Stat:
        """The daemon's account of itself; the log's size is filled in by who owns the log."""
        return Stat(
            incarnation=self._incarnation,
            uptime_s=now_s - self._started_s,
            budget_bytes=self._budget_bytes,
            used_bytes=self.shelf.used_bytes,
            log_bytes=0,
            clients=sorted(session.name for session in self._sessions.values()),
            malformed=dict(self.malformed),
            shelves=[self._policy_shelf(policy) for policy in sorted(self._policies)],
            flows=self._matching.flows.table(self._policies),
            claims=sum(len(session.claims) for session in self._sessions.values()) + self._subscriptions.num_given,
            abandoned=self._abandoned + sum(session.abandoned for session in self._sessions.values()),
            dropped_watches=self._watches.dropped,
            unserved=self._subscriptions.num_waiting,
        )

    def _welcome(self, *, known: bool) -> Welcome:
        return Welcome(incarnation=self._incarnation, max_put_bytes=MAX_MESSAGE_BYTES, known=known)

    def _handle_hello(self, client: bytes, message: Hello, now_s: float) -> Outgoing:
        self._forget(client)
        if self._admits(message.policy):
            self._sessions[client] = Session(message.client, message.policy, now_s)
        return [(client, self._welcome(known=client in self._sessions))]

    def _forget(self, client: bytes) -> None:
        self._watches.forget(client)
        self._subscriptions.forget(client)
        self._barriers.forget(client)
        if client in self._sessions:
            self._abandoned += self._sessions.pop(client).abandoned

    def _handle_put(self, client: bytes, session: Session | None, message: Put, now_s: float) -> Outgoing:
        refused: Counter[str] = Counter()
        accepted: dict[str, tuple[ExperienceRecord, bytes]] = {}
        for record in message.records:
            payload = encode(record)
            reason = self._refusal(record, session.policy if session else record.source)
            if not reason and not self.shelf.fits(record, len(payload)):
                reason = "too_large"
            if record.record_id in accepted:
                reason = "duplicate"
            if reason:
                self._count_refusal(record.source, reason, refused)
            else:
                accepted[record.record_id] = record, payload
        reason = self._journal([payload for _, payload in accepted.values()]) if accepted else ""
        if reason:
            for record, _ in accepted.values():
                self._count_refusal(record.source, reason, refused)
            accepted = {}
        out: Outgoing = [(client, self._ack(message.seq, len(accepted), refused))]
        for record, payload in accepted.values():
            self._put[record.source] += 1
            self._hold(record, len(payload))
            out += self._tell_watchers(record, now_s)
        return out + self._hand_out(now_s)

    def _ack(self, seq: int, stored: int, refused: Counter[str]) -> PutAck:
        return PutAck(incarnation=self._incarnation, seq=seq, stored=stored, refused=dict(refused))

    def _handle_fetch(self, client: bytes, session: Session | None, message: Fetch, now_s: float) -> Outgoing:
        if session is None:
            return [(client, self._welcome(known=False))]
        found = self._matching.answer(client, session.policy, message, is_new=session.is_new_fetch(message.seq))
        for entry in found:
            session.claim(entry.record.record_id, now_s)
        return self._deliveries(client, found, seq=message.seq)

    def _tell_watchers(self, record: ExperienceRecord, now_s: float) -> Outgoing:
        out: Outgoing = []
        entry = self.shelf.get(record.record_id)
        if entry is None:
            return out
        for client in self._matching.takers(entry):
            self._sessions[client].claim(record.record_id, now_s)
            out += self._deliveries(client, [entry])
        return out

    def _hand_out(self, now_s: float) -> Outgoing:
        """Requests on their way to those who serve them."""
        by_client: dict[bytes, list[Entry]] = {}
        for client, record_id in self._subscriptions.hand_out(now_s):
            entry = self.shelf.get(record_id)
            if entry is not None:
                self._matching.pass_on(entry, self._sessions[client].policy)
                by_client.setdefault(client, []).append(entry)
        return [item for client, entries in by_client.items() for item in self._deliveries(client, entries)]

    def _handle_done(self, session: Session, message: Done, now_s: float) -> Outgoing:
        """End deliveries; a request that its policy has taken over is kept no longer."""
        session.acknowledge(message.record_ids)
        served = [record_id for record_id in message.record_ids if self._subscriptions.is_to(record_id, session.policy)]
        if served:
            self._journal([encode(Done(client=message.client, record_ids=served))])
            self._remove_served(served)
        return self._hand_out(now_s)

    def _remove_served(self, record_ids: Iterable[str]) -> None:
        for record_id in record_ids:
            self.shelf.remove(record_id)

    def _deliveries(self, client: bytes, entries: list[Entry], *, seq: int = 0) -> Outgoing:
        """Deliver messages of bounded size; with a `seq` there is at least one."""
        parts: list[list[Entry]] = [[]]
        part_bytes = 0
        for entry in entries:
            if parts[-1] and part_bytes + entry.payload_bytes > MAX_DELIVER_BYTES:
                parts.append([])
                part_bytes = 0
            parts[-1].append(entry)
            part_bytes += entry.payload_bytes
        if not entries and not seq:
            return []
        return [(client, self._deliver(part, seq, number, len(parts))) for number, part in enumerate(parts, 1)]

    def _deliver(self, entries: list[Entry], seq: int, part: int, parts: int) -> Deliver:
        records = [entry.record for entry in entries]
        ages = [self.versions.age(record) for record in records]
        return Deliver(
            incarnation=self._incarnation, records=records, ages_versions=ages, seq=seq, part=part, parts=parts
        )

    def _barrier_state(self, number: int, missing: list[str]) -> BarrierState:
        return BarrierState(incarnation=self._incarnation, number=number, missing=missing)

    def _refusal(self, record: ExperienceRecord, policy: str) -> str:
        """Why this record is not taken, or ""."""
        if record.source != policy:
            return "foreign"
        if not self._admits(record.source):
            return "too_many_policies"
        if record.record_id in self._remembered_ids or record.record_id in self.shelf:
            return "duplicate"
        if self.versions.is_void(record):
            return "void"
        return "stale" if self.versions.age(record) > self._max_age_versions else ""

    def _count_refusal(self, source: str, reason: str, refused: Counter[str]) -> None:
        refused[reason] += 1
        if source in self._policies:
            self._refused.setdefault(source, Counter())[reason] += 1

    def _hold(self, record: ExperienceRecord, payload_bytes: int) -> None:
        remember(self._remembered_ids, record.record_id, MAX_REMEMBERED_IDS)
        self.shelf.add(record, payload_bytes)
        if isinstance(record, ScoreRecord):
            self._close_request(record)
        elif isinstance(record, ScoreRequestRecord) and record.record_id in self.shelf:
            self._subscriptions.post(record.record_id, (record.scorer, "score_request"))

    def _close_request(self, score: ScoreRecord) -> None:
        request = self.shelf.get(score.request_id)
        if request and isinstance(request.record, ScoreRequestRecord) and request.record.scorer == score.source:
            self.shelf.remove(score.request_id)

    def _note_version(self, message: Announce) -> bool:
        """Take over an announcement and evict what it made stale or void; False when it says nothing new."""
        if not self._admits(message.policy):
            return False
        is_new = self.versions.announce(message.policy, message.version, resumed=message.resumed)
        if is_new:
            if message.resumed:
                self._barriers.reset(message.policy)
                self.shelf.evict_void(message.policy, self.versions.is_void)
            newest = self.versions.newest[message.policy]
            self.shelf.evict_stale(message.policy, before_step=newest.step - self._max_age_versions)
        return is_new

    def _admits(self, policy: str) -> bool:
        """Whether this policy is known or may become so; keeps tables bounded whatever names arrive."""
        if policy not in self._policies and len(self._policies) < MAX_POLICIES:
            self._policies[policy] = None
        return policy in self._policies

    def _policy_shelf(self, policy: str) -> PolicyShelf:
        held = self.shelf.policies.get(policy)
        return PolicyShelf(
            policy=policy,
            newest=self.versions.newest.get(policy),
            prompts=len(held.prompts) if held else 0,
            records=held.kinds.total() if held else 0,
            bytes=held.held_bytes if held else 0,
            put=self._put[policy],
            refused=dict(self._refused.get(policy, {})),
            evicted=dict(held.evicted) if held else {},
            watched_prompts=self._watches.prompts_of(policy),
            kinds={kind: number for kind, number in held.kinds.items() if number} if held else {},
            barrier=self._barriers.reached(policy),
        )
