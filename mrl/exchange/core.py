"""Every decision of the exchange daemon, with no socket, clock or file in sight."""

from collections import Counter
from collections.abc import Mapping

from msgspec import structs

from mrl.errors import RecordError
from mrl.exchange.barriers import Barriers
from mrl.exchange.deliveries import Deliveries, Outgoing
from mrl.exchange.entry import Entry
from mrl.exchange.inspection import client_states, oldest_age_versions, peeked
from mrl.exchange.journal import Indexed, stored_of
from mrl.exchange.matching import Matching
from mrl.exchange.memory import Memory, WhenFull
from mrl.exchange.outside import Append, NoSpools, Spools
from mrl.exchange.parking import Parking
from mrl.exchange.postings import Postings
from mrl.exchange.sessions import MAX_SESSIONS, Session, unacknowledged
from mrl.exchange.watches import Watches
from mrl.records.codec import MAX_MESSAGE_BYTES, decode
from mrl.records.exchange_messages import (
    Announce,
    Barrier,
    BarrierState,
    ClientMessage,
    Commit,
    Done,
    Drain,
    Fetch,
    Hello,
    Peek,
    Ping,
    PolicyShelf,
    Put,
    PutAck,
    Stat,
    StatRequest,
    Stream,
    Subscribe,
    Took,
    Unwatch,
    Welcome,
    client_message_decoder,
)
from mrl.transport.grants import Grant

MAX_MOVED_BYTES = 1024 * 1024
TOTAL_WINDOW_BYTES = 24 * 1024 * 1024
"""What all clients may have unacknowledged; as much is taken in: under way to the log, or parked."""
MIN_WINDOW_BYTES = 256 * 1024
MAX_WINDOW_BYTES = 8 * 1024 * 1024


