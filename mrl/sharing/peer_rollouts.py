"""Whole groups of peers as training rows: the common part of PRP, HACPO and GRAFT.

An answer that cannot be expressed in own tokens is not trained on; its reward still counts in baselines, because a
reward needs no tokenizer. An objective that takes reward from overlong answers takes it from peers' answers too, by
their length in own tokens; otherwise own and peers' rewards could not be compared.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from mrl.records.experience import ExperienceRecord, RolloutRecord
from mrl.records.rollouts import ScoredGroup
from mrl.sharing.advantages import Float64s
from mrl.sharing.context import SharingContext
from mrl.sharing.own_examples import own_advantages
from mrl.sharing.own_traces import rollout_record
from mrl.sharing.peer_groups import PeerGroupParameters, PeerGroupReader
from mrl.sharing.peer_traces import PeerTrace, peer_traces
from mrl.sharing.regime import AbsorbResult, Author, TrainingExample


def peer_rewards(traces: Sequence[PeerTrace], context: SharingContext) -> Float64s:
    """Return [N] rewards of N answers of peers, less what overlong answers lose.

    An answer that is too long for own tokens counts as long as the limit.
    """
    rewards = np.array([trace.answer.reward for trace in traces], dtype=np.float64)
    limits = [context.objective.limit(is_episode=trace.is_episode) for trace in traces]
    lengths = [
        limit if trace.examined.rejected == "too_long" else trace.num_sampled_tokens
        for limit, trace in zip(limits, traces, strict=True)
    ]
    return context.objective.penalised(rewards, lengths, limits)


class RolloutReader(PeerGroupReader):
    """The part of a regime that publishes its groups whole and trains on the groups of peers."""

    def __init__(self, parameters: PeerGroupParameters, context: SharingContext) -> None:
        super().__init__("rollout", parameters, context)

    def publish(self, group: ScoredGroup, author: Author) -> list[ExperienceRecord]:
        """Return a record of every group, failed ones too: peers need them for their baselines and balance."""
        context = self.context
        return [rollout_record(group, author, context.receiver, own_advantages(group, context.objective))]

    def take_rollouts(self, groups: Sequence[ScoredGroup]) -> list[list[RolloutRecord]]:
        """Return, for each own group, the groups of peers on its prompt, by name of the peer."""
        taken = [self.peer_groups.take(group.prompt_id) for group in groups]
        return [[item.record for item in of_group if isinstance(item.record, RolloutRecord)] for of_group in taken]

    def take_traces(self, groups: Sequence[ScoredGroup], *, needs_trace: bool) -> list[list[PeerTrace]]:
        """Return, for each own group, all answers of peers to its prompt, in own tokens. Answers of one peer stand
        together.

        With `needs_trace` an answer without sound log-probs is not usable.
        """
        return self.traces_of(self.take_rollouts(groups), needs_trace=needs_trace)

    def traces_of(self, rollouts: Sequence[Sequence[RolloutRecord]], *, needs_trace: bool) -> list[list[PeerTrace]]:
        """Return, for each list of peers' groups, all their answers in own tokens; `needs_trace` is that of
        `take_traces`.
        """
        read = iter(peer_traces([one for told in rollouts for one in told], self.context, needs_trace=needs_trace))
        return [[trace for _ in told for trace in next(read)] for told in rollouts]

    def absorbed(
        self,
        examples: list[TrainingExample],
        denominators: dict[str, float],
        *,
        peer_lengths: Sequence[int],
        counts: Mapping[str, float] | None = None,
        expansion: float = 1.0,
    ) -> AbsorbResult:
        """Return the result of `absorb`, with the counts of this step.

        `peer_lengths` are the lengths of all usable answers of peers, in own tokens.
        """
        sizes = {"sharing/peer_rows": float(len(peer_lengths)), "sharing/peer_tokens": float(sum(peer_lengths))}
        return AbsorbResult(
            examples,
            denominators,
            forget=self.peer_groups.take_forgotten(),
            counts=self.peer_groups.take_counts() | sizes | dict(counts or {}),
            expansion=expansion,
        )
