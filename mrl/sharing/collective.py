"""Rewards by the collective's vote, under a regime (RLCCF, arXiv 2508.12338): for tasks with `verifier = "collective"`.

    own group arrives ──▶ every peer has voted on its prompt, or the patience is over ──▶ rewards ──▶ the regime absorbs

Workers publish the choices that were read out of their answers (vote records) and reward nothing. The learner elects a
choice when the group is trained, and only then are there rewards: those of the own group for the regime, and those of
the peers' groups, which follow from their votes, for a regime that reads rewards. Without a peer's vote the own
majority decides. Groups of other tasks pass through.

Reads of a peer: the choices of one group (vote records). On the wire, per prompt: about 240 bytes, and 17 per answer.
Costs: nothing; no text crosses, so nothing is aligned and nothing is lost.

    p_m(a) = share of the answers of policy m with choice a,   SC_m = max_a p_m(a),   V(a) = sum_m SC_m p_m(a)

The choice with the largest V is taken for right. SC is the self-consistency of a policy on the prompt: a policy that
always makes the same choice counts for more than one that makes another choice every time. This is the rule of the
paper's abstract; its equations were not at hand, so none is cited. Two rules are those of mrl: answers out of which
nothing was read count in a policy's total and for nothing else, and a tie decides nothing.

Shapes: G choices per policy, one for each answer: a digest of the text that was read out of it, or "" for nothing.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np

from mrl.records.experience import Experience, ExperienceRecord, Received, ValueRecord, VoteRecord, kind_of
from mrl.records.rollouts import ScoredGroup
from mrl.sharing.context import SharingContext
from mrl.sharing.peer_groups import PeerGroupParameters, PeerGroupReader
from mrl.sharing.regime import AbsorbResult, Author, PeerQuery, Regime


class CollectiveParameters(PeerGroupParameters):
    """The `[sharing.collective]` table: the bounds of a group's wait for the votes of peers."""


