"""Counters of a worker since its start.

The allocator measures by them how fast a slot samples groups, and assigns slots by that. Answers to held-out prompts
and to requests outside of episodes are therefore no part of `tokens`, `slot_seconds` and `sampled_tokens`. Time in
which nothing else is in flight is busy time all the same.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from mrl.records.rollouts import ScoredGroup
from mrl.rollout.held_out_answers import InFlight
from mrl.rollout.weight_updates import Installed, Missed, Route


@dataclass
class WorkerTotals:
    """Counters of one worker since it started."""

    started_s: float
    groups: int = 0
    tokens: int = 0
    slot_seconds: float = 0.0
    """Time integral of the number of groups' answers in flight."""
    held_out_slot_seconds: float = 0.0
    """Time integral of the number of answers to held-out prompts in flight."""
    engine_tokens: int = 0
    """Tokens that the engine sampled for all answers, unfinished ones included."""
    sampled_tokens: int = 0
    """The groups' part of `engine_tokens`, estimated by their share of the answers in flight."""
    full_answers: int = 0
    """Answers in flight when the engine was full last, or more that it had since; 0 while it was never full."""
    busy_s: float = 0.0
    idle_s: float = 0.0
    weights_refused: int = 0
    engine_restarts: int = 0
    routes: Counter[Route] = field(default_factory=Counter)
    """Number of weight updates by route."""
    failed_broadcasts: int = 0
    canary_warnings: int = 0
    """Updates whose canary was off although every byte was right."""
    versions_not_told: int = 0
    """Updates that only the canary could prove, while its noise hid the difference from the version before."""
    last: Installed | None = None
    _engine_tokens: int = 0
    _group_tokens: float = 0.0

    def passed(self, seconds: float, before: InFlight, now: InFlight) -> None:
        """Add a stretch of time, at whose ends `before` and `now` were in flight."""
        self.slot_seconds += seconds * (before.of_groups + now.of_groups) / 2
        self.held_out_slot_seconds += seconds * (before.held_out + now.held_out) / 2
        if any(before) or any(now):
            self.busy_s += seconds
        else:
            self.idle_s += seconds

    def sampled(self, engine_tokens: int, in_flight: InFlight) -> None:
        """Take in the engine's count of tokens since its start; a smaller count than before shows a restart."""
        fresh = engine_tokens - (self._engine_tokens if engine_tokens >= self._engine_tokens else 0)
        self._engine_tokens = engine_tokens
        self.engine_tokens += fresh
        has_others = in_flight.held_out or in_flight.plain
        self._group_tokens += fresh * (in_flight.of_groups / sum(in_flight) if has_others else 1.0)
        self.sampled_tokens = int(self._group_tokens)

    def in_flight(self, answers: int, *, is_full: bool) -> None:
        """Take in the number of answers in flight; `is_full` says that the engine has no room for more."""
        if is_full:
            self.full_answers = answers
        elif self.full_answers:
            self.full_answers = max(self.full_answers, answers)

    def installed(self, update: Installed) -> None:
        """Count an update of the weights that has been proved."""
        self.last = update
        self.canary_warnings += bool(update.gap.problem)
        self.versions_not_told += update.compared_share < 1.0 and not update.gap.tells_versions
        self.routes[update.route] += 1
        self.failed_broadcasts += update.route is Route.FILES_INSTEAD

    def missed(self, update: Missed) -> None:
        """Count an update for which the learner did not offer the weights."""
        self.failed_broadcasts += update.lost_broadcast

    def delivered(self, groups: Sequence[ScoredGroup]) -> None:
        """Count groups that went to the learner."""
        self.groups += len(groups)
        self.tokens += sum(span.num_tokens for group in groups for a in group.answers for span in a.versions)

    def values(self, now_s: float) -> dict[str, float]:
        """Return the counters as metrics."""
        life_s = max(now_s - self.started_s, 1e-9)
        values = {
            "rate/rollout_tokens_s": self.tokens / life_s,
            "rollout/groups": self.groups,
            "rollout/tokens": self.tokens,
            "rollout/busy_share": self.busy_s / life_s,
            "rollout/idle_s": self.idle_s,
            "rollout/held_out_share": self.held_out_slot_seconds
            / max(self.slot_seconds + self.held_out_slot_seconds, 1e-9),
            "rollout/engine_restarts": self.engine_restarts,
            "weights/refused": self.weights_refused,
            "weights/by_broadcast": self.routes[Route.BROADCAST],
            "weights/by_adapters": self.routes[Route.ADAPTERS],
            "weights/by_files": self.routes[Route.FILES] + self.routes[Route.FILES_INSTEAD],
            "weights/failed_broadcasts": self.failed_broadcasts,
            "weights/canary_warnings": self.canary_warnings,
            "weights/versions_not_told": self.versions_not_told,
        }
        if self.last is not None:
            values["weights/canary_max_abs_nats"] = self.last.gap.max_nats
            values["weights/canary_mean_abs_nats"] = self.last.gap.mean_nats
            values["weights/canary_noise_nats"] = self.last.gap.noise_nats
            if math.isfinite(self.last.gap.missing_share):
                values["weights/canary_missing_share"] = self.last.gap.missing_share
                values["weights/canary_missing_error"] = self.last.gap.missing_error
            values["weights/compared_share"] = self.last.compared_share
            values["weights/update_s"] = self.last.seconds
        return values
