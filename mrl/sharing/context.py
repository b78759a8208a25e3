"""The context of a sharing regime: the policy that it serves, and the other policies of the run."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from mrl.alignment.receiver import Receiver
from mrl.config.replay_table import replay_of
from mrl.config.schema import RunConfig
from mrl.sharing.own_objective import OwnObjective, own_objective
from mrl.sharing.peer_episodes import EpisodeRenderer
from mrl.sharing.recorder import SharingRecorder


@dataclass(frozen=True, slots=True)
class SharingContext:
    """The policy that a sharing regime serves, and all else that the regime needs to know of the run."""

    policy: str
    objective: OwnObjective
    receiver: Receiver
    """Translates peers' texts into the policy's tokens."""
    peers: tuple[str, ...] = ()
    """The other policies that learn."""
    others: tuple[str, ...] = ()
    """All other policies, frozen ones included."""
    replayed: tuple[str, ...] = ()
    """Policies of a run that ended, whose records are there from the beginning; no more come."""
    success_reward: float = 1.0
    """An answer is a success when its reward is at least this."""
    voted: Mapping[str, float] = field(default_factory=dict)
    """Task whose rewards come from a vote -> reward of an answer out of which no choice was read."""
    max_turn_tokens: int = 0
    """Token limit of one turn, where the objective's limit is that of whole episodes; 0: the objective's limit."""
    max_staleness_versions: int = sys.maxsize
    """Staleness in versions beyond which own groups are not trained on."""
    renderer: EpisodeRenderer | None = None
    """Writes the episodes of peers in the policy's tokens; None in a run without episodes."""
    recorder: SharingRecorder = field(default_factory=SharingRecorder)
    """Notes every answer of a peer that the regime reads."""


def sharing_context(
    config: RunConfig, policy: str, receiver: Receiver, renderer: EpisodeRenderer | None = None
) -> SharingContext:
    """Return the context of `policy` in the run that `config` describes; `renderer` where there are episodes."""
    table, replay = config.policies[policy], replay_of(config.sharing)
    turn = table.rollout.max_new_tokens
    others = tuple(sorted(set(config.policies) - {policy}))
    return SharingContext(
        policy=policy,
        objective=own_objective(
            table.objective, max_answer_tokens=_longest_answer_tokens(config, policy), max_turn_tokens=turn
        ),
        receiver=receiver,
        peers=tuple(other for other in others if not config.policies[other].frozen),
        others=others,
        replayed=replay.sources if replay is not None else (),
        success_reward=config.run.success_reward,
        voted={name: task.failed_reward for name, task in config.tasks.items() if task.is_voted},
        max_turn_tokens=turn,
        max_staleness_versions=table.learner.max_staleness_versions,
        renderer=renderer,
    )


def _longest_answer_tokens(config: RunConfig, policy: str) -> int:
    """Return the most tokens that the policy samples for one answer, or in the turns of one episode."""
    turn = config.policies[policy].rollout.max_new_tokens
    played = [task for task in config.tasks.values() if task.is_played]
    return max([turn, *(min(turn * task.max_turns, task.max_episode_tokens or sys.maxsize) for task in played)])
