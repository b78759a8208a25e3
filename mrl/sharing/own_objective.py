"""The objective of a policy on its own rows: the `[policies.X.objective]` table, with its method's values filled in."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeGuard

import numpy as np

from mrl.config.policy_tables import CorrectionTable, ObjectiveTable
from mrl.objectives.specs import Cispo, Clipped, Correction, Dppo, Regularizer, Spreading, Term
from mrl.records.rollouts import Answer, ScoredGroup
from mrl.sharing.advantages import AdvantageKind, Float32s, Float64s, group_advantages, overlong_penalties
from mrl.sharing.regime import Component, DenominatorKind

POLICY_GRADIENT = "policy_gradient"
"""Name of the component of own rows."""

Aggregation = Literal["sequence_mean", "token_mean", "constant"]

METHODS: dict[str, dict[str, Any]] = {
    "grpo": {
        "clip_low": 0.2,
        "clip_high": 0.2,
        "advantage": "group_std",
        "aggregation": "sequence_mean",
        "level": "token",
    },
    "dr_grpo": {
        "clip_low": 0.2,
        "clip_high": 0.2,
        "advantage": "group_mean",
        "aggregation": "constant",
        "level": "token",
    },
    "dapo": {
        "clip_low": 0.2,
        "clip_high": 0.28,
        "advantage": "group_std",
        "aggregation": "token_mean",
        "drop_uniform_groups": True,
        "level": "token",
    },
    "gspo": {
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "advantage": "group_std",
        "aggregation": "sequence_mean",
        "level": "geometric",
    },
    "cispo": {
        "clip_low": 1.0,
        "clip_high": 0.2,
        "advantage": "group_std",
        "aggregation": "token_mean",
        "level": "token",
    },
    "dppo": {"clip_low": 0.2, "clip_high": 0.2, "advantage": "group_mean", "aggregation": "token_mean", "level": "off"},
}
"""Method -> values of the keys that a configuration leaves out.

GRPO arXiv 2402.03300, Dr.GRPO 2503.20783, DAPO 2503.14476, GSPO 2507.18071, CISPO 2506.13585; DPPO as in prime-rl,
where `clip_high` is the largest gap between the two probabilities of a token. `level` is that of the correction table.
DPPO has no correction, since its ratio is to the sampler. GSPO's correction is at the level of its ratio, the geometric
mean over the answer: weights of tokens would put their noise back into the ratio. GSPO's paper has no correction (it
finds the ratio of answers tolerant of rounding between engine and learner); stale answers need one here.
"""

DENOMINATORS: dict[str, DenominatorKind] = {"sequence_mean": "rows", "token_mean": "tokens", "constant": "constant"}


@dataclass(frozen=True, slots=True)
class OwnObjective:
    """A policy's own objective, with the values of its method filled in."""

    term: Term
    regularizer: Regularizer | None
    advantage: AdvantageKind
    std_correction: Literal[0, 1]
    aggregation: Aggregation
    max_answer_tokens: int
    """Most tokens that the policy samples for any answer, in all turns of an episode."""
    max_turn_tokens: int
    """Most tokens of an answer of one turn."""
    overlong_buffer_tokens: int
    overlong_penalty: float
    mask_cut_answers: bool
    drop_uniform_groups: bool
    max_resampling: float

    def component(
        self,
        name: str = POLICY_GRADIENT,
        *,
        term: Term | None = None,
        spreading: Spreading = "receiver_multiplicative",
    ) -> Component:
        """Return the component of own rows; a regime may give it another term, and a rule to divide teachers' spans."""
        kind = DENOMINATORS[self.aggregation]
        return Component(name, term or self.term, 1.0, kind, "own", self.regularizer, spreading)

    def token_clip(self) -> Clipped:
        """Return a term that clips ratios of tokens: the own term where it does, else one at 0.2 with the own
        correction.

        Bounds of a whole row's ratio, as GSPO's, are far too narrow for ratios of tokens.
        """
        match self.term:
            case Clipped(ratio="token") as own:
                return own
            case Clipped() as own:
                return replace(own, clip_low=0.2, clip_high=0.2, ratio="token")
            case Cispo() as own:
                return Clipped(correction=own.correction)
            case _:
                return Clipped()

    def weights(self, num_tokens: int) -> Float32s:
        """Return [T] weights of one row: 1 / T where the objective averages over an answer, else 1."""
        share = 1.0 / num_tokens if num_tokens and self.aggregation == "sequence_mean" else 1.0
        return np.full(num_tokens, share, dtype=np.float32)

    def denominator(self, lengths: Sequence[int]) -> float:
        """Return the denominator of a component with rows of these lengths in tokens, left-out rows included; not 0."""
        match self.aggregation:
            case "sequence_mean":
                count = len(lengths)
            case "token_mean":
                count = sum(lengths)
            case "constant":
                count = len(lengths) * self.max_answer_tokens
        return float(max(1, count))

    def masks(self, answer: Answer) -> bool:
        """Whether an own answer is left out of the loss."""
        return self.mask_cut_answers and answer.is_cut

    def rewards(self, group: ScoredGroup) -> Float64s:
        """Return [G] the rewards from which advantages are computed: as verified, less what overlong answers lose."""
        rewards = np.array([answer.reward for answer in group.answers], dtype=np.float64)
        lengths = [answer.num_sampled_tokens for answer in group.answers]
        return self.penalised(rewards, lengths, [self.limit(is_episode=bool(one.segments)) for one in group.answers])

    def advantages(self, rewards_G: Float64s) -> Float32s:
        """Return [G] the advantages of one group with these rewards."""
        return group_advantages(rewards_G, self.advantage, std_correction=self.std_correction)

    def limit(self, *, is_episode: bool) -> int:
        """Return the token limit of an answer."""
        return self.max_answer_tokens if is_episode else self.max_turn_tokens

    def penalised(self, rewards_G: Float64s, lengths_G: Sequence[int], limits_G: Sequence[int]) -> Float64s:
        """Return [G] rewards of answers of these lengths and limits in own tokens, less what overlong answers lose."""
        if not self.overlong_buffer_tokens:
            return rewards_G
        return rewards_G + self.overlong_penalty * overlong_penalties(
            lengths_G, max_tokens=limits_G, buffer_tokens=self.overlong_buffer_tokens
        )


