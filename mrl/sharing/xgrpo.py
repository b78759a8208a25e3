"""Cross-policy baselines (XGRPO, arXiv 2605.07244): own rows only, measured against peers' rewards on the prompt too.

    A_i  = (r_i - mu) / (sigma + 1e-6),   mu = (1 - w) mean(own) + w mean(peers),   sigma = std of all rewards, pooled

    baseline        mu and sigma
    pooled          w = share of the peers' answers: mu is the mean of all rewards
    peer_only       w = 1
    rescaled        pooled, a peer's rewards times omega = P(own) / P(peer), the ratio of running mean rewards (HACPO),
                    all counted from the least of them where rewards are negative
    mean_only       pooled, without sigma
    leave_one_out   pooled, without the answer itself

The paper's formulas are not published; these are a reconstruction. A prompt that no peer answered has the policy's own
advantages. Where all own answers fail and a peer succeeds every advantage is negative: own failures are pushed down.

Reads of a peer: the rewards of one group (value records). On the wire, per prompt: about 240 bytes, and 9 per answer.
Costs: nothing; no text crosses, so nothing is aligned and nothing is lost.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from mrl.config.table import Tuned
from mrl.records.experience import ExperienceRecord, ValueRecord
from mrl.records.rollouts import ScoredGroup
from mrl.sharing.advantages import EPS, Float32s, Float64s
from mrl.sharing.context import SharingContext
from mrl.sharing.hacpo import Capabilities, scaled
from mrl.sharing.own_examples import own_advantages, own_examples
from mrl.sharing.own_objective import POLICY_GRADIENT
from mrl.sharing.peer_groups import PeerGroupParameters, PeerGroupReader
from mrl.sharing.regime import AbsorbResult, Author

Baseline = Literal["pooled", "peer_only", "rescaled", "mean_only", "leave_one_out"]


class XgrpoParameters(PeerGroupParameters):
    """The `[sharing.xgrpo]` table."""

    baseline: Annotated[Baseline, Tuned(("pooled", "rescaled", "mean_only", "leave_one_out"))] = "pooled"
    """The baseline that an own reward is measured against."""
    peer_weight: float | None = Field(None, ge=0, le=1)
    """Weight w of the peers' mean; without this key, their share of the answers (1 for peer_only)."""
    window_steps: int = Field(5, ge=1)
    """Steps over which the running mean rewards of "rescaled" are taken."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> "XgrpoParameters":
        if self.baseline == "peer_only" and self.peer_weight is not None:
            raise ValueError("baseline 'peer_only' already means peer_weight = 1; cure: remove one of them")
        if self.baseline != "rescaled" and "window_steps" in self.model_fields_set:
            raise ValueError(f"window_steps has no effect; got baseline {self.baseline!r}; wanted 'rescaled'")
        return self


class XgrpoRegime(PeerGroupReader):
    """Trains on own rows, with advantages measured against peers' rewards too."""

    def __init__(self, parameters: XgrpoParameters, context: SharingContext) -> None:
        super().__init__("value", parameters, context)
        self.parameters = parameters
        self.components = (context.objective.component(),)
        self._capabilities = Capabilities(window_steps=parameters.window_steps)

    def publish(self, group: ScoredGroup, author: Author) -> list[ExperienceRecord]:
        """Return the rewards of every group, as the policy's own advantages are computed from them."""
        rewards: list[float] = self.context.objective.rewards(group).tolist()
        return [ValueRecord(**author.tags(group), rewards=rewards)]

    def absorb(self, groups: Sequence[ScoredGroup], *, step: int, rng: np.random.Generator) -> AbsorbResult:
        """Return own rows. The advantages of a group that peers answered are measured against their rewards too."""
        heard = [self._rewards_by_peer(group.prompt_id) for group in groups]
        objective = self.context.objective
        own_rewards = [float(reward) for group in groups for reward in objective.rewards(group)]
        self._capabilities.note(_rewards_by_policy(self.context.policy, own_rewards, heard))
        advantages = [self._advantages(group, peers) for group, peers in zip(groups, heard, strict=True)]
        own = own_examples(groups, self.context, advantages=advantages)
        return AbsorbResult(
            own.examples,
            {POLICY_GRADIENT: objective.denominator(own.lengths)},
            forget=self.peer_groups.take_forgotten(),
            counts=self.peer_groups.take_counts(),
        )

    def state(self) -> dict[str, Any]:
        """Return the windows of mean rewards, and the totals behind the cumulative rates."""
        return super().state() | {"capabilities": self._capabilities.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`."""
        super().restore(state)
        self._capabilities.restore(state["capabilities"])

    def _rewards_by_peer(self, prompt_id: str) -> dict[str, list[float]]:
        records = [item.record for item in self.peer_groups.take(prompt_id)]
        return {record.source: record.rewards for record in records if isinstance(record, ValueRecord)}

    def _advantages(self, group: ScoredGroup, by_peer: Mapping[str, Sequence[float]]) -> Float32s:
        objective = self.context.objective
        if not by_peer:
            return own_advantages(group, objective)
        scales = dict.fromkeys(by_peer, 1.0)
        if self.parameters.baseline == "rescaled":
            scales = {peer: self._capabilities.ratio(self.context.policy, peer) for peer in by_peer}
        return cross_advantages(
            objective.rewards(group),
            [np.asarray(rewards, dtype=np.float64) for rewards in by_peer.values()],
            scales=list(scales.values()),
            baseline=self.parameters.baseline,
            peer_weight=self.parameters.peer_weight,
            std_correction=objective.std_correction,
            divide=objective.advantage == "group_std",
        )


def cross_advantages(
    own_G: Float64s,
    peers: Sequence[Float64s],
    *,
    scales: Sequence[float],
    baseline: Baseline = "pooled",
    peer_weight: float | None = None,
    std_correction: int = 1,
    divide: bool = True,
) -> Float32s:
    """Return [G] advantages of own rewards, measured against the rewards of peers ([G_m] each) by the module's
    formulas.

    All rewards equal give exact zeros, whatever the scales. The standard deviation is that of the rewards as they are,
    not rescaled; without `divide`, as in "mean_only", nothing is divided by it.
    """
    pooled = np.concatenate([own_G, *peers])
    if np.all(pooled == pooled[0]):
        return np.zeros(len(own_G), dtype=np.float32)
    theirs = np.concatenate(scaled(peers, scales, least=float(pooled.min())))
    own_mean_G, num_own = np.full(len(own_G), own_G.mean()), len(own_G)
    if baseline == "leave_one_out":
        num_own -= 1
        own_mean_G = (own_G.sum() - own_G) / max(1, num_own)
    share = 1.0 if baseline == "peer_only" else len(theirs) / (num_own + len(theirs))
    weight = share if peer_weight is None or not num_own else peer_weight  # no own answer left: the peers' mean alone
    centred_G = own_G - ((1 - weight) * own_mean_G + weight * theirs.mean())
    if baseline == "mean_only" or not divide:
        return np.asarray(centred_G, dtype=np.float32)
    return np.asarray(centred_G / (pooled.std(ddof=std_correction) + EPS), dtype=np.float32)


def _rewards_by_policy(
    policy: str, own_rewards: Sequence[float], heard: Sequence[Mapping[str, Sequence[float]]]
) -> dict[str, list[float]]:
    """Return all rewards of the step by policy."""
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    rewards[policy] += own_rewards
    for by_peer in heard:
        for peer, theirs in by_peer.items():
            rewards[peer] += theirs
    return rewards
