"""Curriculum: a policy skips visits of the prompt order to prompts that it always or never solves.

All policies walk one order, and each skips by the rewards of its own answers. Which of the skippable visits are kept
follows from the run's seed and the position alone, so that two policies that both keep some of them keep the same ones
and meet there. A skipped visit samples nothing. A prompt is judged by the success rate of its newest group. A group
counts from the next batch on, so that the order in which groups came in makes no difference.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mrl.config.schema import RunConfig
from mrl.config.task_tables import PoolTable
from mrl.records.rollouts import ScoredGroup


class NewestGroup(NamedTuple):
    """Success rate of one group, at its position of the order."""

    position: int
    prompt_id: str
    rate: float


@dataclass
class Curriculum:
    """Success rates of one policy on the prompts of its pool, and the choice of visits that follows from them."""

    table: PoolTable
    seed: int
    success_reward: float
    num_prompts: int
    """Prompts of the pool: after so many skipped visits in a row the next one is taken in any case."""
    rates: dict[str, float] = field(default_factory=dict)
    """Prompt id -> success rate of its newest group."""
    fresh: list[NewestGroup] = field(default_factory=list)
    """Groups that came in since the newest batch was formed."""

    def takes(self, position: int, prompt_id: str) -> bool:
        """Whether the visit to this prompt at this position is sampled."""
        rate = self.rates.get(prompt_id)
        if rate is None:
            return True
        if rate >= self.table.solved_rate:
            return _drawn(self.seed, position) < self.table.keep_solved
        return rate > self.table.hopeless_rate or _drawn(self.seed, position) < self.table.keep_hopeless

    def note(self, position: int, group: ScoredGroup) -> None:
        """Note a group that came in; it counts from the next batch on."""
        passed = sum(answer.reward >= self.success_reward for answer in group.answers)
        self.fresh.append(NewestGroup(position, group.prompt_id, passed / len(group.answers)))

    def formed(self) -> None:
        """Note that a batch is formed: groups that came in before count now, that of the highest position last."""
        self.rates |= {one.prompt_id: one.rate for one in sorted(self.fresh)}
        self.fresh.clear()

    def values(self) -> dict[str, float]:
        """Return the shares of the pool's prompts whose newest group says that they are solved, or hopeless."""
        counts = Counter(
            "solved" if rate >= self.table.solved_rate else "hopeless" if rate <= self.table.hopeless_rate else ""
            for rate in self.rates.values()
        )
        return {f"curriculum/{name}_share": counts[name] / self.num_prompts for name in ("solved", "hopeless")}

    def state(self, open_positions: Sequence[int]) -> dict[str, Any]:
        """Return its part of a checkpoint; groups of `open_positions` are sampled again, and counted then."""
        left = [list(one) for one in sorted(self.fresh) if one.position not in set(open_positions)]
        return {"rates": dict(sorted(self.rates.items())), "fresh": left}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        self.rates, self.fresh = dict(state["rates"]), [NewestGroup(*one) for one in state["fresh"]]


def curriculum_of(config: RunConfig, num_prompts: int) -> Curriculum | None:
    """Return the curriculum for a pool of `num_prompts` training prompts; None where no visit may be skipped."""
    if min(config.pool.keep_solved, config.pool.keep_hopeless) == 1:
        return None
    return Curriculum(config.pool, config.run.seed, config.run.success_reward, num_prompts)


def _drawn(seed: int, position: int) -> float:
    """Return a number in [0, 1), the same for every policy of the run at this position."""
    digest = hashlib.blake2b(f"curriculum:{seed}:{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64
