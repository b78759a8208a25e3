"""GRAFT ("Learning beyond what you sample"): a failed group is replaced by the peer's whole group on the same prompt.

    select   C(A -> B) = { x : every answer of B failed, and some but not all of A's succeeded }
    balance  m = min(|C(A -> B)|, |C(B -> A)|); each keeps its m prompts with the most successes, ties included
    weight   s = exp(mean log pi_B,old - mean log pi_A) over the row;   w = 1[s > floor] min(s, 1)
    term     w min(rho a, clip(rho) a), rho = pi_theta / pi_B,old, a = the advantage that the row had at its source
    order    rows of peers are trained last

The denominator counts all rows, those with w = 0 included, so that it is known before the first backward; the paper
removes these. Without `balance` a direction keeps all its prompts. So does the direction from a run that ended, which
has no other direction (`sharing.replay`). Only successes of A whose text crosses count: an episode may be too long, or
its agent has rewritten it. A group of A without any of them is not selected.

Reads of a peer: whole groups (rollout records). On the wire, per prompt: about 240 bytes, and for every answer 125, its
text and 13 per token; for an episode 30, and for each of its turns 145, its texts and 13 per token.
Costs: forward and backward over the grafted rows, where the failed groups that they replace were left out of training.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import Field

from mrl.config.table import Tuned
from mrl.objectives.specs import Grafted
from mrl.records.experience import MAX_COMPLETION_BYTES, RolloutRecord, SharedAnswer
from mrl.records.rollouts import Answer, ScoredGroup
from mrl.sharing.context import SharingContext
from mrl.sharing.own_examples import own_examples, prompt_of
from mrl.sharing.own_objective import POLICY_GRADIENT
from mrl.sharing.own_traces import answer_bytes
from mrl.sharing.peer_groups import PeerGroupParameters
from mrl.sharing.peer_rollouts import RolloutReader
from mrl.sharing.peer_traces import PeerTrace, mean_logprobs, peer_traces
from mrl.sharing.regime import AbsorbResult, Component, TrainingExample

GRAFTED = "grafted"


class GraftParameters(PeerGroupParameters):
    """The `[sharing.graft]` table."""

    floor: Annotated[float, Tuned((0.5, 0.8, 0.95))] = Field(0.8, ge=0)
    """Rows whose ratio of mean likelihoods is not above this are not trained on (delta)."""
    balance: Annotated[bool, Tuned((True, False))] = True
    """Whether both directions of a pair graft about equally many prompts."""


class GraftRegime(RolloutReader):
    """Trains on own groups, with failed groups replaced by peers' groups."""

    def __init__(self, parameters: GraftParameters, context: SharingContext) -> None:
        super().__init__(parameters, context)
        self.parameters = parameters
        own = context.objective.component()
        graft = Grafted(replace(context.objective.token_clip(), correction=None), floor=parameters.floor)
        self.components = (own, Component(GRAFTED, graft, 1.0, own.denominator, "peer", own.regularizer))

    def absorb(self, groups: Sequence[ScoredGroup], *, step: int, rng: np.random.Generator) -> AbsorbResult:
        """Return own rows of the groups that stay, and the rows of the grafted groups last."""
        objective = self.context.objective
        heard = self.take_rollouts(groups)
        bound = self.context.success_reward
        balance = self.parameters.balance
        one_way = self.context.replayed
        chosen = choose_grafts(groups, heard, balance=balance, success_reward=bound, one_way=one_way)
        own = own_examples([group for place, group in enumerate(groups) if place not in chosen], self.context)
        places = sorted(chosen)
        read = peer_traces([chosen[place] for place in places], self.context, needs_trace=True)
        grafted = [
            self._example(groups[place], trace)
            for place, traces in zip(places, read, strict=True)
            for trace in traces
            if trace.is_usable
        ]
        lengths = [row.num_trained_tokens for row in grafted]
        denominator = objective.denominator([*own.lengths, *lengths])
        return self.absorbed(
            own.examples + grafted,
            {POLICY_GRADIENT: denominator, GRAFTED: denominator},
            peer_lengths=lengths,
            counts={"sharing/grafted_prompts": float(len(chosen))},
        )

    def _example(self, group: ScoredGroup, trace: PeerTrace) -> TrainingExample:
        return trace.example(
            prompt_of(group),
            component=GRAFTED,
            advantage=trace.advantage,
            weights=self.context.objective.weights(trace.num_tokens),
            behaviour=mean_logprobs(trace.aligned),
            phase=1,
        )


def choose_grafts(
    groups: Sequence[ScoredGroup],
    heard: Sequence[Sequence[RolloutRecord]],
    *,
    balance: bool,
    success_reward: float = 1.0,
    one_way: Collection[str] = (),
) -> dict[int, RolloutRecord]:
    """Return the peers' groups that replace own groups: place of the own group -> group of a peer.

    An answer succeeded when its reward is at least `success_reward`; only successes whose text crosses count. Balance
    is kept per peer, but not for sources in `one_way`: nobody grafts onto a run that ended. Where several peers could
    replace a group, the one with the most successes does, and of equals the first by name.
    """

    def num_told(group: ScoredGroup | RolloutRecord) -> int:
        """Return the number of successes that cross, of a group in which some and not all succeeded; else 0."""
        passed = [answer for answer in group.answers if answer.reward >= success_reward]
        return sum(map(_crosses, passed)) if len(passed) < len(group.answers) else 0

    def has_failed(group: ScoredGroup | RolloutRecord) -> bool:
        return all(answer.reward < success_reward for answer in group.answers)

    found: dict[int, list[tuple[int, RolloutRecord]]] = {}
    for source in sorted({record.source for records in heard for record in records}):
        pairs = [(place, one) for place, records in enumerate(heard) for one in records if one.source == source]
        forward = [(told, place, one) for place, one in pairs if has_failed(groups[place]) and (told := num_told(one))]
        backward = sum(has_failed(one) and num_told(groups[place]) > 0 for place, one in pairs)
        limit = min(len(forward), backward) if balance and source not in one_way else len(forward)
        for passed, place, one in _top(forward, limit):
            found.setdefault(place, []).append((passed, one))
    return {place: max(candidates, key=lambda item: item[0])[1] for place, candidates in found.items()}


def _crosses(answer: Answer | SharedAnswer) -> bool:
    """Whether the text of an own answer goes to peers, or that of a peer's answer came here."""
    if isinstance(answer, SharedAnswer):
        return bool(answer.turns or answer.completion)
    return 0 < answer_bytes(answer) <= MAX_COMPLETION_BYTES


def _top(found: list[tuple[int, int, RolloutRecord]], limit: int) -> list[tuple[int, int, RolloutRecord]]:
    """Return the `limit` entries with the most successes. Entries equal to the last of them are taken too."""
    if limit <= 0:
        return []
    least = sorted((passed for passed, _, _ in found), reverse=True)[limit - 1]
    return [entry for entry in found if entry[0] >= least]
