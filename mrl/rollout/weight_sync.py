"""A worker's engine follows the weights that its learner announces; refused ones are tried again, ever more seldom."""

import math
from collections.abc import Callable

import structlog

from mrl.engines.engine import Engine
from mrl.errors import RoleFailed
from mrl.records.version import Version
from mrl.rollout.groups_in_flight import UnprovedGroups
from mrl.rollout.link import WorkerLink
from mrl.rollout.weight_updates import Installed, Missed, Refused, WeightUpdater
from mrl.rollout.worker_counters import WorkerTotals

REFUSED_PAUSE_S, MAX_REFUSED_PAUSE_S = 0.5, 10.0
"""Seconds until refused weights are tried again: the first pause, doubled each time up to the second.

All tries together take less than `learner.data_timeout_s`, so that the worker, which knows the reason, fails first.
"""
MAX_REFUSED_IN_A_ROW = 20

log = structlog.get_logger()


class WeightSync:
    """Choice of the weights that one engine loads next."""

    def __init__(
        self,
        engine: Engine,
        updates: WeightUpdater,
        link: WorkerLink,
        *,
        unproved: UnprovedGroups,
        totals: WorkerTotals,
        max_staleness_versions: int,
        clock: Callable[[], float],
    ) -> None:
        self._engine, self._updates, self._link = engine, updates, link
        self._unproved, self._totals, self._clock = unproved, totals, clock
        self._max_staleness_versions = max_staleness_versions
        self._refused_in_a_row = 0
        self._refused: tuple[Version, float] | None = None
        """Version that was refused or not offered last, and when it may be tried again."""

    @property
    def has_refused(self) -> bool:
        """Whether the weights that were tried last could not be loaded."""
        return self._refused is not None

    def begin_anew(self) -> None:
        """Let refused weights be tried again at once."""
        self._refused = None

    def follow(self, *, to_the_end: bool) -> None:
        """Begin an update to the newest weights, or take in its outcome; `to_the_end` waits for that.

        Raises RoleFailed where weights are refused too often.
        """
        notice = self._link.notice
        if notice is None or self._is_kept(notice.version):
            return
        if self._refused and notice.version == self._refused[0] and self._clock() < self._refused[1]:
            return
        outcome = self._updates.follow(notice, to_its_end=to_the_end)
        if isinstance(outcome, Installed):
            self._refused_in_a_row, self._refused = 0, None
            self._unproved.passed(outcome.version)
            structlog.contextvars.bind_contextvars(version=str(outcome.version))
            self._totals.installed(outcome)
        elif isinstance(outcome, Missed):
            self._totals.missed(outcome)
            log.info("weights not available from the learner", version=str(outcome.version), reason=outcome.reason)
            pause_s = math.inf if self._link.is_over else REFUSED_PAUSE_S  # nobody offers them any more, or not yet
            self._refused = outcome.version, self._clock() + pause_s
        elif isinstance(outcome, Refused):
            self._refused_in_a_row += 1
            self._totals.weights_refused += 1
            if self._refused_in_a_row > MAX_REFUSED_IN_A_ROW:
                raise RoleFailed(f"weights were refused {MAX_REFUSED_IN_A_ROW} times in a row: {outcome.reason}")
            log.warning("weights refused", version=str(outcome.version), reason=outcome.reason)
            pause_s = min(MAX_REFUSED_PAUSE_S, REFUSED_PAUSE_S * 2.0 ** (self._refused_in_a_row - 1))
            self._refused = outcome.version, self._clock() + pause_s

    def _is_kept(self, newest: Version) -> bool:
        """Whether to keep the served version: its evaluation has prompts to begin, and groups are fresh enough yet."""
        served = self._engine.version
        if served is None or self._link.held_out_waiting != served or not self._unproved.is_good(served):
            return False
        is_same_life = newest.run_epoch == served.run_epoch
        return is_same_life and newest.step - served.step < self._max_staleness_versions