def clips_tokens(term: Term) -> TypeGuard[Clipped]:
    """Whether `term` clips the ratios of single tokens, as the terms of GRPO, Dr.GRPO and DAPO do."""
    return isinstance(term, Clipped) and term.ratio == "token"


def own_objective(table: ObjectiveTable, *, max_answer_tokens: int, max_turn_tokens: int = 0) -> OwnObjective:
    """Return the objective of a configuration. Keys that the table leaves out take the values of the method.

    `max_turn_tokens` 0: no answer has several turns.
    """
    given = {key: value for key, value in table.model_dump().items() if value is not None}
    values = METHODS[table.method] | given
    return OwnObjective(
        term=_term(table, values),
        regularizer=_regularizer(table),
        advantage=values["advantage"],
        std_correction=table.std_correction,
        aggregation=values["aggregation"],
        max_answer_tokens=max_answer_tokens,
        max_turn_tokens=max_turn_tokens or max_answer_tokens,
        overlong_buffer_tokens=table.overlong_buffer_tokens,
        overlong_penalty=table.overlong_penalty,
        mask_cut_answers=table.mask_cut_answers,
        drop_uniform_groups=values.get("drop_uniform_groups", False),
        max_resampling=table.max_resampling,
    )


def _term(table: ObjectiveTable, values: dict[str, Any]) -> Term:
    low, high = values["clip_low"], values["clip_high"]
    correction = _correction(table.correction, level=table.correction.level or values["level"])
    match table.method:
        case "cispo":
            return Cispo(low, high, correction)
        case "dppo":
            return Dppo(max_probability_gap=high)
        case method:
            ratio: Literal["token", "sequence"] = "sequence" if method == "gspo" else "token"
            return Clipped(low, high, ratio, "proximal", table.dual_clip, correction)


def _correction(
    table: CorrectionTable, *, level: Literal["off", "token", "sequence", "geometric"]
) -> Correction | None:
    return None if level == "off" else Correction(level, table.action, table.lower, table.upper)


def _regularizer(table: ObjectiveTable) -> Regularizer | None:
    if not table.kl_coefficient and not table.entropy_coefficient:
        return None
    return Regularizer(table.kl_coefficient or 0.0, table.kl_estimator, table.entropy_coefficient)
