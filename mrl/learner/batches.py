"""The first rank's work before every step: gather own groups, hear the peers, let the regime assign credit."""

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mrl.config.schema import RunTable
from mrl.exchange.client import ExchangeClient
from mrl.learner.asynchronous_batching import Batching, Stopping
from mrl.learner.intake import Intake
from mrl.learner.ledger import UNBEGUN
from mrl.learner.prompts.reuse import ReuseBuffer
from mrl.learner.step_order import StepOrder
from mrl.records.rollouts import Answer, ScoredGroup
from mrl.records.version import Version, age_versions
from mrl.sharing.regime import AbsorbResult, Regime, Rescue, check_absorbed


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step that is ready to be trained, and its metrics."""

    order: StepOrder
    values: dict[str, float]
    groups: list[ScoredGroup]
    """Own groups that were sampled for the step, without those that are trained on again."""
    rescued: Sequence[Rescue]
    tokens: int
    """Sampled tokens of `groups`."""


class BatchMaker:
    """Prepares one step after the other; `batching` gathers their own groups."""

    def __init__(
        self,
        intake: Intake,
        regime: Regime,
        peers: ExchangeClient | None,
        batching: Batching,
        run: RunTable,
        *,
        reuse: ReuseBuffer | None = None,
    ) -> None:
        """Without `reuse` every group is trained on once."""
        self._intake, self._regime, self._peers, self._batching = intake, regime, peers, batching
        self._run, self._reuse = run, reuse

    def begin(self) -> None:
        """Begin, once the first weights are published; after a resume, ask again for prompts that the regime awaits."""
        self._batching.begin()

    def prepare(self, step: int, rng: np.random.Generator, stopping: Stopping) -> PreparedStep | None:
        """Return the next step, or None when the role is stopping.

        Raises PeerLost when no batch came together within the time limit, TaskError when verifiers failed on too many
        answers, PluginError when a regime of the user's own returned what is no batch.
        """
        gathered = self._batching.gather(step, stopping)
        if gathered is None:
            return None
        failures = self._intake.take_failures()
        failures.check(self._run.max_verifier_failures, step=step + 1)
        began_s = time.monotonic()
        groups, reused = gathered.groups, self._draw(gathered.groups, step, rng)
        absorbed = self._regime.absorb([*groups, *reused], step=step, rng=rng)
        check_absorbed(absorbed, self._regime.components)
        if self._peers and absorbed.forget:
            self._peers.unwatch(absorbed.forget)
        self._intake.offer(absorbed.continuations)
        groups = list(absorbed.groups)[: len(groups)] or groups
        values = (
            batch_values(groups, step, reused=reused, success_reward=self._run.success_reward)
            | dict(absorbed.counts)
            | self._drops()
            | dict(gathered.values)
        )
        values["verify/failed_share"] = failures.share
        if self._reuse is not None:
            values["groups/reused"] = len(reused)
        values["exchange/lost_s"] = self._peers.lost_s() if self._peers else 0.0
        order = _order(absorbed)
        values["time/form_s"] = time.monotonic() - began_s
        return PreparedStep(
            order=order,
            values=values,
            groups=groups,
            rescued=absorbed.rescued,
            tokens=_num_tokens(groups),
        )

    def state(self) -> dict[str, Any]:
        """Return its part of a checkpoint; empty where every group is trained on once."""
        return {} if self._reuse is None else {"reuse": self._reuse.state()}

    def _draw(self, fresh: Sequence[ScoredGroup], step: int, rng: np.random.Generator) -> list[ScoredGroup]:
        """Draw earlier groups that complete the batch; `fresh` groups may be drawn from the next step on."""
        if self._reuse is None:
            return []
        drawn = self._reuse.draw(step, rng)
        self._reuse.add(fresh)
        return drawn

    def _drops(self) -> dict[str, float]:
        counts, window_groups = self._intake.take_counts(), self._intake.window_groups
        window = {} if window_groups is None else {"groups/window": window_groups}
        curriculum = self._intake.curriculum_values
        if curriculum:
            curriculum |= {"curriculum/skipped_prompts": counts.get("skipped_prompts", 0)}
        unbegun = {f"prefix/{name}": count for name, count in counts.items() if name.startswith(UNBEGUN)}
        return (
            window
            | curriculum
            | unbegun
            | {
                "staleness/dropped_groups": counts.get("stale_groups", 0),
                "staleness/dropped_tokens": counts.get("stale_tokens", 0),
                "groups/granted_again": counts.get("granted_again", 0),
                "groups/repeated": counts.get("repeated", 0),
                "groups/unsound": counts.get("unsound", 0),
                "groups/uniform_dropped": counts.get("uniform_groups", 0),
                "groups/uniform_dropped_tokens": counts.get("uniform_tokens", 0),
                "groups/uniform_taken": counts.get("uniform_taken", 0),
            }
        )


def batch_values(
    groups: Sequence[ScoredGroup], step: int, *, reused: Sequence[ScoredGroup] = (), success_reward: float = 1.0
) -> dict[str, float]:
    """Return metrics of a batch's own groups at learner step `step`: reward, length, staleness, episodes.

    Staleness includes that of `reused` groups. The other metrics tell how well the policy does now, and included those
    groups when they were fresh. Rewards are of groups that began at their start states, or of continuations where
    there are none.
    """
    begun = [group for group in groups if group.continuation is None] or groups
    rewards = np.array([[answer.reward for answer in group.answers] for group in begun])
    passed = rewards >= success_reward
    answers = [answer for group in groups for answer in group.answers]
    now = Version(0, step)
    staleness = [age_versions(now, Version(0, group.oldest.step)) for group in (*groups, *reused)]
    return {
        "reward/mean": float(rewards.mean()),
        "reward/all_failed_share": float((~passed).all(1).mean()),
        "reward/all_passed_share": float(passed.all(1).mean()),
        "tokens/answer_mean": float(np.mean([answer.num_sampled_tokens for answer in answers])),
        "tokens/truncated_share": float(np.mean([answer.is_cut for answer in answers])),
        "staleness/mean_versions": float(np.mean(staleness)),
        "staleness/max_versions": float(np.max(staleness)),
        **{f"staleness/share/{versions}": share for versions, share in _shares(staleness)},
        **_named_means(begun),
        **_episode_values([answer for answer in answers if answer.segments]),
    }


def _episode_values(episodes: Sequence[Answer]) -> dict[str, float]:
    """Return metrics of episodes: turns, given tokens, rows, shares of each ending; empty without episodes."""
    if not episodes:
        return {}
    turns = [sum(segment.is_sampled for segment in episode.segments) for episode in episodes]
    given = [len(episode.token_ids) // 4 - episode.num_sampled_tokens for episode in episodes]
    endings = Counter(episode.ending for episode in episodes)
    return {
        "episodes/turns_mean": float(np.mean(turns)),
        "episodes/given_tokens_mean": float(np.mean(given)),
        "episodes/rows_mean": float(np.mean([1 + sum(one.begins_row for one in e.segments) for e in episodes])),
        "episodes/rewritten_share": float(np.mean([episode.is_rewritten for episode in episodes])),
        "episodes/bare_share": float(np.mean([episode.is_bare for episode in episodes])),
        **{f"episodes/ended/{ending}": count / len(episodes) for ending, count in sorted(endings.items())},
    }


def _named_means(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return the mean of every named part of the reward, over the answers of its task that have it."""
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        for answer in group.answers:
            for name, reward in answer.rewards.items():
                parts[f"reward/named/{group.task}/{name}"].append(reward)
    return {name: float(np.mean(rewards)) for name, rewards in parts.items()}


def _shares(staleness: Sequence[int]) -> list[tuple[int, float]]:
    """Return (staleness in versions, share of the groups with it) pairs, from 0 to the largest."""
    counts = np.bincount(staleness)
    return [(versions, float(count) / len(staleness)) for versions, count in enumerate(counts)]


def _num_tokens(groups: Sequence[ScoredGroup]) -> int:
    return sum(answer.num_sampled_tokens for group in groups for answer in group.answers)


def _order(absorbed: AbsorbResult) -> StepOrder:
    return StepOrder(absorbed.examples, absorbed.denominators, absorbed.expansion)
