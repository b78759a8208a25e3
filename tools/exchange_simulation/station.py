"""A simulated daemon: the real `ExchangeCore`, with a processor, a disk and a network that are numbers.

One processor serves what arrives in its order. A message costs a fixed time and one per record, prompt or member that
it carries, in and out; the same holds for news of the disk, and every 50 ms for the core's tick. The disk commits in
groups: what was appended while it was busy is one write with one wait.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from exchange_simulation.events import Events
from mrl.exchange.core import ExchangeCore
from mrl.exchange.daemon import TICK_S
from mrl.exchange.deliveries import Outgoing
from mrl.exchange.log.writer import MAX_GROUP_BYTES
from mrl.records.codec import Buffer, decode, encode
from mrl.records.exchange_messages import (
    Batch,
    ClientMessage,
    DaemonMessage,
    Deliver,
    Fetch,
    Put,
    client_message_decoder,
)
from mrl.transport.grants import Grant, grant_of

PER_PROMPT = 4
MEASURE_EVERY = 17
MAX_AGE_VERSIONS = 200
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Costs:
    """What things take. Processor times are of one core, everything that a daemon does on it included."""

    message_us: float = 12.0
    """A message in or out: socket, CURVE, codec."""
    put_us: float = 24.0
    """A record taken, to its place on the log."""
    deliver_us: float = 12.0
    """A record sent to one receiver."""
    ask_us: float = 60.0
    """A prompt looked up for one who asks."""
    tick_session_us: float = 1.5
    """A client looked after, every 50 ms."""
    sync_ms: float = 0.5
    """One wait for the disk."""
    disk_mib_s: float = 400.0
    local_ms: float = 0.1
    """From one process to another of the same site."""
    remote_ms: float = 40.0
    """From one site to another."""

    def delay_s(self, *, is_remote: bool) -> float:
        """How long a message is on its way."""
        return (self.remote_ms if is_remote else self.local_ms) / 1e3

    def of_message(self, message: ClientMessage | DaemonMessage) -> float:
        """Microseconds of the processor for one message, in or out."""
        match message:
            case Put():
                return self.message_us + self.put_us * records_in(message)
            case Deliver():
                return self.message_us + self.deliver_us * len(message.records)
            case Batch():
                return self.message_us + self.deliver_us * sum(parcel.count for parcel in message.parcels)
            case Fetch():
                return self.message_us + self.ask_us * len(message.prompt_ids)
            case _:
                return self.message_us


def records_in(message: Put) -> int:
    """How many records a Put carries: all that the simulation knows of its form."""
    return message.num_records


Hear = Callable[[bytes, bool], object]
"""Takes an encoded message, and whether it brings records."""


@dataclass(frozen=True, slots=True)
class _Arrival:
    """Something for the processor: what to do, and the microseconds of it beside those of the answers."""

    act: Callable[[], Outgoing]
    cost_us: float


@dataclass(slots=True)
class _Line:
    """Where a client's messages come out."""

    grant: Grant
    delay_s: float
    hear: Hear
    is_remote: bool