class CollectiveRegime(PeerGroupReader):
    """A regime that wraps another one and gives it the rewards of the vote, in tasks that are voted on."""

    def __init__(self, regime: Regime, parameters: CollectiveParameters, context: SharingContext) -> None:
        super().__init__("vote", parameters, context)
        self._regime, self.components = regime, regime.components
        self._reads_rewards = regime.asking is not None
        if regime.asking is not None:
            kinds, age = ("vote", *regime.asking.kinds), regime.asking.max_age_versions
            oldest = None if age is None else max(age, parameters.max_age_versions)
            self.asking: PeerQuery | None = replace(regime.asking, kinds=kinds, max_age_versions=oldest)

    def publish(self, group: ScoredGroup, author: Author) -> list[ExperienceRecord]:
        """Return the votes of a group; for a group of another task, the records of the regime."""
        if not self._is_voted(group):
            return self._regime.publish(group, author)
        return [VoteRecord(**author.tags(group), choices=_choices(group))]

    def asks(self, group: ScoredGroup) -> list[str]:
        """Return the prompt of every group that is voted on; for other groups, the prompts that the regime asks for."""
        asked = self._regime.asks(group)
        return super().asks(group) if self._is_voted(group) else asked

    def awaited(self) -> list[str]:
        """Return the prompts of own groups that were not trained yet, and the prompts that the regime awaits."""
        return list(dict.fromkeys([*super().awaited(), *self._regime.awaited()]))

    def hear(self, received: Sequence[Received], *, step: int) -> None:
        """Keep the newest vote of every peer, and give other records to the regime. Rewards that peers tell for voted
        tasks are ignored.
        """
        is_own = [kind_of(item.record) == "vote" or item.record.task in self.context.voted for item in received]
        super().hear(list(itertools.compress(received, is_own)), step=step)
        self._regime.hear([item for item, is_vote in zip(received, is_own, strict=True) if not is_vote], step=step)

    def is_settled(self, group: ScoredGroup) -> bool:
        """Whether every peer has voted on the prompt; for a group of another task, whether the regime says so."""
        return super().is_settled(group) if self._is_voted(group) else self._regime.is_settled(group)

    def absorb(self, groups: Sequence[ScoredGroup], *, step: int, rng: np.random.Generator) -> AbsorbResult:
        """Return the regime's rows for the groups with their rewards; `AbsorbResult.groups` then has these groups."""
        counts: defaultdict[str, float] = defaultdict(float)
        settled = [self._settled(group, step, counts) if self._is_voted(group) else group for group in groups]
        absorbed = self._regime.absorb(settled, step=step, rng=rng)
        shares = {f"vote/{name}": counts[name] / counts["groups"] for name in SHARES if counts["groups"]}
        own = self.peer_groups.take_counts()
        ignored = {name: own[name] + absorbed.counts.get(name, 0.0) for name in own if "/ignored_" in name}
        return replace(
            absorbed,
            groups=settled,
            forget=list(dict.fromkeys([*absorbed.forget, *self.peer_groups.take_forgotten()])),
            counts={**own, **absorbed.counts, **ignored, **shares},  # a regime's own, where it asks peers
        )

    def state(self) -> dict[str, Any]:
        """Return the totals behind the cumulative rates, and the regime's own state."""
        return super().state() | {"regime": self._regime.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`."""
        super().restore(state)
        self._regime.restore(state["regime"])

    def _is_voted(self, group: ScoredGroup) -> bool:
        return group.task in self.context.voted

    def _settled(self, group: ScoredGroup, step: int, counts: defaultdict[str, float]) -> ScoredGroup:
        """Return the group with rewards. A regime that reads peers' rewards hears the rewards that follow from their
        votes.
        """
        own = _choices(group)
        votes = [item.record for item in self.peer_groups.take(group.prompt_id) if isinstance(item.record, VoteRecord)]
        elected, failed_reward = winner([own, *(vote.choices for vote in votes)]), self.context.voted[group.task]
        counts["groups"] += 1
        counts["complete_share"] += {vote.source for vote in votes} >= set(self.context.peers)
        counts["tied_share"] += not elected
        counts["overruled_share"] += winner([own]) not in ("", elected)
        counts["self_consistency"] += float(self_consistency(own))
        if self._reads_rewards:
            values = [_valued(vote, agreement(vote.choices, elected, failed_reward=failed_reward)) for vote in votes]
            self._regime.hear([Received(value, 0) for value in values], step=step)
        rewards = agreement(own, elected, failed_reward=failed_reward)
        answers = [
            msgspec.structs.replace(answer, reward=reward)
            for answer, reward in zip(group.answers, rewards, strict=True)
        ]
        return msgspec.structs.replace(group, answers=answers)


SHARES = ("complete_share", "tied_share", "overruled_share", "self_consistency")


def _choices(group: ScoredGroup) -> list[str]:
    return [answer.choice for answer in group.answers]


def _valued(vote: VoteRecord, rewards: list[float]) -> ValueRecord:
    """Return a vote as the record of rewards that follows from it, once a choice is elected."""
    tags = {name: getattr(vote, name) for name in Experience.__struct_fields__}
    return ValueRecord(**tags, rewards=rewards)


def self_consistency(choices_G: Sequence[str]) -> Fraction:
    """Return SC: the share of the answers with the most frequent choice; 0 where no answer has a choice."""
    return Fraction(max(_counts(choices_G).values(), default=0), max(1, len(choices_G)))


def winner(votes: Iterable[Sequence[str]]) -> str:
    """Return the choice that the policies' choices elect; "" in a tie, and where no answer has a choice.

    Votes are added as fractions: the order of the policies does not matter, not even by rounding.
    """
    weight: defaultdict[str, Fraction] = defaultdict(Fraction)
    for choices_G in votes:
        consistency = self_consistency(choices_G)
        for choice, count in _counts(choices_G).items():
            weight[choice] += consistency * Fraction(count, len(choices_G))
    largest = max(weight.values(), default=None)
    elected = [choice for choice, total in weight.items() if total == largest]
    return elected[0] if len(elected) == 1 else ""


def agreement(choices_G: Sequence[str], elected: str, *, failed_reward: float) -> list[float]:
    """Return [G] rewards: 1 for the elected choice, 0 for another, `failed_reward` for an answer without a choice.

    Where none is elected, all are rewarded alike.
    """
    if not elected:
        return [0.0] * len(choices_G)
    return [float(choice == elected) if choice else failed_reward for choice in choices_G]


def _counts(choices_G: Sequence[str]) -> Counter[str]:
    return Counter(choice for choice in choices_G if choice)
