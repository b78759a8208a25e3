"""The first rank's work before every step: gather own groups, hear the peers, let the regime assign credit."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mrl.errors import PeerLost
from mrl.learner.intake import Intake
from mrl.learner.order import StepOrder
from mrl.metrics.telemetry import Telemetry
from mrl.records.experience import Received
from mrl.records.rollouts import ScoredGroup
from mrl.records.version import Version, age_versions
from mrl.sharing.cost import SharedRows
from mrl.sharing.regime import Absorbed, Regime, Rescue

WAIT_SLICE_S = 0.2


class PeerSource(Protocol):
    """What the learner needs of the exchange client; nothing here ever waits."""

    def fetch(self, prompt_ids: list[str], *, limit: int, max_age_versions: int | None, watch: bool) -> None:
        """Ask for successes on these prompts."""

    def unwatch(self, prompt_ids: list[str]) -> None:
        """No longer interested."""

    def take(self) -> list[Received]:
        """Records that came since the last call."""

    def announce(self, version: Version, *, resumed: bool = False) -> None:
        """This policy now trains at `version`."""

    def lost_s(self) -> float:
        """Seconds without any answer from the exchange."""


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step that can be trained, and what there is to say about it."""

    order: StepOrder
    values: dict[str, float]
    groups: list[ScoredGroup]
    rescued: list[Rescue]
    tokens: int
    """Answer tokens of the own groups."""
    shared: Sequence[SharedRows] = ()
    """Peer answers among the order's examples, aligned."""


class BatchMaker:
    """Forms the order of one step after the other."""

    def __init__(
        self, intake: Intake, regime: Regime, peers: PeerSource | None, telemetry: Telemetry, *, data_timeout_s: float
    ) -> None:
        self._intake, self._regime, self._peers = intake, regime, peers
        self._telemetry, self._data_timeout_s = telemetry, data_timeout_s

    def ask_again(self) -> None:
        """After a resume: ask once more for everything that the restored regime awaits."""
        self._ask(self._regime.awaited())

    def prepare(self, step: int, rng: np.random.Generator, stopping: Callable[[], bool]) -> PreparedStep | None:
        """The next step's order, or None when the role is stopping.

        Raises PeerLost when no batch came together within the time limit.
        """
        started_s = time.monotonic()
        groups = self._gather(step, stopping)
        if groups is None:
            return None
        waited_s = time.monotonic() - started_s
        received = self._peers.take() if self._peers else []
        absorbed = self._regime.absorb(groups, received, step=step, rng=rng)
        if self._peers and absorbed.forget:
            self._peers.unwatch(absorbed.forget)
        values = batch_values(groups, step) | dict(absorbed.counts) | self._drops()
        values["time/wait_for_groups_s"] = waited_s
        values["exchange/lost_s"] = self._peers.lost_s() if self._peers else 0.0
        return PreparedStep(_order(absorbed), values, groups, absorbed.rescued, _num_tokens(groups), absorbed.shared)

    def _gather(self, step: int, stopping: Callable[[], bool]) -> list[ScoredGroup] | None:
        deadline_s = time.monotonic() + self._data_timeout_s
        whom = f"workers of {self._telemetry.policy}"
        with self._telemetry.awaiting("groups", whom=whom, bound_s=self._data_timeout_s):
            while not stopping():
                for group in self._intake.arrivals():
                    self._ask(self._regime.asks(group))
                batch = self._intake.next_batch(step)
                if batch is not None:
                    return batch
                if time.monotonic() > deadline_s:
                    raise PeerLost(f"no batch for step {step} within {self._data_timeout_s:.0f} s from the {whom}")
                self._intake.wait_for_change(WAIT_SLICE_S)
        return None

    def _ask(self, prompt_ids: list[str]) -> None:
        how = self._regime.asking
        if self._peers and how and prompt_ids:
            self._peers.fetch(prompt_ids, limit=how.limit, max_age_versions=how.max_age_versions, watch=how.watch)

    def _drops(self) -> dict[str, float]:
        counts = self._intake.take_counts()
        return {
            "staleness/dropped_groups": counts.get("stale_groups", 0),
            "staleness/dropped_tokens": counts.get("stale_tokens", 0),
            "groups/granted_again": counts.get("granted_again", 0),
            "groups/repeated": counts.get("repeated", 0),
            "groups/unsound": counts.get("unsound", 0),
        }


def batch_values(groups: Sequence[ScoredGroup], step: int) -> dict[str, float]:
    """Reward, length and staleness of a batch's own groups at learner step `step`."""
    rewards = np.array([[answer.reward for answer in group.answers] for group in groups])
    passed = rewards >= 1.0
    answers = [answer for group in groups for answer in group.answers]
    now = Version(0, step)
    staleness = [age_versions(now, Version(0, group.oldest.step)) for group in groups]
    return {
        "reward/mean": float(rewards.mean()),
        "reward/all_failed_share": float((~passed).all(1).mean()),
        "reward/all_passed_share": float(passed.all(1).mean()),
        "tokens/answer_mean": float(np.mean([len(answer.token_ids) // 4 for answer in answers])),
        "tokens/truncated_share": float(np.mean([not answer.finished for answer in answers])),
        "staleness/mean_versions": float(np.mean(staleness)),
        "staleness/max_versions": float(np.max(staleness)),
    }


def _num_tokens(groups: Sequence[ScoredGroup]) -> int:
    return sum(len(answer.token_ids) // 4 for group in groups for answer in group.answers)


def _order(absorbed: Absorbed) -> StepOrder:
    return StepOrder(absorbed.examples, absorbed.denominators)
