"""Main loop of a frozen policy's worker: it scores answers of peers, with the weights of the policy's own folder.

Between their requests one worker of the policy evaluates it once.

Nobody publishes weights for a frozen policy. A server therefore proves after every start, and from time to time, that
it serves that folder: it scores the canary as transformers does, and has the folder's bytes, where its bytes can be
compared.
"""

import time
from collections.abc import Callable

import structlog

from mrl.engines.engine import Engine
from mrl.errors import EngineError, EngineLost, RoleFailed, WeightsUnproved
from mrl.metrics.telemetry import Telemetry
from mrl.records.version import Version
from mrl.rollout.frozen_evaluation import FrozenEvaluation
from mrl.rollout.peer_scoring import Scorer
from mrl.rollout.weight_updates import prove
from mrl.weights.manifest import Manifest

FROZEN = Version(0, 0)
"""The only version of a policy that does not learn."""
POLL_S = 0.02
REPORT_S = 2.0
MAX_LOST_IN_A_ROW = 3
QUIET_S = 30.0
"""Seconds without a score after which the evaluation no longer shares the engine with other work."""
PROVE_AGAIN_S = 300.0
"""Seconds between two proofs of a server's weights: no update comes to prove them again."""

log = structlog.get_logger()


class FrozenLoop:
    """Main loop of one worker with one engine."""

    def __init__(
        self,
        scorer: Scorer,
        engine: Engine,
        telemetry: Telemetry,
        *,
        manifest: Manifest | None = None,
        evaluation: FrozenEvaluation | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`manifest` describes the weights that a server has to serve; None where transformers reads the folder."""
        self._scorer, self._engine, self._telemetry = scorer, engine, telemetry
        self._manifest, self._evaluation = manifest, evaluation
        self._clock, self._prove_s = clock, 0.0
        self._is_lost = False
        self._lost_in_a_row = 0
        self._told_requests, self._tell_again_s = 0, 0.0
        self._scored_s = float("-inf")

    def run(self, stopping: Callable[[], bool]) -> None:
        """Work until `stopping`.

        Raises RoleFailed when the engine is lost again and again, EngineError when it serves other weights.
        """
        while not stopping():
            try:
                self._turn()
            except EngineLost as error:
                self._lose(error)
            self._report()
        if self._evaluation is not None:
            self._evaluation.give_up()

    def _turn(self) -> None:
        if self._is_lost:
            with self._telemetry.awaiting("engine restart"):
                self._engine.restart()
            self._is_lost = False
        if self._engine.version is None:
            self._begin()
        elif self._manifest is not None and self._clock() >= self._prove_s:
            self._prove_again(self._manifest)
        has_scored = bool(self._scorer.serve())
        if has_scored:
            self._telemetry.doing("scoring")
            self._lost_in_a_row, self._scored_s = 0, time.monotonic()
        is_beside = time.monotonic() - self._scored_s < QUIET_S
        if self._evaluation is not None and self._evaluation.go_on(beside=is_beside):
            return
        if not has_scored:
            self._telemetry.doing("idle")
            time.sleep(POLL_S)

    def _begin(self) -> None:
        """Label and prove the engine's first weights. Raises EngineError: another start would end in the same way."""
        self._engine.label(FROZEN)
        if self._manifest is None:
            return
        try:
            self._prove(self._manifest)
        except WeightsUnproved as error:
            raise EngineError(
                "the server does not serve the weights of the policy's model folder",
                where=f"policies.{self._manifest.policy}",
                got=str(error),
                cure="start the server with that folder, or set the policy's `model` to the folder that it serves",
            ) from error

    def _prove_again(self, manifest: Manifest) -> None:
        """Raises EngineLost where somebody has changed the weights: a restart reads them from the folder again."""
        try:
            self._prove(manifest)
        except WeightsUnproved as error:
            raise EngineLost(
                f"the server no longer serves the weights of the policy's model folder ({error}); scores of the last "
                f"{PROVE_AGAIN_S:g} s may come from other weights"
            ) from error

    def _prove(self, manifest: Manifest) -> None:
        """Raises WeightsUnproved, EngineLost."""
        with self._telemetry.awaiting("weight check", whom="the engine"):
            proof = prove(self._engine, manifest)
        self._prove_s = self._clock() + PROVE_AGAIN_S
        log.info("weights verified", gap_nats=proof.gap.max_nats, compared_share=proof.compared_share)

    def _lose(self, error: EngineLost) -> None:
        self._is_lost = True
        self._lost_in_a_row += 1
        if self._lost_in_a_row > MAX_LOST_IN_A_ROW:
            raise RoleFailed(
                f"the engine was lost {MAX_LOST_IN_A_ROW} times in a row without a score: {error}"
            ) from error
        log.warning("engine lost", reason=str(error))

    def _report(self) -> None:
        totals = self._scorer.totals
        if totals.requests != self._told_requests and time.monotonic() >= self._tell_again_s:
            self._told_requests, self._tell_again_s = totals.requests, time.monotonic() + REPORT_S
            self._telemetry.metrics(totals.newest_step, self._scorer.values())
