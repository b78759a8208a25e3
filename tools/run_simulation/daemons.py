"""Simulated daemons: the exchange with its real core and file, the allocator with its real core and count of lives."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from mrl.errors import DiskBroken
from mrl.exchange.core import ExchangeCore, Outgoing
from mrl.exchange.store import DISK_FULL, Store
from mrl.exchange.transaction import Transaction
from mrl.processes.allocator_state import new_allocator_state
from mrl.processes.planning.plan import ProcessSpec
from mrl.processes.unit_allocator import unit_core
from mrl.records.codec import encode
from mrl.records.exchange_messages import PutAck
from mrl.records.leases import unit_request_decoder
from mrl.transport.grants import grant_of
from run_simulation.network import Link
from run_simulation.world import Process

if TYPE_CHECKING:
    from run_simulation.trial import Run

COMMIT_S = 0.01


class ExchangeProcess:
    """The exchange daemon, as `mrl.exchange.daemon` runs it: acknowledgements follow commits, which take time."""

    def __init__(self, run: "Run", process: Process, spec: ProcessSpec) -> None:
        self._run, self._process = run, process
        self.store = Store(run.folder.path / "exchange", run.limits)
        process.on_end.append(lambda _: self.store.close())
        self.core = ExchangeCore(
            run.limits, incarnation=f"{run.world.rng.getrandbits(64):x}", started_s=process.now_s()
        )
        self.core.restore(self.store.contents())
        run.witness.opened(self.store)
        self._server = run.network.listen(process, "exchange", self._on_message)
        run.exchange = self

    @property
    def age_s(self) -> float:
        """Seconds since the daemon began; 0 once it is gone."""
        return 0.0 if self._process.code is not None else self._process.now_s() - self.core.started_s

    def turn(self) -> None:
        """Do the work that is due by time."""
        self._send(self.core.tick(self._process.now_s()))
        self._begin(is_awaited=False)

    def _on_message(self, client: bytes, body: bytes) -> None:
        self._run.witness.put(client, body)
        self._send(self.core.receive(client, body, grant_of(client.decode()), self._process.now_s()))
        self._begin(is_awaited=True)

    def _begin(self, *, is_awaited: bool) -> None:
        transaction = self.core.begin(self._process.now_s(), is_awaited=is_awaited)
        if transaction is not None:
            slow = self._run.world.rng.uniform(0.5, 1.5) * self._run.faults.slow_disk
            self._process.at(COMMIT_S * slow, lambda: self._commit(transaction))

    def _commit(self, transaction: Transaction) -> None:
        disk = self._run.faults.disk
        failure = DISK_FULL if disk == "full" else ""
        if disk != "torn":  # torn: the power failed before the log was written
            failure = failure or self.store.commit(transaction)
            if not failure:
                self._run.witness.committed(transaction)
        if disk in ("torn", "unsure"):
            raise DiskBroken("input/output error")
        self._process.at(COMMIT_S, lambda: self._settle(failure))

    def _settle(self, failure: str) -> None:
        self._send(self.core.settle(failure, self._process.now_s()))
        self._begin(is_awaited=True)

    def _send(self, out: Outgoing) -> None:
        for client, message in out:
            if isinstance(message, PutAck):
                self._run.witness.acknowledged(client, message)
            self._server.send(client, encode(message))


class AllocatorProcess:
    """The allocator, as `mrl.processes.unit_allocator.serve_units` runs it."""

    def __init__(self, run: "Run", process: Process, spec: ProcessSpec) -> None:
        self._process, self._run = process, run
        life = new_allocator_state(run.folder.path / "allocator.json", "key")
        run.witness.note_life(life.number)
        self._core, self._life = unit_core(run.config, life, process.now_s()), life
        self._server = run.network.listen(process, "allocator", self._on_message)
        self._decide_s = 0.0

    def turn(self) -> None:
        """Decide when a period is over, and note the transitions of units."""
        now_s = self._process.now_s()
        if now_s >= self._decide_s:
            self._decide_s = now_s + self._run.config.allocation.period_s
            self._core.tick(now_s)
            self._life.keep(self._core.rule.switch_s)
        for one in self._core.take_log():
            self._run.world.note(f"unit {one.unit} {one.state.value} {one.policy} {one.epoch}: {one.why}")
            self._run.journal.append(one._asdict())

    def _on_message(self, client: bytes, body: bytes) -> None:
        for reply in self._core.handle(unit_request_decoder.decode(body), self._process.now_s()):
            self._server.send(client, encode(reply))


def open_link(
    run: "Run", process: Process, server: str, on_message: Callable[[bytes], object], *, client: str = ""
) -> Link:
    """Open a link of a process; the process calls the link's `turn`."""
    return Link(run.network, process, server, client or process.name, on_message)