class Station:
    """One daemon of one site."""

    def __init__(self, events: Events, costs: Costs, *, name: str, budget_bytes: int) -> None:
        self.busy_s = 0.0
        """Of its processor."""
        self.num_bytes_remote = 0
        """Between this daemon and other sites, both ways."""
        self.held_bytes: list[int] = []
        """What its records weigh, as its budget counts it, ten times a second."""
        self.core_s: Counter[str] = Counter()
        """Processor time that the core really took here, by what it did."""
        self.core_items: Counter[str] = Counter()
        """How many records, prompts or messages that was."""
        self._num_works = 0
        self._events, self._costs = events, costs
        self._lines: dict[bytes, _Line] = {}
        self._inbox: deque[_Arrival] = deque()
        self._is_serving = False
        self._appended: list[tuple[int, int]] = []
        self._is_committing = False
        self._log_bytes = 0
        self.core = ExchangeCore(
            incarnation=name,
            budget_bytes=budget_bytes,
            per_prompt=PER_PROMPT,
            max_age_versions=MAX_AGE_VERSIONS,
            append=self._append,
            started_s=0.0,
        )
        events.every(TICK_S, self._tick, first_s=TICK_S)
        events.every(0.1, lambda: self.held_bytes.append(self.core.shelf.used_bytes))

    @property
    def behind_s(self) -> float:
        """What waits for the processor, in seconds of its work, answers not counted."""
        return sum(arrival.cost_us for arrival in self._inbox) / 1e6

    def stat_ms(self) -> float:
        """Processor time of the daemon's account of itself, encoded, on this machine."""
        began_s = time.process_time()
        msgspec.msgpack.encode(self.core.stat(self._events.now_s))
        return 1e3 * (time.process_time() - began_s)

    def clear(self) -> None:
        """Count anew from here on."""
        self.busy_s, self.num_bytes_remote = 0.0, 0
        self.held_bytes.clear()
        self.core_s.clear()
        self.core_items.clear()

    def connect(self, client: str, hear: Hear, *, is_remote: bool) -> Callable[[bytes], bool]:
        """A line for this client; returns how it posts."""
        delay_s = self._costs.delay_s(is_remote=is_remote)
        line = self._lines[client.encode()] = _Line(grant_of(client), delay_s, hear, is_remote)

        def post(body: bytes) -> bool:
            self.num_bytes_remote += len(body) * is_remote
            self._events.after(delay_s, partial(self._receive, client.encode(), line, body))
            return True

        return post

    def _receive(self, client: bytes, line: _Line, body: bytes) -> None:
        message = decode(body, client_message_decoder)
        kind, num_items = _work_of(message)

        def act() -> Outgoing:
            handle = partial(self.core.handle, client, message, line.grant, self._events.now_s)
            return self._measured(handle, kind, num_items)

        self._serve(_Arrival(act, self._cost_us(message)))

    def _measured(self, work: Callable[[], Outgoing], kind: str, num_items: int) -> Outgoing:
        """Do it, and now and then look how long it takes: to look takes long too."""
        self._num_works += 1
        if self._num_works % MEASURE_EVERY:
            return work()
        began_s = time.process_time()
        out = work()
        self.core_s[kind] += time.process_time() - began_s
        self.core_items[kind] += num_items
        return out

    def _tick(self) -> None:
        cost_us = self._costs.message_us + self._costs.tick_session_us * len(self._lines)
        self._serve(_Arrival(lambda: self.core.tick(self._events.now_s), cost_us))

    def _serve(self, arrival: _Arrival) -> None:
        self._inbox.append(arrival)
        if not self._is_serving:
            self._is_serving = True
            self._next()

    def _next(self) -> None:
        if not self._inbox:
            self._is_serving = False
            return
        arrival = self._inbox.popleft()
        self._work(arrival.cost_us, partial(self._act, arrival))

    def _act(self, arrival: _Arrival) -> None:
        out = arrival.act()
        self._work(sum(self._cost_us(message) for _, message in out), partial(self._done, out))

    def _work(self, cost_us: float, then: Callable[[], object]) -> None:
        self.busy_s += cost_us / 1e6
        self._events.after(cost_us / 1e6, then)

    def _done(self, out: Outgoing) -> None:
        for client, message in out:
            line, body = self._lines[client], encode(message)
            self.num_bytes_remote += len(body) * line.is_remote
            brings_records = isinstance(message, Deliver | Batch)
            self._events.after(line.delay_s, partial(line.hear, body, brings_records))
        self._next()

    def _cost_us(self, message: ClientMessage | DaemonMessage) -> float:
        return self._costs.of_message(message)

    def _append(self, ticket: int, entry: Sequence[Buffer], *, is_move: bool) -> None:
        self._appended.append((ticket, sum(map(len, entry))))
        if not self._is_committing:
            self._is_committing = True
            self._events.after(0.0, self._commit)

    def _commit(self) -> None:
        """Write what waits, as far as it is one group, and look again when that is on the disk."""
        group: list[int] = []
        num_bytes = 0
        while self._appended and num_bytes <= MAX_GROUP_BYTES:
            ticket, length = self._appended.pop(0)
            group.append(ticket)
            num_bytes += length
        if not group:
            self._is_committing = False
            return
        self._log_bytes += num_bytes
        took_s = self._costs.sync_ms / 1e3 + num_bytes / (self._costs.disk_mib_s * MIB)
        self._events.after(took_s, partial(self._committed, group))

    def _committed(self, group: list[int]) -> None:
        for ticket in group:
            self._serve(_Arrival(partial(self._stored, ticket), 0.0))
        self._commit()

    def _stored(self, ticket: int) -> Outgoing:
        stored = partial(self.core.stored, ticket, self._log_bytes, "", self._events.now_s)
        return self._measured(stored, "commit of a Put", 1)


def _work_of(message: ClientMessage) -> tuple[str, int]:
    """What a message is to the core, and how much of it."""
    match message:
        case Put():
            return "record put", records_in(message)
        case Fetch():
            return "prompt asked", len(message.prompt_ids)
        case _:
            return "other message", 1
