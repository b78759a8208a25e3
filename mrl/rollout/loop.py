"""The life of a rollout worker: get work within its room, take new weights, sample, publish, deliver."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from mrl.errors import PeerLost, RoleFailed, WeightsError
from mrl.metrics.telemetry import Telemetry
from mrl.records.rollouts import ScoredGroup, WorkItem
from mrl.rollout.link import WorkerLink
from mrl.rollout.sampling import Sampler
from mrl.rollout.scoring import Scorer
from mrl.rollout.updates import install

WAIT_SLICE_S = 0.5
"""How long a worker without work waits before it asks again."""
QUICK_SLICE_S = 0.05
"""The same for a worker whose learner waits for every batch, and for one that looks for requests of peers."""
REFUSED_PAUSE_S = 0.5
MAX_REFUSED_IN_A_ROW = 20

log = structlog.get_logger()


@dataclass
class WorkerTotals:
    """Counted since the worker started."""

    groups: int = 0
    tokens: int = 0
    slot_seconds: float = 0.0
    busy_s: float = 0.0
    idle_s: float = 0.0
    weights_refused: int = 0
    gap_nats: float = 0.0
    update_s: float = 0.0


@dataclass(frozen=True)
class Duties:
    """What a worker has to keep to beside sampling."""

    max_groups: Callable[[], int]
    """Groups that it may sample at once now: what its lease allows, or the whole batch of a synchronous run."""
    publish: Callable[[Sequence[ScoredGroup]], None]
    """Gives to the peers what the regime shares of finished groups; called before the learner gets them."""
    scorer: Scorer | None = None
    """Answers what peers ask of the engine, between batches and while there is nothing to sample."""
    newest_only: bool = False
    """Sample under the newest announced version or not at all, as a synchronous run must."""


class RolloutLoop:
    """One worker around one engine."""

    def __init__(
        self,
        sampler: Sampler,
        link: WorkerLink,
        telemetry: Telemetry,
        duties: Duties,
        *,
        group_size: int,
        learner_bound_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sampler, self._link, self._telemetry, self._duties = sampler, link, telemetry, duties
        self._group_size, self._clock = group_size, clock
        self._learner, self._learner_bound_s = f"learner/{sampler.policy}", learner_bound_s
        self._slice_s = QUICK_SLICE_S if duties.scorer or duties.newest_only else WAIT_SLICE_S
        self.totals = WorkerTotals()
        self._refused_before = 0

    def run(self, stopping: Callable[[], bool]) -> None:
        """Work until `stopping`."""
        started_s = self._clock()
        while not stopping():
            items = self._get_work(stopping)
            if not items or not self._take_weights():
                self._link.give_up(items)
                continue
            self._telemetry.doing("sampling")
            began_s = self._clock()
            groups = self._sampler.sample(items)
            self._duties.publish(groups)
            self._link.deliver(groups)
            self._account(groups, self._clock() - began_s, self._clock() - started_s)

    def _get_work(self, stopping: Callable[[], bool]) -> list[WorkItem]:
        began_s = self._clock()
        items: list[WorkItem] = []
        with self._telemetry.awaiting("work", whom=self._learner, bound_s=self._learner_bound_s):
            while not items and not stopping():
                self._serve()
                max_groups = self._duties.max_groups()
                if max_groups:
                    items = self._link.take_work(max_groups, self._slice_s)
                else:
                    self._wait_for_lease(stopping)
                if self._clock() - began_s > self._learner_bound_s:
                    raise PeerLost(f"no work from {self._learner} within {self._learner_bound_s:.0f} s")
        self.totals.idle_s += self._clock() - began_s
        return items

    def _wait_for_lease(self, stopping: Callable[[], bool]) -> None:
        began_s = self._clock()
        with self._telemetry.awaiting("lease", whom="allocator", bound_s=self._learner_bound_s):
            while not self._duties.max_groups() and not stopping():
                self._serve()
                time.sleep(0.05)
                if self._clock() - began_s > self._learner_bound_s:
                    raise PeerLost(f"no lease from the allocator within {self._learner_bound_s:.0f} s")

    def _serve(self) -> None:
        """Peers score under the newest weights that are at hand."""
        scorer = self._duties.scorer
        if scorer is not None and self._take_weights():
            scorer.serve()

    def _take_weights(self) -> bool:
        """Take the newest weights; whether the engine serves anything that may be sampled from."""
        notice, engine = self._link.notice, self._sampler.engine
        if notice is not None and notice.version != engine.version:
            try:
                installed = install(engine, Path(notice.manifest_path), notice.version)
            except WeightsError as error:
                self.totals.weights_refused += 1
                if self.totals.weights_refused > MAX_REFUSED_IN_A_ROW + self._refused_before:
                    raise RoleFailed(f"weights were refused {MAX_REFUSED_IN_A_ROW} times in a row: {error}") from error
                time.sleep(REFUSED_PAUSE_S)
                log.warning("weights refused", version=str(notice.version), reason=str(error))
            else:
                self._refused_before = self.totals.weights_refused
                structlog.contextvars.bind_contextvars(version=str(notice.version))
                self.totals.gap_nats, self.totals.update_s = installed.gap_nats, installed.seconds
        if self._duties.newest_only:
            return notice is not None and engine.version == notice.version
        return engine.version is not None

    def _account(self, groups: Sequence[ScoredGroup], batch_s: float, life_s: float) -> None:
        totals = self.totals
        tokens = sum(span.num_tokens for group in groups for a in group.answers for span in a.versions)
        totals.groups += len(groups)
        totals.tokens += tokens
        totals.busy_s += batch_s
        totals.slot_seconds += batch_s * sum(len(group.answers) for group in groups)
        self._telemetry.metrics(
            max(group.newest.step for group in groups),
            {
                "rate/rollout_tokens_s": totals.tokens / life_s,
                "rollout/groups": totals.groups,
                "rollout/tokens": totals.tokens,
                "rollout/slots": self._duties.max_groups() * self._group_size,
                "rollout/busy_share": totals.busy_s / life_s,
                "rollout/idle_s": totals.idle_s,
                "weights/canary_max_abs_nats": totals.gap_nats,
                "weights/update_s": totals.update_s,
                "weights/refused": totals.weights_refused,
                **self._sampler.pool.verifier_values(),
                **(self._duties.scorer.values() if self._duties.scorer else {}),
            },
        )
