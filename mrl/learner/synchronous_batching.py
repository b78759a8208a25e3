"""Batches in a synchronous run: all policies meet twice in a step, and each hears the same as in any equal run.

    own groups ready             a worker has delivered them, and before that published their records to the exchange
    meet 2 * step                now the exchange holds the records of every policy for this step
    fetch, hear in fixed order   records of later steps are not there yet, and would be left out
    fetch until scores are there only scores are made after the meeting, by the policy that was asked for them
    meet 2 * step + 1            only now does any policy train, and so publish the next version

All waits have a bound. The bound of a meeting is how long a missing policy may stand still: one that reports progress,
as while its workers evaluate, is waited for. When the bound runs out the run ends and names the missing policies.
"""

import itertools
import time
from collections.abc import Collection, Mapping, Sequence

from mrl.errors import PeerLost
from mrl.exchange.client import ExchangeClient
from mrl.learner.asynchronous_batching import OwnGroups, Stopping, await_groups
from mrl.learner.intake import Intake
from mrl.learner.worker_activity import WaitBounds
from mrl.metrics.telemetry import Telemetry
from mrl.records.experience import Received
from mrl.records.rollouts import ScoredGroup
from mrl.sharing.regime import PeerQuery, Regime

PROMPTS_AT_ONCE = 32
MAX_RECORDS_PER_PROMPT = 64
"""Meant to be all records: which of them a smaller limit would leave out could depend on the order of arrival."""
SLICE_S = 0.5
"""Seconds after which a role that is told to stop leaves a meeting."""
ASK_AGAIN_S = 0.05


class SynchronousBatching:
    """Gathers groups where all `members` (policies that learn) step together. Without `peers` none is waited for."""

    def __init__(
        self,
        intake: Intake,
        regime: Regime,
        peers: ExchangeClient | None,
        telemetry: Telemetry,
        *,
        members: Sequence[str],
        bounds: WaitBounds,
        sync_timeout_s: float,
    ) -> None:
        self._intake, self._regime, self._peers, self._telemetry = intake, regime, peers, telemetry
        self._members, self._bounds, self._sync_timeout_s = tuple(members), bounds, sync_timeout_s
        self._arrived: list[ScoredGroup] = []

    def begin(self) -> None:
        """Do nothing: awaited prompts are asked for in every step."""

    def gather(self, step: int, stopping: Stopping) -> OwnGroups | None:
        """Return the groups of `step` in the order of their prompts."""
        began_s = time.monotonic()
        ready = await_groups(self._intake, step, stopping, self._note_arrivals, self._telemetry, bounds=self._bounds)
        groups = self._intake.next_batch(step) if ready else None
        if groups is None:
            return None
        groups.sort(key=_by_prompt)
        asked = self._asked()
        ready_s = time.monotonic()
        if self._peers is not None and not self._share(self._peers, groups, asked, step, stopping):
            return None
        shared_s = time.monotonic() - ready_s
        return OwnGroups(groups, {"time/wait_for_groups_s": ready_s - began_s, "time/wait_for_peers_s": shared_s})

    def _note_arrivals(self) -> None:
        self._arrived += self._intake.arrivals()

    def _asked(self) -> set[str]:
        """Return the prompts to ask for, by all groups that arrived for this step, also those not trained on."""
        arrived, self._arrived = sorted(self._arrived, key=_by_prompt), []
        return {prompt_id for group in arrived for prompt_id in self._regime.asks(group)}

    def _share(
        self, peers: ExchangeClient, groups: list[ScoredGroup], asked: set[str], step: int, stopping: Stopping
    ) -> bool:
        """Meet the other policies and hear their records for this step; False when the role is stopping."""
        if not self._meet(peers, 2 * step, step, stopping):
            return False
        how = self._regime.asking
        if how is not None:
            self._hear(peers, how, asked | set(self._regime.awaited()), step)
            self._hear_scores(peers, how, groups, step, stopping)
        return self._meet(peers, 2 * step + 1, step, stopping)

    def _meet(self, peers: ExchangeClient, number: int, step: int, stopping: Stopping) -> bool:
        standstill = StallClock()
        others = ", ".join(f"learner/{name}" for name in self._members if name != self._telemetry.policy)
        with self._telemetry.awaiting("step barrier", whom=others, bound_s=self._sync_timeout_s):
            while not stopping():
                missing = peers.barrier(number, self._members, min(SLICE_S, self._sync_timeout_s))
                if not missing:
                    return True
                progress = {policy: peers.progress_of(policy) for policy in missing}
                lost = " (the exchange does not answer)" if peers.lost_s() else ""
                first_word_s = 0.0 if lost else self._bounds.first_word_s
                late = standstill.of(progress, time.monotonic(), self._sync_timeout_s, first_word_s=first_word_s)
                if late:
                    stood = f"no progress for {min(late.values()):g} s"
                    raise PeerLost(f"{', '.join(late)} did not reach step {step}: {stood}{lost}")
        return False

    def _hear(self, peers: ExchangeClient, how: PeerQuery, prompt_ids: set[str], step: int) -> None:
        ids, received = sorted(prompt_ids), list[Received]()
        with self._telemetry.awaiting("peer records", whom="exchange", bound_s=self._sync_timeout_s):
            for start in range(0, len(ids), PROMPTS_AT_ONCE):
                answered = peers.fetch_now(
                    ids[start : start + PROMPTS_AT_ONCE],
                    kinds=how.kinds,
                    limit=MAX_RECORDS_PER_PROMPT,
                    max_age_versions=how.max_age_versions,
                    timeout_s=self._sync_timeout_s,
                )
                if not answered:
                    raise PeerLost(f"the exchange did not answer in step {step} within {self._sync_timeout_s:g} s")
                received += peers.take()
                self._intake.note_progress()
        self._regime.hear(in_fixed_order(received, prompt_ids, step, limit=how.limit), step=step)

    def _hear_scores(
        self, peers: ExchangeClient, how: PeerQuery, groups: list[ScoredGroup], step: int, stopping: Stopping
    ) -> None:
        """Ask for scores until all are there: only scores are made after the meeting.

        Without some of them the step would not be that of an equal run. The bound is for one group more to have them.
        """
        if not how.scorer:
            return
        standstill = StallClock()
        with self._telemetry.awaiting("scores", whom=how.scorer, bound_s=self._sync_timeout_s):
            while not stopping():
                unsettled = {group.prompt_id for group in groups if not self._regime.is_settled(group)}
                if not unsettled:
                    return
                if standstill.of({how.scorer: len(unsettled)}, time.monotonic(), self._sync_timeout_s):
                    lacking = f"{how.scorer} did not score {len(unsettled)} of {len(groups)} groups of step {step}"
                    raise PeerLost(f"{lacking} within {self._sync_timeout_s:g} s")
                self._intake.wait_for_change(ASK_AGAIN_S)
                self._hear(peers, how, unsettled, step)


