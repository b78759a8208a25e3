"""Checks of the laws that must hold, at every event. Simulated processes report to it, and nothing that it judges."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from check_history import lease_faults, store_faults

from mrl.exchange.limits import Limits
from mrl.exchange.store import FILE, Store
from mrl.exchange.transaction import Transaction
from mrl.records.codec import decode
from mrl.records.exchange_messages import Put, PutAck, client_message_decoder
from mrl.records.rollouts import ScoredGroup
from mrl.records.tags import tags_of
from mrl.records.version import Version
from run_simulation.world import Process, Violated

if TYPE_CHECKING:
    from mrl.exchange.client import ExchangeClient
    from run_simulation.policies import LearnerProcess
    from run_simulation.trial import Run

Failed = tuple[str, Version]
"""A prompt on which a whole group failed, and the newest version that sampled the group."""
PATIENCE_S = 6.0
"""Seconds within which everything that was asked is answered in quiet times."""


@dataclass
class Lineage:
    """Training history of one policy, without the steps that a resume took back."""

    life: int = -1
    published: dict[Version, int] = field(default_factory=dict)
    """Every version ever announced -> the learner's life that announced it."""
    valid: set[Version] = field(default_factory=set)
    positions: dict[int, int] = field(default_factory=dict)
    """Position in the order of prompts -> step that trained it."""
    failures: list[tuple[Failed, int]] = field(default_factory=list)
    """Groups that failed as a whole, and the steps that trained them."""
    rescues: list[tuple[Failed, int]] = field(default_factory=list)
    """Failures that a peer's success answered, and the steps that trained the rescues."""


