"""Batches of own groups in an asynchronous run, and how long they wait for peers.

A batch is taken as soon as enough groups are ready. Where the regime has patience, a batch with groups that are not
settled waits for peers' records, for `wait_s` at most.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mrl.errors import PeerLost
from mrl.exchange.client import ExchangeClient
from mrl.learner.intake import Intake
from mrl.learner.worker_activity import WaitBounds
from mrl.metrics.telemetry import Telemetry
from mrl.records.rollouts import ScoredGroup
from mrl.sharing.regime import Regime

WAIT_SLICE_S = 0.2
HOLD_SLICE_S = 0.02
"""Seconds between two looks for peers' records while a batch waits for them: their arrival wakes no thread."""

Stopping = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class OwnGroups:
    """Own groups of one step, for which the regime has heard the records of peers."""

    groups: list[ScoredGroup]
    values: Mapping[str, float]
    """Metric name -> value: seconds that were waited for groups, and for peers."""


class Batching(Protocol):
    """One way to gather the own groups of a step."""

    def begin(self) -> None:
        """Begin; called once, after the first weights are published."""

    def gather(self, step: int, stopping: Stopping) -> OwnGroups | None:
        """Return the groups of `step`; None when the role is stopping. Raises PeerLost when a bounded wait ran out."""


class AsynchronousBatching:
    """Gathers groups at the policy's own pace: records of peers are heard as they come, awaited within the patience."""

    def __init__(
        self, intake: Intake, regime: Regime, peers: ExchangeClient | None, telemetry: Telemetry, *, bounds: WaitBounds
    ) -> None:
        self._intake, self._regime, self._peers = intake, regime, peers
        self._telemetry, self._bounds = telemetry, bounds

    def begin(self) -> None:
        """Ask the exchange for all prompts that a restored regime awaits."""
        self._ask(self._regime.awaited())

    def gather(self, step: int, stopping: Stopping) -> OwnGroups | None:
        """Return the groups of `step`, settled ones first."""
        began_s = time.monotonic()
        if not await_groups(
            self._intake, step, stopping, lambda: self._listen(step), self._telemetry, bounds=self._bounds
        ):
            return None
        ready_s = time.monotonic()
        self._hold(step, stopping)
        groups = self._intake.next_batch(step, self._regime.is_settled, self._hold_versions)
        assert groups is not None, "ready groups do not go away"
        held_s = time.monotonic() - ready_s
        return OwnGroups(groups, {"time/wait_for_groups_s": ready_s - began_s, "time/wait_for_peers_s": held_s})

    @property
    def _hold_versions(self) -> int:
        patience = self._regime.patience
        return patience.hold_versions if patience else 0

    def _hold(self, step: int, stopping: Stopping) -> None:
        """Wait for peers, within the patience, while the batch has groups that are not settled."""
        patience = self._regime.patience
        if patience is None or self._peers is None:
            return
        deadline_s = time.monotonic() + patience.wait_s
        with self._telemetry.awaiting("peer records", whom="exchange", bound_s=patience.wait_s):
            while self._intake.unsettled(step, self._regime.is_settled, patience.hold_versions):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or stopping() or self._peers.lost_s():
                    return
                self._intake.wait_for_change(min(left_s, HOLD_SLICE_S))
                self._listen(step)

    def _listen(self, step: int) -> None:
        """Tell the regime of own groups that arrived, and of records that peers sent."""
        for group in self._intake.arrivals():
            self._ask(self._regime.asks(group))
        received = self._peers.take() if self._peers else []
        if received:
            self._regime.hear(received, step=step)

    def _ask(self, prompt_ids: Sequence[str]) -> None:
        how = self._regime.asking
        if self._peers and how and prompt_ids:
            self._peers.fetch(prompt_ids, kinds=how.kinds, limit=how.limit, max_age_versions=how.max_age_versions)


def await_groups(
    intake: Intake,
    step: int,
    stopping: Stopping,
    listen: Callable[[], None],
    telemetry: Telemetry,
    *,
    bounds: WaitBounds,
) -> bool:
    """Call `listen` until enough groups for `step` are ready; False when the role is stopping.

    There is no time limit while a worker gets on. Raises PeerLost when none was heard, or got on, within the bounds.
    """
    began_s, whom = time.monotonic(), f"worker/{telemetry.policy}"

    def waits(*, for_weights: bool) -> bool:
        """Wait for groups, or with `for_weights` for a worker that can sample; False when the role is stopping."""
        while not stopping():
            listen()
            if intake.unsettled(step) is not None or (for_weights and intake.has_served):
                return True
            if why := intake.given_up(bounds, began_s):
                raise PeerLost(f"no batch for step {step} from {whom}: {why}")
            intake.wait_for_change(WAIT_SLICE_S)
        return False

    with telemetry.awaiting("groups", whom=whom, bound_s=bounds.data_timeout_s):
        if not intake.has_served:
            with telemetry.awaiting("first weight load", whom=whom, bound_s=bounds.loading_s):
                waits(for_weights=True)
        return waits(for_weights=False)
