"""The context of a sharing regime: the policy that it serves, and who else is in the run."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from mrl.alignment.receiver import Receiver
from mrl.config.replay_table import replay_of
from mrl.config.schema import RunConfig
from mrl.sharing.own_objective import OwnObjective, own_objective
from mrl.sharing.peer_episodes import EpisodeSpelling
from mrl.sharing.recorder import SharingRecorder


@dataclass(frozen=True, slots=True)
class SharingContext:
    """One policy of a run, as its sharing regime sees it."""

    policy: str
    objective: OwnObjective
    receiver: Receiver
    """Expresses peer texts in the policy's tokens."""
    peers: tuple[str, ...] = ()
    """The other policies that learn."""
    others: tuple[str, ...] = ()
    """All other policies, frozen ones included."""
    replayed: tuple[str, ...] = ()
    """Sources of a run that ended: their records are there from the beginning, and no more come."""
    success_reward: float = 1.0
    """An answer is a success when its reward is at least this."""
    voted: Mapping[str, float] = field(default_factory=dict)
    """Tasks whose answers are voted on -> the reward of an answer that says nothing."""
    max_turn_tokens: int = 0
    """Of an answer of one turn, where the objective's limit is that of episodes; 0: the objective's."""
    max_staleness_versions: int = sys.maxsize
    """Own groups that are staler are not trained on."""
    spelling: EpisodeSpelling | None = None
    """Says the episodes of peers in the policy's tokens; None in a run without episodes."""
    recorder: SharingRecorder = field(default_factory=SharingRecorder)
    """Hears of every answer of a peer that the regime reads."""


def sharing_context(
    config: RunConfig, policy: str, receiver: Receiver, spelling: EpisodeSpelling | None = None
) -> SharingContext:
    """The context of `policy` in the run that `config` describes; `spelling` where there are episodes."""
    table, replay = config.policies[policy], replay_of(config.sharing)
    others = tuple(sorted(set(config.policies) - {policy}))
    return SharingContext(
        policy=policy,
        objective=own_objective(table.objective, max_answer_tokens=_longest_answer_tokens(config, policy)),
        receiver=receiver,
        peers=tuple(other for other in others if not config.policies[other].frozen),
        others=others,
        replayed=replay.sources if replay is not None else (),
        success_reward=config.run.success_reward,
        voted={name: task.failed_reward for name, task in config.tasks.items() if task.is_voted},
        max_turn_tokens=table.rollout.max_new_tokens,
        max_staleness_versions=table.learner.max_staleness_versions,
        spelling=spelling,
    )


def _longest_answer_tokens(config: RunConfig, policy: str) -> int:
    """The most tokens that the policy samples for one answer, or in the turns of one episode."""
    turn = config.policies[policy].rollout.max_new_tokens
    played = [task for task in config.tasks.values() if task.is_played]
    return max([turn, *(min(turn * task.max_turns, task.max_episode_tokens or sys.maxsize) for task in played)])
