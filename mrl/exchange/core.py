"""Every decision of the exchange daemon, with no socket, clock or file in sight."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from mrl.errors import RecordError
from mrl.exchange.flows import Flows
from mrl.exchange.sessions import Session, remember
from mrl.exchange.shelf import Entry, Shelf
from mrl.exchange.versions import VersionBook
from mrl.exchange.watches import Watch, Watches
from mrl.records.codec import MAX_MESSAGE_BYTES, decode, encode
from mrl.records.exchange import (
    Announce,
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
    Unwatch,
    Welcome,
    client_message_decoder,
)
from mrl.records.experience import ExperienceRecord

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
        self.shelf = Shelf(per_prompt=per_prompt, budget_bytes=budget_bytes)
        self._incarnation, self._started_s = incarnation, started_s
        self._budget_bytes, self._max_age_versions, self._journal = budget_bytes, max_age_versions, journal
        self._watches = Watches(max_per_client=max_watches_per_client, max_total=max_watches)
        self._flows = Flows()
        self._sessions: dict[bytes, Session] = {}
        self._remembered_ids: dict[str, None] = {}
        self._policies: dict[str, None] = {}
        self._put: Counter[str] = Counter()
        self._refused: dict[str, Counter[str]] = {}
        self._abandoned = 0

    def restore(self, entries: Iterable[ExperienceRecord | Announce]) -> None:
        """Rebuild the memory from what a journal kept, in its order."""
        for entry in entries:
            if isinstance(entry, Announce):
                self._note_version(entry)
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
            case Done():
                if session is not None:
                    session.acknowledge(message.record_ids)
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
            self._watches.forget(client)
            self._abandoned += self._sessions.pop(client).abandoned
        out: Outgoing = []
        for client, session in self._sessions.items():
            entries = map(self.shelf.get, session.overdue(now_s))
            out += self._deliveries(client, [entry for entry in entries if entry is not None])
        return out

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
            flows=self._flows.table(self._policies),
            claims=sum(len(session.claims) for session in self._sessions.values()),
            abandoned=self._abandoned + sum(session.abandoned for session in self._sessions.values()),
            dropped_watches=self._watches.dropped,
        )

    def _welcome(self, *, known: bool) -> Welcome:
        return Welcome(incarnation=self._incarnation, max_put_bytes=MAX_MESSAGE_BYTES, known=known)

    def _handle_hello(self, client: bytes, message: Hello, now_s: float) -> Outgoing:
        self._watches.forget(client)
        if client in self._sessions:
            self._abandoned += self._sessions.pop(client).abandoned
        if self._admits(message.policy):
            self._sessions[client] = Session(message.client, message.policy, now_s)
        return [(client, self._welcome(known=client in self._sessions))]

    def _handle_put(self, client: bytes, session: Session | None, message: Put, now_s: float) -> Outgoing:
        refused: Counter[str] = Counter()
        accepted: dict[str, tuple[ExperienceRecord, bytes]] = {}
        for record in message.records:
            payload = encode(record)
            reason = self._refusal(record, session.policy if session else record.source)
            if not reason and not self.shelf.fits(len(payload)):
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
            out += self._tell_watchers(record, len(payload), now_s)
        return out

    def _ack(self, seq: int, stored: int, refused: Counter[str]) -> PutAck:
        return PutAck(incarnation=self._incarnation, seq=seq, stored=stored, refused=dict(refused))

    def _handle_fetch(self, client: bytes, session: Session | None, message: Fetch, now_s: float) -> Outgoing:
        if session is None:
            return [(client, self._welcome(known=False))]
        is_new = session.is_new_fetch(message.seq)
        prompt_ids = dict.fromkeys(message.prompt_ids)
        if is_new:
            self._flows.ask(session.policy, len(prompt_ids))
        found: list[Entry] = []
        for prompt_id in prompt_ids:
            entries = self._answers(message, session.policy, prompt_id)
            found += entries
            self._settle(client, session, message, prompt_id, entries, is_new=is_new)
        for entry in found:
            session.claim(entry.record.record_id, now_s)
        return self._deliveries(client, found, seq=message.seq)

    def _answers(self, message: Fetch, receiver: str, prompt_id: str) -> list[Entry]:
        """Youngest first, over all other policies."""
        dated = [
            (self.versions.age(entry.record), entry)
            for entry in self.shelf.successes(prompt_id, of_others_than=receiver)
        ]
        fresh = [item for item in dated if _within(item[0], message.max_age_versions)]
        fresh.sort(key=lambda item: (item[0], -item[1].arrival))
        return [entry for _, entry in fresh[: message.limit]]

    def _settle(
        self, client: bytes, session: Session, message: Fetch, prompt_id: str, entries: list[Entry], *, is_new: bool
    ) -> None:
        """Count what one asked prompt brought, and watch it for what is left of the limit."""
        watch = None if is_new else self._watches.get(client, prompt_id)
        sources = {entry.record.source for entry in entries}
        # A repeated Fetch was counted before, except for sources that its watch has not seen.
        counted = set() if is_new else watch.sources if watch is not None else sources
        for source in sources - counted:
            self._flows.hit(source, session.policy)
        for entry in entries:
            age = self.versions.age(entry.record)
            self._flows.deliver(entry.record.source, session.policy, entry.payload_bytes, age)
        left = message.limit - len(entries)
        if not message.watch or left == 0:
            self._watches.remove(client, prompt_id)
        elif watch is None:
            self._watches.add(client, prompt_id, Watch(session.policy, left, message.max_age_versions, sources))
        else:
            watch.sources |= sources

    def _tell_watchers(self, record: ExperienceRecord, payload_bytes: int, now_s: float) -> Outgoing:
        out: Outgoing = []
        age = self.versions.age(record)
        entry = self.shelf.get(record.record_id)
        for client, watch in self._watches.on(record.prompt_id, not_of=record.source):
            if entry is None or not _within(age, watch.max_age_versions):
                continue
            if record.source not in watch.sources:
                watch.sources.add(record.source)
                self._flows.hit(record.source, watch.policy)
            self._flows.deliver(record.source, watch.policy, payload_bytes, age)
            watch.left -= 1
            if watch.left == 0:
                self._watches.remove(client, record.prompt_id)
            self._sessions[client].claim(record.record_id, now_s)
            out += self._deliveries(client, [entry])
        return out

    def _deliveries(self, client: bytes, entries: list[Entry], *, seq: int = 0) -> Outgoing:
        """Deliver messages of bounded size; the last one carries `seq`, and with a `seq` there is at least one."""
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
        return [
            (client, self._deliver(part, seq if number == len(parts) else 0)) for number, part in enumerate(parts, 1)
        ]

    def _deliver(self, entries: list[Entry], seq: int) -> Deliver:
        records = [entry.record for entry in entries]
        ages = [self.versions.age(record) for record in records]
        return Deliver(incarnation=self._incarnation, records=records, ages_versions=ages, seq=seq)

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

    def _note_version(self, message: Announce) -> bool:
        """Take over an announcement and evict what it made stale or void; False when it says nothing new."""
        if not self._admits(message.policy):
            return False
        is_new = self.versions.announce(message.policy, message.version, resumed=message.resumed)
        if is_new:
            if message.resumed:
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
            records=held.num_records if held else 0,
            bytes=held.held_bytes if held else 0,
            put=self._put[policy],
            refused=dict(self._refused.get(policy, {})),
            evicted=dict(held.evicted) if held else {},
            watched_prompts=self._watches.prompts_of(policy),
        )


def _within(age: int, max_age_versions: int | None) -> bool:
    return max_age_versions is None or age <= max_age_versions
