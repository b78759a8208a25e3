"""A round of one system: its rate, its broker's CPU, and the time of acknowledgements at half of that rate."""

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import NamedTuple

from bench_peers.brokers import Broker
from bench_peers.loads import SINGLE_KINDS
from bench_peers.process import Child, Load


class System(NamedTuple):
    """A system that the benchmark measures."""

    title: str
    module: str
    """Module of `bench_peers` with the producer and the consumer."""
    durable: str
    """Failures that an acknowledged record survives, in words."""
    start: Callable[[Path], AbstractContextManager[Broker]]
    missing: str = ""
    """Reason why the system cannot be measured on this machine; "" when it can."""


class Size(NamedTuple):
    """Number of records and seconds of a round."""

    warm_records: dict[str, int]
    records: dict[str, int]
    half_load_s: float
    """Seconds of sending at half of the measured rate."""
    load_s: float
    """Seconds of sending at the rate of the load that has to be carried."""
    load_per_s: float
    """Records per second of the load that has to be carried: rollouts and outcomes in turn."""


class Figures(NamedTuple):
    """Figures of one phase: at full speed, with acknowledgements at half of that rate; or at the load to be carried."""

    records_per_s: float
    """Rate from the first put until the last record is decoded."""
    broker_us: float
    """CPU microseconds of the broker, per record."""
    chain_us: float
    """CPU microseconds of producer, broker and consumer together, per record."""
    others: float
    """Share of the machine's cores that other processes took meanwhile."""
    p50_ms: float
    """Median time from when a record was due to its acknowledgement; the field below is its 99th percentile."""
    p99_ms: float
    resident_bytes: int
    """Highest resident memory of the broker so far."""

    @property
    def broker_cores(self) -> float:
        """Cores that the broker kept busy."""
        return self.broker_us * self.records_per_s / 1e6


class _Phase(NamedTuple):
    """Measurements of one sending of records."""

    took_s: float
    """Seconds from the first put until the last record is decoded."""
    broker_s: float
    """CPU seconds of the broker."""
    clients_s: float
    """CPU seconds of producer and consumer."""
    others: float
    """Share of the machine's cores that other processes took."""
    latencies_s: list[float]
    """p50 and p99 of the acknowledgements if the sending was paced, else empty."""


class Trial:
    """Broker, producer and consumer of one system, all three alive."""

    def __init__(self, broker: Broker, producer: Child, consumer: Child) -> None:
        self._broker, self._producer, self._consumer = broker, producer, consumer
        self._num_phases = 0

    def flood(self, kind: str, size: Size) -> Figures:
        """Measure one kind of record at full speed, after some records have gone through."""
        self._phase(kind, size.warm_records[kind], 0.0)
        count = size.records[kind]
        found = self._phase(kind, count, 0.0)
        rate = count / found.took_s
        half = self._phase(kind, max(1, round(size.half_load_s * rate / 2)), rate / 2)
        return self._figures(found, count, half.latencies_s)

    def load(self, size: Size) -> Figures:
        """Measure the load that has to be carried."""
        count = round(size.load_s * size.load_per_s)
        found = self._phase("both", count, size.load_per_s)
        return self._figures(found, count, found.latencies_s)

    def _figures(self, found: _Phase, count: int, latencies_s: list[float]) -> Figures:
        p50_ms, p99_ms = (1e3 * value for value in latencies_s)
        return Figures(
            records_per_s=count / found.took_s,
            broker_us=found.broker_s / count * 1e6,
            chain_us=(found.broker_s + found.clients_s) / count * 1e6,
            others=found.others,
            p50_ms=p50_ms,
            p99_ms=p99_ms,
            resident_bytes=peak_bytes(self._broker.pid),
        )

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


def peak_bytes(pid: int) -> int:
    """Highest resident memory that a process ever had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def measure(system: System, size: Size, folder: Path | None) -> dict[str, Figures]:
    """Run one round of a system, files in a temporary folder below `folder`: each kind alone, then both as the load."""
    with (
        tempfile.TemporaryDirectory(dir=folder) as own,
        system.start(Path(own)) as broker,
        closing(Child("consumer", system.module, broker.settings)) as consumer,
        closing(Child("producer", system.module, broker.settings)) as producer,
    ):
        trial = Trial(broker, producer, consumer)
        found = {kind: trial.flood(kind, size) for kind in SINGLE_KINDS}
        return found | {"both": trial.load(size)}
