"""Simulated learner and worker: their real books, links and leases, around work that takes time and nothing else."""

import struct
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mrl.allocation.learner_reports import ReportSender
from mrl.allocation.lease import LeaseHolder, Used
from mrl.exchange.client import ExchangeClient, ExchangeLink
from mrl.exchange.record_index import RecordIndex
from mrl.learner.intake import Intake
from mrl.learner.ledger import SamplingLimits, WorkLedger
from mrl.learner.worker_activity import WaitBounds
from mrl.processes.planning.plan import ProcessSpec
from mrl.processes.planning.unit_workers import UNIT_EPOCH
from mrl.records.experience import OutcomeRecord
from mrl.records.finish import FinishReason
from mrl.records.leases import LearnerReport
from mrl.records.rollouts import Answer, ScoredGroup, WeightsNotice, WorkItem
from mrl.records.version import Version, VersionSpan
from mrl.rollout.link import WorkerLink, WorkerProgress
from mrl.sharing.rescues import Failure, PendingRescues
from mrl.transport.grants import grant_of
from mrl.transport.server import Incoming
from run_simulation.daemons import open_link
from run_simulation.network import Server
from run_simulation.world import Ended, Process, Violated

if TYPE_CHECKING:
    from run_simulation.trial import Run

GROUP_SIZE, GROUPS_PER_STEP = 2, 3
CHECKPOINT_EVERY = 3
GATE_VERSIONS, MAX_AGE_VERSIONS, LIMIT = 50, 6, 16
TRAIN_S, PUBLISH_S, LOAD_S, SAMPLE_S, SAVE_S = (0.3, 1.2), (0.1, 0.8), (0.1, 1.0), (0.3, 3.0), (0.1, 1.5)
BOUNDS = WaitBounds(data_timeout_s=75.0, first_word_s=90.0, loading_s=90.0)
ONE_TOKEN, ONE_LOGPROB = struct.pack("<i", 7), struct.pack("<f", -1.0)


class _Inbox:
    """The learner's server socket as `Intake` uses it: messages that have come, and a way for answers."""

    def __init__(self) -> None:
        self.server: Server | None = None
        self._come: list[Incoming] = []

    def note(self, client: bytes, body: bytes) -> None:
        self._come.append(Incoming(client, body, grant_of(client.decode())))

    def receive(self, _timeout_s: float) -> list[Incoming]:
        """Take all messages that have come."""
        come, self._come = self._come, []
        return come

    def send(self, client: bytes, body: bytes) -> bool:
        """Post an answer to a client."""
        assert self.server is not None
        return self.server.send(client, body)

    def close(self) -> None:
        """Do nothing: the process ends."""


class _Intake(Intake):
    """Intake whose turns are called by the process, not by a thread."""

    def open(self) -> None:
        """Do nothing: it is open from the start."""


