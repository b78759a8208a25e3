"""The exchange daemon's core: every decision, with no socket, clock or file."""

from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from mrl.errors import RecordError
from mrl.exchange.barriers import Barriers
from mrl.exchange.contents import Contents
from mrl.exchange.exchange_stats import ExchangeStats, client_states
from mrl.exchange.limits import Limits
from mrl.exchange.record_index import Entry, RecordIndex
from mrl.exchange.record_intake import RecordIntake
from mrl.exchange.sessions import Allowance, Session, Shipment, shipments_of
from mrl.exchange.subscriptions import Subscriptions
from mrl.exchange.transaction import Judged, Transaction
from mrl.exchange.versions import VersionTracker
from mrl.exchange.watches import Watches
from mrl.records.codec import decode
from mrl.records.exchange_messages import (
    Announce,
    Barrier,
    BarrierState,
    ClientMessage,
    DaemonMessage,
    Deliver,
    Done,
    Fetch,
    Hello,
    Later,
    Ping,
    Put,
    PutAck,
    Stat,
    StatRequest,
    Subscribe,
    Unwatch,
    Welcome,
    client_message_decoder,
)
from mrl.transport.grants import Grant

LOOKING_ROLES = ("admin", "supervisor")
"""Roles whose key may ask for the daemon's account."""

Outgoing = list[tuple[bytes, DaemonMessage]]
"""Messages to send: (transport identity of the client, message)."""