class ExchangeCore:
    """Takes client messages and news of the log, returns what to send to whom.

    `handle` never raises for anything a client sent. Nothing is acknowledged or passed on before the log has it.
    """

    def __init__(
        self,
        *,
        incarnation: str,
        budget_bytes: int,
        per_prompt: int,
        max_age_versions: int,
        when_full: WhenFull = "evict",
        append: Append,
        spools: Spools | None = None,
        started_s: float,
        max_watches_per_client: int = 4096,
        max_watches: int = 65_536,
    ) -> None:
        self.malformed: Counter[str] = Counter()
        """Input that was dropped, by kind; the socket loop adds what never reached the core."""
        self.memory = Memory(
            budget_bytes=budget_bytes, per_prompt=per_prompt, max_age_versions=max_age_versions, when_full=when_full
        )
        self.shelf = self.memory.shelf
        self._intake, self._streams = self.memory.intake, self.memory.streams
        self._subscriptions = self.memory.subscriptions
        self._incarnation, self._started_s = incarnation, started_s
        self._budget_bytes, self._postings = budget_bytes, Postings(append)
        self._watches = Watches(max_per_client=max_watches_per_client, max_total=max_watches)
        self._matching = Matching(self.shelf, self.memory.versions, self._watches)
        self._deliveries = Deliveries(self.shelf, self.memory.versions, incarnation)
        self._barriers = Barriers()
        self._parking = Parking()
        self._spools = spools or NoSpools()
        self._sessions: dict[bytes, Session] = {}
        self._unacknowledged = unacknowledged()
        self._abandoned = 0
        self._is_draining = False

    def receive(self, client: bytes, body: bytes, grant: Grant, now_s: float) -> Outgoing:
        """Decode and handle one message of a client that may be what `grant` says; malformed ones are dropped."""
        try:
            message = decode(body, client_message_decoder)
        except RecordError:
            self.malformed["record"] += 1
            return []
        return self.handle(client, message, grant, now_s)

    def handle(self, client: bytes, message: ClientMessage, grant: Grant, now_s: float) -> Outgoing:
        """Act on one message of `client` (its transport identity) and return the messages to send.

        A client speaks for the policy of its grant and for no other.
        """
        session = self._sessions.get(client)
        if session is not None:
            session.heard_s = now_s
        match message:
            case Put():
                return self._handle_put(client, session, message)
            case Fetch():
                return self._handle_fetch(client, session, message, now_s)
            case Done() if session is not None:
                return self._handle_done(client, session, message, now_s)
            case Subscribe() | Barrier() | Stream() if session is None:
                return [(client, self._welcome())]
            case Subscribe() if session is not None:
                self._subscriptions.subscribe(client, session.policy, message.kinds, now_s)
                return self._hand_out(now_s)
            case Stream() if session is not None:
                self._streams.open(client, session.policy, message, now_s)
                return self._read_on(now_s)
            case Took() if session is not None:
                self._streams.take(session.policy, message.stream, message.upto, now_s)
                return self._read_on(now_s)
            case Commit() if session is not None and message.policy == session.policy:
                # What the log says of its sender is proved by the key.
                commit = structs.replace(message, client=client.decode(errors="replace"))
                if self._streams.commit(commit):
                    self._postings.post_later(commit)
                    return self._unpark()
            case Barrier() if session is not None:
                told = self._barriers.arrive(client, session.policy, message.number, message.members)
                return [(other, self._barrier_state(number, missing)) for other, number, missing in told]
            case Announce() if session is not None and message.policy == session.policy:
                if self.memory.note_version(message):
                    self._postings.post(message)
                    if message.resumed:
                        self._barriers.reset(message.policy)
            case Unwatch():
                for prompt_id in message.prompt_ids:
                    self._watches.remove(client, prompt_id)
            case Hello():
                return self._handle_hello(client, message, grant, now_s)
            case Ping():
                if session is not None:
                    self._barriers.got_on(session.policy, message.progress)
                    if message.has_spool and not self._spools.has(session.name):
                        self._spools.open(session.name)
                return [(client, self._welcome(session))]
            case StatRequest() if grant.role in ("admin", "supervisor"):
                return [(client, self.stat(now_s))]
            case Drain() if grant.role == "admin":
                self._is_draining = message.is_on
                return [(client, self.stat(now_s))]
            case Peek() if grant.role == "admin":
                entry = self.shelf.get(message.record_id)
                return [(client, peeked(entry, self.memory.versions, self._incarnation))]
        return []

    def stored(self, ticket: int, offset: int, failure: str, now_s: float) -> Outgoing:
        """The log has the entries of this ticket, at `offset`; or it does not, for example because of "disk_full"."""
        self._intake.storage = failure
        places = self._postings.settle(ticket, offset)
        verdict = self._intake.settle(ticket)
        if failure:
            return []
        if verdict is None:
            for entry, place in places:
                self.shelf.move(entry.number, offset, place)
            return self._unpark()
        self._intake.note_stored(verdict)
        out: Outgoing = [(verdict.client, self._ack(verdict.seq, verdict.num_records, verdict.refused))]
        for entry, place in places:
            entry.offset, entry.place = offset, place
            self._intake.put[entry.tags.source] += entry.count
            out += self._take_over(entry, now_s)
        return out + self._hand_out(now_s) + self._read_on(now_s) + self._unpark()

    def move_up(self, before_offset: int) -> bool:
        """Write what is held of the log before this offset anew at its end, some at a time; True when that is done."""
        if self._postings.is_moving:
            return False
        moved: list[Entry] = []
        num_bytes = 0
        for entry in self.shelf.on_log_before(before_offset):
            if num_bytes > MAX_MOVED_BYTES:
                break
            moved.append(entry)
            num_bytes += len(entry.body)
        if moved:
            self._postings.post_records(stored_of(moved), moved, is_move=True)
        return not moved

    def tick(self, now_s: float) -> Outgoing:
        """Deliver again what nobody acknowledged, forget clients that fell silent, and write what waited to be."""
        self._postings.flush()
        for client in [client for client, session in self._sessions.items() if session.is_silent(now_s)]:
            self._forget(client)
        out: Outgoing = []
        for client, session in self._sessions.items():
            out += self._deliveries.repeat(client, session.overdue(now_s))
            out += self._deliveries.dispatch(client, session, now_s)
        return out + self._hand_out(now_s) + self._read_on(now_s) + self._unpark()

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
            shelves=self._policy_shelves(),
            flows=self._matching.flows.table(self.memory.policies),
            claims=sum(len(session.claims) for session in self._sessions.values()) + self._subscriptions.num_given,
            abandoned=self._abandoned + sum(session.abandoned for session in self._sessions.values()),
            dropped_watches=self._watches.dropped,
            unserved=self._subscriptions.num_waiting,
            streams=self._streams.states(),
            storage=self._storage,
            unstored=self._intake.num_under_way + self._parking.num_waiting,
            sessions=client_states(self._sessions, self._parking.counts(), now_s),
            parked=self._parking.num_waiting,
        )

    @property
    def _storage(self) -> str:
        """Why nothing is stored at the moment; "" when all is well."""
        return self._intake.storage or ("draining" if self._is_draining else "")

    @property
    def _window_bytes(self) -> int:
        """What every client may have unacknowledged: its part of what all may."""
        if self._storage:
            return 0
        return min(MAX_WINDOW_BYTES, max(MIN_WINDOW_BYTES, TOTAL_WINDOW_BYTES // max(1, len(self._sessions))))

    def _welcome(self, session: Session | None = None) -> Welcome:
        """To a client that is known, or not."""
        name, known = (session.name, True) if session is not None else ("", False)
        return Welcome(
            incarnation=self._incarnation,
            max_put_bytes=MAX_MESSAGE_BYTES,
            window_bytes=self._window_bytes,
            known=known,
            storage=self._storage,
            reads_spool=self._spools.has(name),
        )

    def _handle_hello(self, client: bytes, message: Hello, grant: Grant, now_s: float) -> Outgoing:
        self._forget(client)
        if message.policy != grant.policy:
            self.malformed["impersonation"] += 1
        elif self.memory.admits(message.policy):
            if len(self._sessions) >= MAX_SESSIONS:
                self._forget(min(self._sessions, key=lambda other: self._sessions[other].heard_s))
            # The name that its key has proved: nobody comes back as somebody else, or points at another's spool.
            name = client.decode(errors="replace")
            self._sessions[client] = Session(name, message.policy, now_s, self._unacknowledged)
            self._intake.begin_life(name)
            if message.has_spool:
                self._spools.open(name)
        return [(client, self._welcome(self._sessions.get(client)))]

    def _forget(self, client: bytes) -> None:
        for part in (self._watches, self._subscriptions, self._streams, self._parking, self._barriers):
            part.forget(client)
        if client in self._sessions:
            self._abandoned += self._sessions.pop(client).end()

    def _handle_put(self, client: bytes, session: Session | None, message: Put) -> Outgoing:
        if session is None:
            return [(client, self._welcome())]
        if self._intake.is_under_way(session.name, message.seq):
            return []
        if (num_stored := self._intake.stored.num_stored(session.name, message.seq)) is not None:
            return [(client, self._ack(message.seq, num_stored, {}))]
        if self._is_draining:
            return [(client, self._welcome(session))]
        if self._parking.num_waiting or not self._intake.has_room(message):
            self._parking.park(client, message)
            return []
        return self._judge(client, session, message)

    def _judge(self, client: bytes, session: Session, message: Put) -> Outgoing:
        whole = self._unspooled(session.name, message)
        if whole is None:
            self.malformed["spool"] += 1
            return []
        verdict = self._intake.judge(client, session.name, whole, session.policy)
        if verdict is None:
            return []
        if not verdict.entries:
            return [(client, self._ack(message.seq, 0, verdict.refused))]
        self._intake.send_off(self._postings.post_records(verdict.stored(), verdict.entries), verdict)
        return []

    def _unspooled(self, name: str, message: Put) -> Put | None:
        """The Put with its records; None when they are not where they should be."""
        where = message.spooled
        if where is None:
            return message
        data = self._spools.read(name, where) if where.num_bytes == message.num_bytes else None
        return message.with_records(data) if data is not None else None

    def _unpark(self) -> Outgoing:
        """Go on with what waits for room, in order, as far as there is room now."""
        out: Outgoing = []
        while (waiting := self._parking.first()) and self._intake.has_room(waiting[1]):
            client, message = self._parking.leave()
            out += self._judge(client, self._sessions[client], message)
        return out

    def _ack(self, seq: int, stored: int, refused: Mapping[str, int]) -> PutAck:
        return PutAck(
            incarnation=self._incarnation,
            seq=seq,
            stored=stored,
            refused=dict(refused),
            window_bytes=self._window_bytes,
        )

    def _handle_fetch(self, client: bytes, session: Session | None, message: Fetch, now_s: float) -> Outgoing:
        if session is None:
            return [(client, self._welcome())]
        if new := self.memory.index(message.kinds):
            self._postings.post(Indexed(kinds=new))
        found = self._matching.answer(client, session.policy, message, is_new=session.is_new_fetch(message.seq))
        return self._deliveries.give(client, session, found, now_s, seq=message.seq)

    def _take_over(self, entry: Entry, now_s: float) -> Outgoing:
        """Hold what the log has by now, and pass it on to those who wait for it."""
        # Somebody may have begun to ask for records of this type while the pack was under way.
        is_late = not entry.record_id and entry.tags.type in self.shelf.indexed
        entries = self.memory.singles(entry) if is_late else [entry]
        out: Outgoing = []
        for one in entries:
            self.memory.hold(one)
            if one.record_id and self.shelf.holds(one.number):
                for client in self._matching.takers(one):
                    out += self._deliveries.give(client, self._sessions[client], [one], now_s)
        return out

    def _hand_out(self, now_s: float) -> Outgoing:
        """Requests on their way to those who serve them."""
        by_client: dict[bytes, list[str]] = {}
        for client, record_id in self._subscriptions.hand_out(now_s):
            entry = self.shelf.get(record_id)
            if entry is not None:
                self._matching.pass_on(entry, self._sessions[client].policy)
                by_client.setdefault(client, []).append(record_id)
        return [item for client, ids in by_client.items() for item in self._deliveries.repeat(client, ids)]

    def _read_on(self, now_s: float) -> Outgoing:
        """The next batches of all streams."""
        return [(batch.client, self._deliveries.batch(batch)) for batch in self._streams.batches(now_s)]

    def _handle_done(self, client: bytes, session: Session, message: Done, now_s: float) -> Outgoing:
        """End deliveries; a request that its policy has taken over is kept no longer."""
        session.acknowledge(message.record_ids)
        served = [record_id for record_id in message.record_ids if self._subscriptions.is_to(record_id, session.policy)]
        if served:
            self._postings.post(Done(client=message.client, record_ids=served))
            self.memory.remove_served(served)
        return self._deliveries.dispatch(client, session, now_s) + self._hand_out(now_s)

    def _barrier_state(self, number: int, missing: list[str]) -> BarrierState:
        progress = self._barriers.progress(missing)
        return BarrierState(incarnation=self._incarnation, number=number, missing=missing, progress=progress)

    def _policy_shelves(self) -> list[PolicyShelf]:
        watched = self._watches.prompts_by_policy()
        return [self._policy_shelf(policy, watched[policy]) for policy in sorted(self.memory.policies)]

    def _policy_shelf(self, policy: str, watched_prompts: int) -> PolicyShelf:
        held = self.shelf.policies.get(policy)
        return PolicyShelf(
            policy=policy,
            newest=self.memory.versions.newest.get(policy),
            prompts=held.num_prompts if held else 0,
            records=held.kinds.total() if held else 0,
            bytes=held.held_bytes if held else 0,
            put=self._intake.put[policy],
            refused=dict(self._intake.refused.get(policy, {})),
            evicted=dict(held.evicted) if held else {},
            watched_prompts=watched_prompts,
            kinds={kind: number for kind, number in held.kinds.items() if number} if held else {},
            barrier=self._barriers.reached(policy),
            oldest_age_versions=oldest_age_versions(held, self.memory.versions.newest.get(policy)),
        )
