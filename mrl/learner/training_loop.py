"""Main loop of a learner: prepare a batch, train, publish, until all steps are done.

The first rank speaks to the other roles; the other ranks follow the orders that it broadcasts. Peers are optional at
every step: records that came in time are in the order, and every wait for them has a bound. In a synchronous run
nothing that is trained on or saved depends on time, on restarts, or on the order of arrival.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import structlog
from torch import nn

from mrl.allocation.learner_reports import ReportSender
from mrl.errors import RoleFailed
from mrl.exchange.client import ExchangeClient
from mrl.learner.batches import BatchMaker, PreparedStep
from mrl.learner.evaluations import Evaluations
from mrl.learner.intake import Intake
from mrl.learner.ranks.learner_turn import LearnerTurn
from mrl.learner.references import CanaryReferences
from mrl.learner.step_order import StepOrder, decode_order, encode_order
from mrl.learner.trainer import Trainer, check_forward
from mrl.learner.training_dumps import dump_batch
from mrl.metrics.telemetry import Telemetry
from mrl.models.parameters import TensorSource, weight_sources
from mrl.records.leases import LearnerReport
from mrl.records.rollouts import WeightsNotice
from mrl.records.version import Version
from mrl.sharing.recorder import SharingRecorder
from mrl.sharing.regime import Regime
from mrl.weights.broadcast import BroadcastPublisher
from mrl.weights.checkpoint_saver import Saver
from mrl.weights.publish import Publisher
from mrl.weights.training_state import training_tensors

MAX_SKIPPED_UPDATES = 5
STILL_WAITING, SAY_SO_S = b"wait", 60.0
"""Message of the first rank to the others while it waits for a batch, however long, and the seconds between two."""

SourcesOf = Callable[[nn.Module], Sequence[TensorSource]]
"""Model -> the tensors of it that are published."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Milestones:
    """Steps at which a learner saves and ends, and the bound above which it warns of a mismatch."""

    total: int
    checkpoint_every: int
    mismatch_alarm_nats: float = float("inf")
    """Divergence between learner and engine, in nats, above which a step logs a warning."""
    save_when_stopped: bool = False
    """Whether a learner that is stopped early saves its last step: where policies need no common step."""


@dataclass
class Totals:
    """Totals since the learner's start, which it reports to the allocator."""

    trained_tokens: int = 0
    busy_s: float = 0.0
    data_wait_s: float = 0.0
    trained_groups: int = 0
    dropped_groups: int = 0


@dataclass
class FirstRank:
    """Parts that only the first rank has: its links to the other roles."""

    policy: str
    intake: Intake
    batches: BatchMaker
    regime: Regime
    recorder: SharingRecorder
    """Notes peers' answers that the regime reads, for metrics."""
    peers: ExchangeClient | None
    evaluations: Evaluations | None
    crash_folder: Path
    telemetry: Telemetry
    allocator: ReportSender
    on_step: Callable[[int, PreparedStep], None]
    """Called after every step, for samples."""
    canary_prompts: list[list[int]]
    """Prompts of the pool, in the policy's tokens."""
    totals: Totals = field(default_factory=Totals)