class LearnerProcess:
    """A learner, as `mrl.learner.training_loop` runs it: trains batches, publishes, saves, asks peers for rescues."""

    def __init__(self, run: "Run", process: Process, spec: ProcessSpec) -> None:
        self._run, self._process, self.policy = run, process, spec.policy
        self._rng = run.world.rng
        disk = run.disks[self.policy]
        saved: dict[str, Any] | None = disk.get("checkpoint")
        self._lives = run.folder.lives(self.policy)
        self._version = Version(self._lives.begin(), saved["step"] if saved else 0)
        run.witness.resumed(self.policy, self._version)
        pace = SamplingLimits(GROUPS_PER_STEP, GROUP_SIZE, run.staleness, run.num_steps, adaptive=run.is_adaptive)
        self._ledger = WorkLedger(pace, run.prompt_at, resumed_at=self._version, step=self._version.step)
        self._table = PendingRescues(max_pending=64, gate_age_versions=GATE_VERSIONS)
        self._heard: dict[str, OutcomeRecord] = {}
        if saved:
            self._ledger.restore(saved["ledger"], self._version.step)
            self._table.restore(saved["table"])
        inbox = _Inbox()
        self._intake = _Intake(inbox, self._ledger, clock=process.now_s)  # type: ignore[arg-type]
        inbox.server = run.network.listen(process, f"learner-{self.policy}", inbox.note)
        self._links: list[Any] = []
        self.peers = ExchangeClient.connect(self._open, client=process.name, policy=self.policy, clock=process.now_s)
        self._allocator = ReportSender(self.policy, clock=process.now_s)
        self._line = open_link(run, process, "allocator", self._allocator.on_message)
        self._allocator.requests.open(self._line.post, self._line.restart)
        self._asked_s: dict[str, float] = {}
        self._received: set[str] = set()
        self._is_busy, self._began_s, self._started_s = False, process.now_s(), process.now_s()
        self._num_taken = self._num_trained = self._num_stale = 0
        self._totals = LearnerReport(policy=self.policy, trained_tokens=0, busy_s=0.0, data_wait_s=0.0)
        self._publish(resumed=self._version.run_epoch > 0)
        self._ask(self._table.prompt_ids)
        run.learners[self.policy] = self

    def _open(self, on_message: Any, on_tick: Any) -> ExchangeLink:
        link = open_link(self._run, self._process, "exchange", on_message)
        self._links.append((link, on_tick))
        return link

    @property
    def age_s(self) -> float:
        """Seconds since the learner began; 0 once it is gone."""
        return 0.0 if self._process.code is not None else self._process.now_s() - self._started_s

    def turn(self) -> None:
        """Do the work of the links' threads, and look for a batch unless a step is under way."""
        now_s = self._process.now_s()
        for link, on_tick in self._links:
            link.turn()
            on_tick(now_s)
        self._line.turn()
        self._allocator.requests.on_tick(now_s)
        self._allocator.beat()
        self._intake.turn(0.0)
        self._listen()
        if not self._is_busy:
            self._step(now_s)

    def lacks(self, index: RecordIndex, patience_s: float) -> list[str]:
        """Return the records that the exchange holds on a prompt asked for long ago and that never came."""
        now_s = self._process.now_s()
        old = {prompt_id for prompt_id, asked_s in self._asked_s.items() if now_s - asked_s > patience_s}
        held = (entry for prompt_id in sorted(old & set(self._table.prompt_ids)) for entry in
                index.on_prompt(prompt_id, ["outcome"], of_others_than=self.policy))  # fmt: skip
        return [entry.record_id for entry in held if entry.record_id not in self._received
                and self._run.witness.age_s(entry.record_id) > patience_s]  # fmt: skip

    def _step(self, now_s: float) -> None:
        if self._version.step == self._run.num_steps:
            raise Ended(0)
        is_last = self._version.step == self._run.num_steps - 1
        if is_last and self._run.world.now_s < self._run.faults.quiet_s + 2 * self._run.patience_s:
            self._began_s = now_s  # the last step waits, so that all still live in the quiet time
            return
        groups = self._intake.next_batch(self._version.step)
        if groups is None:
            if why := self._intake.given_up(BOUNDS, self._began_s):
                raise Violated(f"{self._process.name} gives up: {why}")  # silent workers are replaced sooner
            return
        rescued = [self._table.hit(prompt_id, one.source) for prompt_id, one in sorted(self._heard.items())
                   if prompt_id in self._table]  # fmt: skip
        self._heard.clear()
        keys = [(one.prompt_id, one.version) for one in rescued]
        self._run.witness.trained(self.policy, self._version.step, groups, keys, self._run.staleness)
        self._num_trained += len(groups)
        self._count()
        self._is_busy = True
        self._process.at(self._rng.uniform(*TRAIN_S), lambda: self._trained(groups))

    def _trained(self, groups: Sequence[ScoredGroup]) -> None:
        now_s = self._process.now_s()
        self._table.expire(step=self._version.step)
        for group in groups:
            if all(answer.reward <= 0 for answer in group.answers):
                self._table.failed(Failure(group.prompt_id, (7,), group.newest))
            else:
                self._table.succeeded(group.prompt_id, group.newest)
        self.peers.unwatch(self._table.take_forgotten())
        self._version = Version(self._version.run_epoch, self._version.step + 1)
        self._run.world.note(f"{self.policy} is at {self._version}")
        self._ask([group.prompt_id for group in groups if group.prompt_id in self._table])
        self._publish(resumed=False)
        if self._version.step % CHECKPOINT_EVERY == 0 or self._version.step == self._run.num_steps:
            state = {"step": self._version.step, "ledger": self._intake.state(), "table": self._table.state()}
            self._process.at(self._rng.uniform(*SAVE_S), lambda: self._save(state))
        self._totals = LearnerReport(
            policy=self.policy, trained_tokens=self._totals.trained_tokens + len(groups), busy_s=1.0, data_wait_s=0.5
        )
        self._allocator.report(self._totals)
        self._is_busy, self._began_s = self._version.step == self._run.num_steps, now_s

    def _save(self, state: dict[str, Any]) -> None:
        self._run.disks[self.policy]["checkpoint"] = state
        self._lives.saved(state["step"])
        if state["step"] == self._run.num_steps:
            raise Ended(0)

    def _publish(self, *, resumed: bool) -> None:
        version = self._version
        self._run.witness.announced(self.policy, version)
        self.peers.announce(version, resumed=resumed)
        notice = WeightsNotice(version=version, manifest_path="there")
        self._process.at(self._rng.uniform(*PUBLISH_S), lambda: self._intake.announce(notice))

    def _listen(self) -> None:
        self._num_taken += len(self._intake.arrivals())
        for one in self.peers.take():
            record = one.record
            assert isinstance(record, OutcomeRecord)
            self._received.add(record.record_id)
            if record.prompt_id in self._table:
                self._heard[record.prompt_id] = record

    def _ask(self, prompt_ids: Sequence[str]) -> None:
        now_s = self._process.now_s()
        self._asked_s |= dict.fromkeys(prompt_ids, now_s)
        if prompt_ids:
            self.peers.fetch(prompt_ids, kinds=["outcome"], limit=LIMIT, max_age_versions=MAX_AGE_VERSIONS)

    def _count(self) -> None:
        self._num_stale += self._intake.take_counts().get("stale_groups", 0)
        self._run.witness.balances(
            self.policy, taken=self._num_taken, trained=self._num_trained, ready=len(self._ledger.ready),
            stale=self._num_stale,
        )  # fmt: skip


