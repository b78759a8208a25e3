"""Control regimes, for those who compare regimes: each leaves out one possible cause of a regime's effect.

    PYTHONPATH=tools mrl compare CONFIG --regimes independent,sgt,science_controls:OWN_SUCCESSES

OWN_SUCCESSES is `sgt` with as many imitated rows, each of an own success in place of a peer's. Failures are asked for
and rescued as in `sgt`, with the quickstart's parameters or those of `[sharing.OWN_SUCCESSES]`; each rescue is then
replaced by an answer of the batch that the policy itself gave, verified, to another prompt. The gain of `sgt` beyond
this regime comes from the peers' knowledge; the rest is imitation of verified answers, which needs no peer.

MIXED_GROUPS is `xgrpo` in which peers' rewards move the groups that had a success of their own and no others, and
FAILED_GROUPS moves those that failed as a whole and no others.

OWN_MEANS is `hacpo` whose own answers are weighed against their own mean, as in GRPO, beside peers' rows as ever;
OWN_ROWS is `hacpo` with the joint baseline that trains no row of a peer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field

from mrl.records.codec import unpack_array
from mrl.records.rollouts import Answer, ScoredGroup
from mrl.sharing.advantages import Float32s
from mrl.sharing.hacpo import CROSS, HacpoParameters, HacpoRegime, Joint
from mrl.sharing.own_examples import own_advantages, prompt_of
from mrl.sharing.peer_traces import PeerTrace
from mrl.sharing.regime import AbsorbResult, TrainingExample
from mrl.sharing.regimes import RegimeKind
from mrl.sharing.sgt import RESCUE, SgtParameters, SgtRegime
from mrl.sharing.xgrpo import XgrpoParameters, XgrpoRegime


class OwnSuccessesParameters(SgtParameters):
    """The `[sharing.OWN_SUCCESSES]` table: SGT's keys, with the quickstart's values as defaults."""

    lambda_: float = Field(0.6, alias="lambda", ge=0, allow_inf_nan=False)
    normaliser: Literal["prompts", "rescues", "tokens"] = "rescues"


class OwnSuccesses(SgtRegime):
    """SGT whose rescues are own successes, drawn uniformly from the batch. Without a success rescues are left out."""

    def absorb(self, groups: Sequence[ScoredGroup], *, step: int, rng: np.random.Generator) -> AbsorbResult:
        """See Regime. Denominators are those of `sgt`: its normaliser "tokens" still counts the tokens of peers."""
        found = super().absorb(groups, step=step, rng=rng)
        own = [(group, answer) for group in groups for answer in group.answers if self._is_publishable(answer)]
        examples = [row for row in found.examples if row.component != RESCUE]
        if own:
            drawn = rng.integers(len(own), size=len(found.examples) - len(examples))
            examples += [self._own_row(*own[place]) for place in drawn]
        return replace(found, examples=examples, rescued=())

    def _own_row(self, group: ScoredGroup, answer: Answer) -> TrainingExample:
        num_tokens = answer.num_sampled_tokens
        return TrainingExample(
            prompt_token_ids=prompt_of(group),
            answer_token_ids=unpack_array(answer.token_ids, "i4"),
            component=RESCUE,
            advantages=np.zeros(num_tokens, dtype=np.float32),
            weights=np.full(num_tokens, 1 / num_tokens, dtype=np.float32),
            behaviour_logprobs=None,
            prompt_id=group.prompt_id,
            source=self.context.policy,
            is_trained=answer.is_sampled,
        )


class MixedGroups(XgrpoRegime):
    """XGRPO in which peers' rewards do not move a group that failed as a whole."""

    moves_failed = False

    def _advantages(self, group: ScoredGroup, by_peer: Mapping[str, Sequence[float]]) -> Float32s:
        has_failed = all(answer.reward < self.context.success_reward for answer in group.answers)
        return super()._advantages(group, by_peer if has_failed is self.moves_failed else {})


class FailedGroups(MixedGroups):
    """XGRPO in which peers' rewards move only groups that failed as a whole."""

    moves_failed = True


class OwnMeans(HacpoRegime):
    """HACPO without the joint baseline of own answers; a group that failed as a whole moves none of its own rows."""

    def _advantages(self, group: ScoredGroup, traces: Sequence[PeerTrace]) -> Joint:
        found = super()._advantages(group, traces)
        return found._replace(own_G=own_advantages(group, self.context.objective))


class OwnRows(HacpoRegime):
    """HACPO without rows of peers, whose rewards stay in the baseline."""

    def absorb(self, groups: Sequence[ScoredGroup], *, step: int, rng: np.random.Generator) -> AbsorbResult:
        """See Regime. Own rows keep the denominator that they have beside peers' rows."""
        found = super().absorb(groups, step=step, rng=rng)
        return replace(found, examples=[row for row in found.examples if row.component != CROSS], expansion=1.0)


OWN_SUCCESSES = RegimeKind(OwnSuccessesParameters, OwnSuccesses)
MIXED_GROUPS = RegimeKind(XgrpoParameters, MixedGroups, carries_text=False, learns_of_uniform_groups=True)
FAILED_GROUPS = RegimeKind(XgrpoParameters, FailedGroups, carries_text=False, learns_of_uniform_groups=True)
OWN_MEANS = RegimeKind(HacpoParameters, OwnMeans, learns_of_uniform_groups=True)
OWN_ROWS = RegimeKind(HacpoParameters, OwnRows, learns_of_uniform_groups=True)