class Learner:
    """Trains one policy from `start` to its last step. Ranks that hold nothing to save have no `saver`."""

    def __init__(
        self,
        trainer: Trainer,
        milestones: Milestones,
        start: Version,
        first: FirstRank | None,
        saver: Saver | None,
        *,
        seed: int,
        canary: CanaryReferences,
        publisher: Publisher | BroadcastPublisher,
        published: SourcesOf = weight_sources,
        turn: LearnerTurn,
    ) -> None:
        """All ranks gather the `published` tensors of the model, and give them to their `publisher`.

        The learner has its `turn` on the device when this is called.
        """
        self._publisher, self._published, self._turn = publisher, published, turn
        self._trainer, self._milestones, self._first, self._saver = trainer, milestones, first, saver
        self._version, self._seed = start, seed
        self._saved_step = start.step
        self._rng = np.random.default_rng([seed, 0, 1])
        self._canary = canary
        check_forward(trainer.model, canary.texts, trainer.precision, trainer.kernel, trainer.context)
        self._skipped = self._alarms = 0

    def restore(self, state: dict[str, Any]) -> None:
        """Continue the random stream and the counts of a checkpoint."""
        self._rng.bit_generator.state = state["rng"]
        self._skipped, self._alarms = state["skipped"], state["alarms"]

    def run(self, stopping: Callable[[], bool]) -> bool:
        """Train until the last step; returns False when `stopping` ended it early."""
        log.info("training started", start=str(self._version), steps=self._milestones.total)
        if self._first:
            self._first.intake.open()
        with self._turn.getting_on():
            self._publish(resumed=self._version.run_epoch > 0)
        self._turn.leave()
        if self._first:
            self._trainer.at_each_phase(partial(self._train_on, self._first))
            self._first.batches.begin()
        finished = True
        while finished and self._version.step < self._milestones.total:
            finished = self._step(stopping)
        if not finished and self._milestones.save_when_stopped and self._version.step > self._saved_step:
            self._save_stopped()
        if self._saver:
            self._saver.wait()
        if finished:
            self._publisher.finish()
        return finished

    def progress(self) -> int:
        """Return a number above 0 that changes as workers, training or publishing get on. From any thread."""
        assert self._first is not None, "the first rank speaks to peers"
        return 1 + self._first.intake.num_moves + self._publisher.progress

    def await_evaluation(self, stopping: Callable[[], bool]) -> None:
        """Wait, after the last step and within a bound, for the evaluation under way. Only the first rank waits."""
        if self._first and self._first.evaluations:
            self._first.evaluations.await_last(self._telling_of_life(self._first, stopping))

    def _step(self, stopping: Callable[[], bool]) -> bool:
        """Train one step; False when `stopping` ended it before it was trained."""
        started_s = time.monotonic()
        prepared = self._prepare(stopping)
        order = self._trainer.world.broadcast_bytes(self._encode(prepared))
        while order == STILL_WAITING:
            self._trainer.world.note("forming a batch")
            order = self._trainer.world.broadcast_bytes(None)
        if not order:
            return False
        step_order = prepared.order if prepared else decode_order(order)
        self._turn.come()
        trained_s = time.monotonic()
        self._canary.before_step(step_order)
        values = self._trainer.train(step_order, self._version.step)
        values |= self._trainer.take_measurements(step_order)
        self._check_skipped(values, step_order)
        self._version = Version(self._version.run_epoch, self._version.step + 1)
        structlog.contextvars.bind_contextvars(version=str(self._version))
        published_s = time.monotonic()
        with self._turn.getting_on():
            self._publish(resumed=False)
            saved_s = time.monotonic()
            self._save_when_due()
        end_s = time.monotonic()
        self._turn.leave()
        if self._first and prepared:
            step_s = time.monotonic() - started_s
            values |= self._turn.take_times()
            values |= {
                "time/step_s": step_s,
                "time/train_s": published_s - trained_s,
                "time/publish_s": saved_s - published_s,
                "time/checkpoint_s": end_s - saved_s,
                "rate/trained_tokens_s": values["tokens/trained"] / step_s,
                "rate/steps_per_hour": 3600.0 / step_s,
            }
            self._report(self._first, prepared, values, busy_s=end_s - trained_s)
        return True

    def _prepare(self, stopping: Callable[[], bool]) -> PreparedStep | None:
        self._trainer.world.note("forming a batch")
        if self._first is None:
            return None
        self._first.telemetry.doing("forming a batch")
        stopping = self._telling_ranks(self._telling_of_life(self._first, stopping))
        prepared = self._first.batches.prepare(self._version.step, self._rng, stopping)
        if prepared is not None and not self._turn.take(stopping):
            return None
        self._first.telemetry.doing("training")
        return prepared

    def _telling_ranks(self, stopping: Callable[[], bool]) -> Callable[[], bool]:
        """Wrap `stopping`, so that its calls tell the other ranks now and then that the batch is not there yet."""
        world, told_s = self._trainer.world, time.monotonic()

        def stopping_and_saying_so() -> bool:
            nonlocal told_s
            if time.monotonic() - told_s > SAY_SO_S:
                told_s = time.monotonic()
                world.broadcast_bytes(STILL_WAITING)
                world.note("forming a batch")
            return stopping()

        return stopping_and_saying_so

    def _telling_of_life(self, first: FirstRank, stopping: Callable[[], bool]) -> Callable[[], bool]:
        """Wrap `stopping`, which a wait calls all the time, so that its calls also send the reports that are due."""

        def stopping_at_a_beat() -> bool:
            first.allocator.beat()
            if first.evaluations:
                first.evaluations.tell()
            self._publisher.check()  # raises, where else no worker would hear of the version
            first.intake.publishing(self._publisher.progress)
            return stopping()

        return stopping_at_a_beat

    def _train_on(self, first: FirstRank) -> None:
        first.intake.note_progress()
        first.allocator.beat()
        self._turn.note_progress()

    def _encode(self, prepared: PreparedStep | None) -> bytes | None:
        if prepared is None:
            return None
        return encode_order(prepared.order) if self._trainer.world.size > 1 else b"here"

    def _check_skipped(self, values: dict[str, float], order: StepOrder) -> None:
        if not values["optim/skipped"]:
            self._skipped = 0
            return
        self._skipped += 1
        kept = ""
        if self._first:
            kept = str(dump_batch(self._first.crash_folder, self._first.policy, self._version.step, order))
            log.warning("update skipped", reason="loss or gradient not finite", rows=kept)
        if self._skipped >= MAX_SKIPPED_UPDATES:
            raise RoleFailed(
                f"loss or gradient not finite in {self._skipped} steps in a row; "
                f"the rows of the last step are in {kept or 'the crash folder'}; lower learner.lr"
            )

    def _watch_mismatch(self, values: dict[str, float]) -> None:
        """Warn where learner and engine score the same tokens differently: by staleness, or as one of them is wrong."""
        k3_nats, bound = values["mismatch/k3_nats"], self._milestones.mismatch_alarm_nats
        if not k3_nats <= bound:
            self._alarms += 1
            log.warning(
                "learner and engine log-probabilities differ",
                k3_nats=k3_nats,
                bound_nats=bound,
                max_ratio=values["mismatch/max_ratio"],
            )

    def _report(self, first: FirstRank, prepared: PreparedStep, values: dict[str, float], *, busy_s: float) -> None:
        first.telemetry.doing("reporting")
        step, totals = self._version.step, first.totals
        first.on_step(step, prepared)
        totals.trained_tokens += prepared.tokens
        totals.busy_s += busy_s
        totals.data_wait_s += prepared.values["time/wait_for_groups_s"]
        totals.trained_groups += len(prepared.groups)
        totals.dropped_groups += int(prepared.values["staleness/dropped_groups"])
        first.allocator.report(
            LearnerReport(
                policy=first.policy,
                trained_tokens=totals.trained_tokens,
                busy_s=totals.busy_s,
                data_wait_s=totals.data_wait_s,
                trained_groups=totals.trained_groups,
                dropped_groups=totals.dropped_groups,
            )
        )
        self._watch_mismatch(values)
        shared = first.recorder.record(prepared.order.examples, self._trainer.peer_logprobs)
        first.telemetry.metrics(step, prepared.values | values | shared | {"mismatch/alarms": self._alarms})
        if first.evaluations:
            first.evaluations.tell()

    def _publish(self, *, resumed: bool) -> None:
        """Begin to publish the current version, on all ranks; once complete it is announced, beside training."""
        self._trainer.world.note("publishing")
        model, first, version = self._trainer.model.eval(), self._first, self._version
        canary = self._canary.make()
        lasts = version.step == self._milestones.total  # it may be read at any later time
        if first is None:
            self._publisher.begin(self._published(model), version, None, lasts=lasts)
            return
        first.telemetry.doing("publishing")
        with first.telemetry.awaiting("publishing of the previous version"):
            self._publisher.finish()
        if first.evaluations:
            first.evaluations.ask_when_due(version)  # before any worker may sample other things under it
        announce = partial(self._announce, first, version)
        self._publisher.begin(self._published(model), version, canary, announce, lasts=lasts)
        if first.peers:
            first.peers.announce(version, resumed=resumed)

    def _announce(self, first: FirstRank, version: Version, manifest: Path) -> None:
        """Announce a complete version to the workers; called by the thread that publishes."""
        first.intake.announce(WeightsNotice(version=version, manifest_path=str(manifest)))

    def _save_when_due(self) -> None:
        step = self._version.step
        due = step == self._milestones.total or _due(step, self._milestones.checkpoint_every)
        if due:
            self._save()

    def _save_stopped(self) -> None:
        """Save the last step, in a turn in which tensors come back from main memory.

        The turn does come: other processes stop too, and give theirs back.
        """
        self._turn.begin(lambda: False)
        self._turn.come()
        with self._turn.getting_on():
            self._save()
        self._turn.leave()

    def _save(self) -> None:
        self._trainer.world.note("saving a checkpoint")
        self._saved_step = step = self._version.step
        if self._saver is None:
            return
        if self._first:
            self._first.telemetry.doing("saving a checkpoint")
            self._first.intake.note_progress()
        tensors = training_tensors(self._trainer.model, self._trainer.optimizer)
        self._saver.save(step, tensors, self._state(self._first) if self._first else {})
        log.info("saving a checkpoint", step=step)

    def _state(self, first: FirstRank) -> dict[str, Any]:
        return {
            "version": msgspec.to_builtins(self._version),
            "ledger": first.intake.state(),
            "regime": first.regime.state(),
            "rng": self._rng.bit_generator.state,
            "skipped": self._skipped,
            "alarms": self._alarms,
        } | first.batches.state()


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