class WorkerProcess:
    """A worker, as `mrl.rollout.worker_loop` runs it: samples granted groups within its lease, publishes, delivers."""

    def __init__(self, run: "Run", process: Process, spec: ProcessSpec) -> None:
        self._run, self._process, self._policy, self._rng = run, process, spec.policy, run.world.rng
        self._work = WorkerLink(process.name, clock=process.now_s)
        self._work.tell(self._progress)
        self._lease = LeaseHolder(
            process.name, self._policy, unit=process.unit, unit_epoch=int(spec.env[UNIT_EPOCH])
        )  # fmt: skip
        self._flights: dict[str, WorkItem] = {}
        self._serving: Version | None = None
        self._loading: Version | None = None
        self._num_done = 0
        self._links: list[Any] = []
        line = open_link(run, process, f"learner-{self._policy}", self._work.on_message)
        self._links.append((line, self._work.on_tick))
        self._work.open(line.post, line.restart)
        line = open_link(run, process, "allocator", lambda body: self._lease.on_message(body, process.now_s()))
        self._links.append((line, lambda now_s: self._lease.on_tick(now_s, Used(tokens=self._num_done))))
        self._lease.open(line.post, line.restart)
        self.exchange = ExchangeClient.connect(
            self._open, client=process.name, policy=self._policy, clock=process.now_s
        )
        run.publishers[process.name] = self.exchange
        process.on_end.append(lambda _: run.publishers.pop(process.name, None))

    def _open(self, on_message: Any, on_tick: Any) -> ExchangeLink:
        link = open_link(self._run, self._process, "exchange", on_message)
        self._links.append((link, on_tick))
        return link

    def turn(self) -> None:
        """Do the work of the links' threads, and one turn of the worker's loop."""
        now_s = self._process.now_s()
        for link, on_tick in self._links:
            link.turn()
            on_tick(now_s)
        if self._lease.has_lost_unit:
            raise Ended(1)
        self._follow()
        room = self._lease.slots(now_s, len(self._flights)) - len(self._flights)
        if room > 0 and self._serving is not None:
            for item in self._work.take_work(room, 0.0, self._serving):
                assert isinstance(item, WorkItem)
                self._flights[item.ticket] = item
                began = self._serving
                self._process.at(self._rng.uniform(*SAMPLE_S), partial(self._done, item, began))

    def _progress(self) -> WorkerProgress:
        return WorkerProgress(self._num_done, is_loading=self._serving is None)

    def _follow(self) -> None:
        notice = self._work.notice
        if notice is not None and self._loading is None and notice.version != self._serving:
            self._loading = notice.version
            self._process.at(self._rng.uniform(*LOAD_S), self._loaded)

    def _loaded(self) -> None:
        self._serving, self._loading = self._loading, None

    def _done(self, item: WorkItem, began: Version) -> None:
        """Deliver a complete group. The last token of each answer was sampled under the version served now."""
        del self._flights[item.ticket]
        self._num_done += 1
        assert self._serving is not None
        spans = [VersionSpan(1, began), VersionSpan(1, self._serving)]
        rewards = [float(self._rng.random() < 0.4) for _ in range(item.group_size)]
        answers = [
            Answer(
                token_ids=2 * ONE_TOKEN, logprobs=2 * ONE_LOGPROB, versions=spans, completion=b"x",
                finish_reason=FinishReason.STOP, reward=reward,
            ) for reward in rewards
        ]  # fmt: skip
        group = ScoredGroup(
            ticket=item.ticket, prompt_id=item.prompt_id, task="t", prompt_token_ids=ONE_TOKEN, answers=answers
        )
        if any(rewards):
            self.exchange.publish([self._success(group)])
        self._work.deliver([group])

    def _success(self, group: ScoredGroup) -> OutcomeRecord:
        return OutcomeRecord(
            record_id=f"{self._policy}:{group.ticket}:0", source=self._policy, oldest=group.oldest,
            newest=group.newest, fingerprint="f", prompt_id=group.prompt_id, task="t",
            created_unix_s=self._run.world.time(), completion=b"x", finish_reason=FinishReason.STOP, verifier="v",
            reward=1.0,
        )  # fmt: skip