class StallClock:
    """Since when each awaited policy has stood still."""

    def __init__(self) -> None:
        self._since_s: dict[tuple[str, int], float] = {}

    def of(
        self, progress: Mapping[str, int], now_s: float, bound_s: float, *, first_word_s: float = 0.0
    ) -> dict[str, float]:
        """Return awaited policies whose progress was the same for longer than a bound -> that bound in seconds.

        A policy that has reported nothing yet (progress 0) may be starting: its bound is the greater of `bound_s` and
        `first_word_s`. Time counts from the first call with that progress.
        """
        self._since_s = {said: self._since_s.get(said, now_s) for said in progress.items()}
        bounds_s = {who: bound_s if said else max(bound_s, first_word_s) for who, said in progress.items()}
        return {who: bounds_s[who] for (who, _), since_s in self._since_s.items() if now_s - since_s > bounds_s[who]}


def _by_prompt(group: ScoredGroup) -> tuple[str, str]:
    return group.prompt_id, group.ticket


def in_fixed_order(
    received: Sequence[Received], prompt_ids: Collection[str], step: int, *, limit: int
) -> list[Received]:
    """Return the newest `limit` records per prompt that were asked for and are of no later step, as in any equal run.

    Record ids carry the run epoch, so that after a resume only ids of one step can be compared. Records of the step of
    a resume may have been published before the resume as well: these are left out, or they would take the places of
    older records.
    """
    once = {item.record.record_id: item for item in received}
    asked = [i for i in once.values() if i.record.prompt_id in prompt_ids and i.record.newest.step <= step]
    epochs: dict[tuple[str, str, int], int] = {}
    for item in asked:
        epochs[_place(item)] = max(item.record.newest.run_epoch, epochs.get(_place(item), 0))
    wanted = [item for item in asked if item.record.newest.run_epoch == epochs[_place(item)]]
    wanted.sort(key=lambda i: (i.record.prompt_id, -i.record.newest.step, i.record.source, i.record.record_id))
    by_prompt = itertools.groupby(wanted, key=lambda i: i.record.prompt_id)
    return [item for _, items in by_prompt for item in itertools.islice(items, limit)]


def _place(item: Received) -> tuple[str, str, int]:
    return item.record.prompt_id, item.record.source, item.record.newest.step
