"""One round of one system: its rate, its broker's CPU, and how long acknowledgements take at half of that rate."""

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import NamedTuple

from bench_peers.brokers import Broker
from bench_peers.loads import KINDS
from bench_peers.process import Child, Load


class System(NamedTuple):
    """Something that is measured."""

    title: str
    module: str
    """Of `bench_peers`, with the producer and the consumer."""
    durable: str
    """What an acknowledged record survives."""
    start: Callable[[Path], AbstractContextManager[Broker]]
    acknowledges: bool = True
    missing: str = ""
    """Why it cannot be measured here."""


class Size(NamedTuple):
    """How much is sent in a round."""

    warm_records: dict[str, int]
    records: dict[str, int]
    half_load_s: float
    """Seconds at half load."""


class Figures(NamedTuple):
    """One round of one kind of record."""

    records_per_s: float
    """From the first put to the last commit."""
    broker_us: float
    """CPU of the broker, per record."""
    chain_us: float
    """CPU of producer, broker and consumer together, per record."""
    others: float
    """Share of the machine's cores that other processes took meanwhile."""
    p50_ms: float | None
    """From when a record was due to its acknowledgement, at half load; None when nothing is acknowledged."""
    p99_ms: float | None


class _Phase(NamedTuple):
    """One sending of records."""

    took_s: float
    """From the first put to the last commit."""
    broker_s: float
    """CPU of the broker."""
    clients_s: float
    """CPU of producer and consumer."""
    others: float
    """Share of the machine's cores that other processes took."""
    latencies_s: list[float]
    """p50 and p99 of the acknowledgements, if there are any."""


class Trial:
    """Broker, producer and consumer of one system, all three alive."""

    def __init__(self, broker: Broker, producer: Child, consumer: Child, *, acknowledges: bool) -> None:
        self._broker, self._producer, self._consumer = broker, producer, consumer
        self._acknowledges = acknowledges
        self._num_phases = 0

    def figures(self, kind: str, size: Size) -> Figures:
        """What one kind of record does after some have gone through."""
        self._phase(kind, size.warm_records[kind], 0.0)
        count = size.records[kind]
        found = self._phase(kind, count, 0.0)
        rate = count / found.took_s
        cpu_us = (found.broker_s / count * 1e6, (found.broker_s + found.clients_s) / count * 1e6)
        return Figures(
            rate, *cpu_us, found.others, *self._quantiles_ms(kind, max(1, round(size.half_load_s * rate / 2)), rate / 2)
        )

    def _quantiles_ms(self, kind: str, count: int, rate: float) -> tuple[float | None, float | None]:
        if not self._acknowledges:
            return None, None
        p50_s, p99_s = self._phase(kind, count, rate).latencies_s
        return 1e3 * p50_s, 1e3 * p99_s

    def _phase(self, kind: str, count: int, rate: float) -> _Phase:
        self._num_phases += 1
        phase = {"kind": kind, "name": f"{kind}-{self._num_phases}", "count": count, "rate": rate}
        for child in (self._consumer, self._producer):
            child.tell(phase)
        for child in (self._consumer, self._producer):
            child.answer()
        pids = (self._broker.pid, self._producer.pid, self._consumer.pid)
        before = Load.of(pids)
        for child in (self._consumer, self._producer):
            child.tell("start")
        put, taken = self._producer.answer(), self._consumer.answer()
        after = Load.of(pids)
        return _Phase(
            taken["last_s"] - put["first_s"],
            after.own_s[0] - before.own_s[0],
            put["cpu_s"] + taken["cpu_s"],
            after.others_since(before),
            put["latencies_s"],
        )


def measure(system: System, size: Size, folder: Path | None) -> dict[str, Figures]:
    """One round of a system, its files in a temporary folder below `folder`."""
    with (
        tempfile.TemporaryDirectory(dir=folder) as own,
        system.start(Path(own)) as broker,
        closing(Child("consumer", system.module, broker.settings)) as consumer,
        closing(Child("producer", system.module, broker.settings)) as producer,
    ):
        trial = Trial(broker, producer, consumer, acknowledges=system.acknowledges)
        return {kind: trial.figures(kind, size) for kind in KINDS}