class Witness:
    """Judge of a simulated run, which raises Violated at the first law that is broken."""

    def __init__(self, run: "Run") -> None:
        self.counts = Counter[str]()
        self._run = run
        self._ids: dict[tuple[bytes, int], list[str]] = {}
        self._committed: dict[str, float] = {}
        """Record id -> time of its commit."""
        self._acknowledged: set[str] = set()
        self._lineages: dict[str, Lineage] = {}
        self._last_life = 0
        self._leases: dict[str, tuple[int, str]] = {}
        """Unit -> newest lease under which an engine was started: epoch and engine."""
        self._nodes: dict[str, Process] = {}
        """Unit -> supervisor that started this engine."""

    def lineage(self, policy: str) -> Lineage:
        """Training history of a policy."""
        return self._lineages.setdefault(policy, Lineage())

    # Nothing acknowledged is lost.

    def put(self, client: bytes, body: bytes) -> None:
        """Note the records of a client's Put."""
        message = decode(body, client_message_decoder)
        if isinstance(message, Put):
            tags = (tags_of(memoryview(raw)) for raw in message.records)
            self._ids[client, message.seq] = [one.record_id for one in tags if one]

    def committed(self, transaction: Transaction) -> None:
        """Check that a transaction that is in the file stores no record twice, and note its records."""
        ids = [entry.record_id for entry in transaction.inserts]
        self._require(len(set(ids)) == len(ids) and not self._committed.keys() & set(ids), "a record is stored twice")
        self._committed |= dict.fromkeys(ids, self._run.world.now_s)

    def age_s(self, record_id: str) -> float:
        """Seconds since a record was committed."""
        return self._run.world.now_s - self._committed[record_id]

    def acknowledged(self, client: bytes, message: PutAck) -> None:
        """Check an answer to Puts: every record that it does not refuse is in the file by now."""
        ids = [record_id for seq in message.seqs for record_id in self._ids.get((client, seq), [])]
        lacking = [record_id for record_id in ids if record_id not in self._committed]
        num_refused = sum(number for reason, number in message.refused.items() if reason != "duplicate")
        self._require(len(lacking) <= num_refused, f"acknowledged before it was stored: {lacking}")
        self._acknowledged.update(set(ids) - set(lacking))
        self.counts["acknowledged"] += message.stored

    def opened(self, store: Store) -> None:
        """Check a file that a daemon opens: every acknowledged record is held, or noted as removed."""
        contents = store.contents()
        there = {entry.record_id for entry in contents.entries} | set(contents.removed_ids)
        lost = self._acknowledged - there
        self._require(not lost, f"acknowledged, and not in the file: {sorted(lost)[:3]}")

    def is_lawful(self, journal: Iterable[dict[str, Any]], folder: Path) -> None:
        """Check at the end that the file has every record, and that the written history could have happened."""
        store = Store(folder, Limits())
        self.opened(store)
        store.close()
        for fault in [*lease_faults(journal), *store_faults(folder / FILE)]:
            raise Violated(fault)

    # Nothing is trained twice, nor under a version that is not one.

    def resumed(self, policy: str, version: Version) -> None:
        """Note that a learner begins at this version: steps trained after it count no more."""
        lineage = self.lineage(policy)
        lineage.life += 1
        lineage.valid = {one for one in lineage.valid if one.step <= version.step}
        lineage.positions = {place: step for place, step in lineage.positions.items() if step < version.step}
        lineage.failures = [one for one in lineage.failures if one[1] < version.step]
        lineage.rescues = [one for one in lineage.rescues if one[1] < version.step]

    def announced(self, policy: str, version: Version) -> None:
        """Check that the version of new weights was not used by another life."""
        lineage = self.lineage(policy)
        life = lineage.published.setdefault(version, lineage.life)
        self._require(life == lineage.life, f"{policy}: version {version} is used twice")
        lineage.valid.add(version)

    def trained(
        self, policy: str, step: int, groups: Sequence[ScoredGroup], rescued: Iterable[Failed], bound: int
    ) -> None:
        """Check a batch: no position or rescue twice, no void version, no group staler than `bound`."""
        lineage = self.lineage(policy)
        for group in groups:
            place = int(group.ticket.partition(".")[2])
            self._require(place not in lineage.positions, f"{policy}: position {place} is trained twice")
            lineage.positions[place] = step
            spans = [span.version for answer in group.answers for span in answer.versions]
            self._require(set(spans) <= lineage.valid, f"{policy}: trained on a version that is void: {spans[0]}")
            self._require(step - min(spans).step <= bound, f"{policy}: trained on a group of {min(spans)} at {step}")
        for key in rescued:
            lineage.rescues.append((key, step))
            num_failed, num_rescued = (sum(one == key for one, _ in what) for what in
                                       (lineage.failures, lineage.rescues))  # fmt: skip
            self._require(num_rescued <= num_failed, f"{policy}: the failure {key} is rescued twice")
            self.counts["rescues"] += 1
        failed = [group for group in groups if all(answer.reward <= 0 for answer in group.answers)]
        lineage.failures += [((group.prompt_id, group.newest), step) for group in failed]
        self.counts["trained"] += len(groups)

    def balances(self, policy: str, *, taken: int, trained: int, ready: int, stale: int) -> None:
        """Check that every group a learner took over was trained, dropped as stale, or is ready."""
        self._require(taken == trained + ready + stale, f"{policy}: {taken} groups taken, {trained=} {ready=} {stale=}")
        self.counts["stale"] += stale

    # No unit has two engines, and no allocator's number is used twice.

    def starts(self, process: Process, epoch: int, node: Process) -> None:
        """Check that a process which starts on a unit is alone there, under a new epoch."""
        unit = process.unit
        if unit:
            there = [one.name for one in self._run.world.processes if one.unit == unit and one is not process]
            self._require(not there, f"{process.name} starts on {unit} beside {there}")
            lease, before = (epoch, process.name), self._leases.get(unit, (0, ""))
            is_again = lease == before and node is not self._nodes[unit]  # a new node knows nothing of it
            self._require(epoch > before[0] or is_again, f"{process.name} starts on {unit}: {epoch} after {before}")
            self._leases[unit], self._nodes[unit] = lease, node

    def note_life(self, number: int) -> None:
        """Check that the life of an allocator that begins has a new number."""
        self._require(number > self._last_life, f"allocator number {number} is used twice")
        self._last_life = number

    # Who is killed for its silence has stood still, or has hung.

    def is_silent(self, name: str, supervisor: Process) -> None:
        """Check that a process killed for its silence, on its supervisor's host, had stood still lately."""
        run = self._run
        suspects = [one for one in run.world.processes if one.host is supervisor.host and one.name == name]
        since_s = run.world.now_s - run.config.supervision.silence_s
        self._require(any(one.went_on_s > since_s for one in suspects), f"{name} is killed, and was not silent")

    # Every wait ends.

    def is_quiet(self, learners: Iterable["LearnerProcess"]) -> None:
        """Check, some time after the last fault, that no learner waits in vain for an answer or a held record."""
        exchange = self._run.exchange
        self._require(exchange is not None, "the exchange does not come back")
        assert exchange is not None
        for learner in learners:
            self._require(not learner.peers.lost_s(), f"{learner.policy} has lost the exchange")
            lacking = learner.lacks(exchange.core.index, PATIENCE_S)
            self._require(not lacking, f"{learner.policy} watches in vain: {lacking[:3]}")

    def no_put_waits(self, name: str, client: "ExchangeClient") -> None:
        """Check that the oldest unanswered Put of a client is young."""
        puts = client._puts
        asked_s = None if puts.oldest is None else puts.asked_s(puts.oldest)
        if asked_s is not None:
            waited_s = client._clock() - asked_s
            self._require(waited_s < PATIENCE_S, f"{name}: a Put has been unanswered for {waited_s:.1f} s")

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise Violated(otherwise)