class ExchangeCore:
    """Takes client messages and results of commits; returns the messages to send, and the next transaction to commit.

    `handle` never raises for anything a client sent. Nothing is acknowledged or passed on before it is committed.
    """

    def __init__(self, limits: Limits, *, incarnation: str, started_s: float) -> None:
        self.malformed: Counter[str] = Counter()
        """Input that was dropped, by kind. The daemon adds input that never reached the core."""
        self.limits, self.incarnation, self.started_s = limits, incarnation, started_s
        self.versions = VersionTracker()
        self.subscriptions = Subscriptions()
        self.index = RecordIndex(limits, self._on_removal)
        self.intake = RecordIntake(limits, self.index, self.versions)
        self.watches = Watches(limits, self.index, self.versions)
        self.barriers = Barriers()
        self.sessions: dict[bytes, Session] = {}
        self.policies: dict[str, None] = {}
        self._account = ExchangeStats(self.index, self.versions, self.watches, self.barriers)
        self._abandoned = 0
        self._allowance = Allowance()
        self._last_delivery = 0
        self._handlers: dict[type, Callable[[bytes, Session, ClientMessage, float], Outgoing]] = {
            kind: getattr(self, f"_on_{kind.__name__.lower()}")
            for kind in (Announce, Barrier, Done, Fetch, Ping, Put, Subscribe, Unwatch)
        }

    def restore(self, contents: Contents) -> None:
        """Take in the contents of a file. Call this before anything else."""
        self.intake.last_number = contents.last_number
        self.intake.remember(contents.removed_ids)
        self._account.note(contents.counts)
        for announcement in contents.announcements:
            if self._admits(announcement.policy):
                self.versions.announce(announcement.policy, announcement.version, resumed=announcement.resumed)
        for entry in contents.entries:
            if self._admits(entry.tags.source):
                self._hold(entry)

    def receive(self, client: bytes, body: bytes, grant: Grant, now_s: float) -> Outgoing:
        """Decode and handle one message of a client that holds `grant`; a malformed message is counted and dropped."""
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
        if isinstance(message, StatRequest):
            return [(client, self.stat(now_s))] if grant.role in LOOKING_ROLES else []
        if isinstance(message, Hello):
            return self._on_hello(client, message, grant, now_s)
        session = self.sessions.get(client)
        if session is None:
            return [(client, self._welcome(known=False))]
        session.heard_s = now_s
        return self._handlers[type(message)](client, session, message, now_s)

    def begin(self, now_s: float, *, is_awaited: bool) -> Transaction | None:
        """Return the next transaction to commit, if any; call `settle` with its result.

        With `is_awaited`, only a transaction for which a client waits is returned.
        """
        return self.intake.begin(now_s, is_awaited=is_awaited)

    def settle(self, failure: str, now_s: float) -> Outgoing:
        """Handle the result of the transaction that `begin` returned, and return the messages to send.

        `failure` says why it was not committed, for example "disk_full"; it is empty for a committed transaction.
        """
        done, failed = self.intake.settle(failure, now_s)
        out: Outgoing = [(put.client, self._later(put.seq, failure)) for put in failed]
        self._account.note(done.counts())
        out += [(client, self._ack(puts)) for client, puts in grouped(done.puts).items()]
        newcomers: dict[bytes, list[Entry]] = {}
        held = [entry for entry in done.inserts if self._hold(entry)]
        # Of records that came together on a prompt, only those that are still held are passed on.
        for entry in self.index.numbered(entry.number for entry in held):
            for client in self.watches.takers(entry):
                newcomers.setdefault(client, []).append(entry)
        for client, entries in newcomers.items():
            out += self._give(client, self.sessions[client], entries, now_s)
        return out + self._hand_out(now_s)

    def tick(self, now_s: float) -> Outgoing:
        """Repeat unacknowledged deliveries and forget silent clients; return the messages to send."""
        for client in [client for client, session in self.sessions.items() if session.is_silent(now_s)]:
            self._forget(client)
        out: Outgoing = []
        for client, session in self.sessions.items():
            for delivery, shipment in session.overdue(now_s):
                out.append((client, self._deliver(shipment, delivery)))
            out += self._dispatch(client, session, now_s)
        return out + self._hand_out(now_s)

    def stat(self, now_s: float) -> Stat:
        """Return the daemon's account of itself; the daemon fills in what file and socket count."""
        sessions = self.sessions.values()
        return Stat(
            incarnation=self.incarnation,
            uptime_s=now_s - self.started_s,
            budget_bytes=self.limits.budget_bytes,
            used_bytes=self.index.used_bytes,
            clients=sorted(session.name for session in sessions),
            malformed=dict(self.malformed),
            policies=self._account.policies(self.policies),
            flows=self.watches.flows.table(self.policies),
            unacknowledged=sum(session.num_unacknowledged for session in sessions) + self.subscriptions.num_given,
            abandoned=self._abandoned + sum(session.abandoned for session in sessions),
            dropped_watches=self.watches.num_dropped,
            unserved=self.subscriptions.num_waiting,
            storage=self.intake.storage,
            unstored=self.intake.num_unstored,
            later=self.intake.num_later,
            sessions=client_states(self.sessions, now_s),
        )

    def _on_removal(self, entry: Entry, reason: str) -> None:
        self.intake.note_removal(entry, reason)
        self.subscriptions.drop(entry.record_id)

    def _admits(self, policy: str) -> bool:
        """Return whether a policy is known; admit a new one if there is room. So tables stay bounded."""
        if policy not in self.policies and len(self.policies) < self.limits.policies:
            self.policies[policy] = None
        return policy in self.policies

    def _hold(self, entry: Entry) -> bool:
        """Add a record of the file to the index; return whether it stayed."""
        tags = entry.tags
        if not self.index.add(entry):
            return False
        if fault := self.intake.fault_of_age(tags):
            self.index.remove(entry, fault)
            return False
        if tags.type == "score_request":
            self.subscriptions.post(tags.record_id, (tags.scorer, "score_request"))
        elif tags.type == "score":
            request = self.index.get(tags.request_id)
            if request is not None and request.tags.scorer == tags.source:
                self.index.remove(request, "served")
        return True

    # Handlers of client messages.

    def _on_hello(self, client: bytes, message: Hello, grant: Grant, now_s: float) -> Outgoing:
        self._forget(client)
        if message.policy != grant.policy:
            self.malformed["impersonation"] += 1
        elif self._admits(message.policy):
            if len(self.sessions) >= self.limits.clients:
                self._forget(min(self.sessions, key=lambda other: self.sessions[other].heard_s))
            # The name is the transport identity, which the key has proved: nobody comes back under another name.
            name = client.decode(errors="replace")
            self.sessions[client] = Session(name, message.policy, now_s, self.limits, self._allowance)
        return [(client, self._welcome(known=client in self.sessions))]

    def _on_ping(self, client: bytes, session: Session, message: Ping, now_s: float) -> Outgoing:
        self.barriers.note_progress(session.policy, message.progress)
        session.note_room(is_full=message.is_full)
        return [(client, self._welcome(known=True)), *self._dispatch(client, session, now_s)]

    def _on_put(self, client: bytes, session: Session, message: Put, now_s: float) -> Outgoing:
        reason = self.intake.take(client, session.policy, message, now_s)
        return [(client, self._later(message.seq, reason))] if reason else []

    def _on_announce(self, client: bytes, session: Session, message: Announce, now_s: float) -> Outgoing:
        if message.policy != session.policy:
            return []
        if self.versions.announce(message.policy, message.version, resumed=message.resumed):
            self.intake.note_announcement(message)
            if message.resumed:
                self.index.remove_void(message.policy, self.versions.is_void)
                self.barriers.reset(message.policy)
            newest_step = self.versions.newest[message.policy].step
            self.index.remove_stale(message.policy, before_step=newest_step - self.limits.max_age_versions)
        return []

    def _on_fetch(self, client: bytes, session: Session, message: Fetch, now_s: float) -> Outgoing:
        is_new = session.is_new_fetch(message.seq)
        found = self.watches.answer(client, session.policy, message, is_new=is_new)
        return self._give(client, session, found, now_s, seq=message.seq)

    def _on_unwatch(self, client: bytes, session: Session, message: Unwatch, now_s: float) -> Outgoing:
        for prompt_id in message.prompt_ids:
            self.watches.remove(client, prompt_id)
        return []

    def _on_subscribe(self, client: bytes, session: Session, message: Subscribe, now_s: float) -> Outgoing:
        self.subscriptions.subscribe(client, session.policy, message.kinds, now_s)
        return self._hand_out(now_s)

    def _on_done(self, client: bytes, session: Session, message: Done, now_s: float) -> Outgoing:
        """End deliveries, and remove requests that the client's policy has taken over."""
        session.acknowledge(message.deliveries)
        for record_id in message.requests:
            entry = self.index.get(record_id)
            if entry is not None and self.subscriptions.is_to(record_id, session.policy):
                self.index.remove(entry, "served")
        return self._dispatch(client, session, now_s) + self._hand_out(now_s)

    def _on_barrier(self, client: bytes, session: Session, message: Barrier, now_s: float) -> Outgoing:
        # The policy is the session's, which the key has proved, whatever the message says.
        told = self.barriers.arrive(client, session.policy, message.number, message.members)
        return [
            (other, BarrierState(incarnation=self.incarnation, number=number, missing=missing, progress=progress))
            for other, number, missing in told
            for progress in [self.barriers.progress(missing)]
        ]

    def _forget(self, client: bytes) -> None:
        self.watches.forget(client)
        self.subscriptions.forget(client)
        self.barriers.forget(client)
        if client in self.sessions:
            self._abandoned += self.sessions.pop(client).end()

    # Messages to clients.

    def _welcome(self, *, known: bool) -> Welcome:
        return Welcome(
            incarnation=self.incarnation, window_bytes=self._window_bytes, known=known, storage=self.intake.storage
        )

    def _ack(self, puts: list[Judged]) -> PutAck:
        """Return the answer to all Puts of one client that were committed together."""
        refused: Counter[str] = Counter()
        for put in puts:
            refused.update(put.refused)
        return PutAck(
            incarnation=self.incarnation,
            seqs=[put.seq for put in puts],
            stored=sum(put.num_stored for put in puts),
            refused=dict(refused),
            window_bytes=self._window_bytes,
        )

    def _later(self, seq: int, reason: str) -> Later:
        return Later(incarnation=self.incarnation, seq=seq, storage=reason)

    @property
    def _window_bytes(self) -> int:
        """Bytes of Puts that every client may have unacknowledged; 0, which allows one Put, while nothing is stored."""
        return 0 if self.intake.storage else self.limits.window_of(len(self.sessions))

    def _give(self, client: bytes, session: Session, entries: list[Entry], now_s: float, *, seq: int = 0) -> Outgoing:
        """Queue entries for a client, as the answer to its Fetch `seq` if that is not 0; return deliveries due now."""
        session.queue(shipments_of(entries, self.limits.deliver_bytes, seq=seq))
        return self._dispatch(client, session, now_s)

    def _dispatch(self, client: bytes, session: Session, now_s: float) -> Outgoing:
        """Return the deliveries that wait for the client, as far as it has acknowledged earlier ones."""
        out: Outgoing = []
        while shipment := session.next_shipment(self._last_delivery + 1, now_s):
            self._last_delivery += 1
            out.append((client, self._deliver(shipment, self._last_delivery)))
        return out

    def _hand_out(self, now_s: float) -> Outgoing:
        """Return deliveries of waiting requests to the clients that serve them."""
        by_client: dict[bytes, list[Entry]] = {}
        for client, record_id in self.subscriptions.hand_out(now_s):
            entry = self.index.get(record_id)
            if entry is not None:
                self.watches.pass_on(entry, self.sessions[client].policy)
                by_client.setdefault(client, []).append(entry)
        return [
            (client, self._deliver(shipment, 0))
            for client, entries in by_client.items()
            for shipment in shipments_of(entries, self.limits.deliver_bytes)
        ]

    def _deliver(self, shipment: Shipment, delivery: int) -> Deliver:
        """Return the message of a shipment: its records that are still held, or none of them."""
        entries = self.index.numbered(shipment.numbers)
        return Deliver(
            incarnation=self.incarnation,
            records=raws_of(entries),
            ages_versions=[self.versions.age(entry.tags) for entry in entries],
            delivery=delivery,
            seq=shipment.seq,
            part=shipment.part,
            parts=shipment.parts,
        )


def grouped(puts: Iterable[Judged]) -> dict[bytes, list[Judged]]:
    """Return client -> its Puts, in their order."""
    by_client: dict[bytes, list[Judged]] = {}
    for put in puts:
        by_client.setdefault(put.client, []).append(put)
    return by_client


def raws_of(entries: Iterable[Entry]) -> list[msgspec.Raw]:
    """Return encoded records as parts of a message."""
    return [msgspec.Raw(entry.body) for entry in entries]
