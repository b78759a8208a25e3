"""The loss terms: the contribution of one token of a component, and the function that computes each spec.

Every term is returned per token, unmasked and unnormalised. Advantages, proximal, behaviour and teacher values carry no
gradient.

Shapes: T tokens, K units that may stand in the place of a token.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mrl.objectives.ratios import bounded_exp, bounded_ratio, correction_weight, row_mean, sequence_ratio
from mrl.objectives.specs import (
    Cispo,
    Clipped,
    Correction,
    CrossSequence,
    Distilled,
    Dppo,
    Filtered,
    Grafted,
    Imitation,
    Shaped,
    Term,
    Trrd,
)

LEAST_REST = 1e-6
"""Least probability of the rest beside all units, inside logarithms: sums to 1 in float32 are no more exact."""


class UnitLogprobs(NamedTuple):
    """Log-probabilities under two policies of the units that may stand in the place of each of T tokens."""

    own_TK: Tensor
    """Log-probs under the policy in training, with gradient."""
    teacher_TK: Tensor
    """Log-probs under the teacher; NaN where there is no unit."""

    @property
    def are_there(self) -> Tensor:
        """[T] whether a token has any units."""
        return self.teacher_TK.isfinite().any(-1)


@dataclass(frozen=True, slots=True)
class TermInputs:
    """Log-probabilities in nats, advantages and rows of T tokens. Only log-probabilities under the policy in training
    carry gradient.

    A row is never cut: all its tokens are here, in any order.
    """

    logprobs_T: Tensor
    """Log-probs under the policy in training."""
    proximal_T: Tensor
    """Log-probs under the same policy at the start of the step."""
    behaviour_T: Tensor
    """Log-probs under the policy that sampled."""
    advantages_T: Tensor
    row_T: Tensor
    """int64 row of each token, 0..R-1."""
    teacher_T: Tensor
    """Log-probs under a policy that only scored; NaN where it said nothing."""
    update_index: int = 0
    """Optimizer updates already made in this step."""
    units: UnitLogprobs | None = None
    """Units of the tokens' places; None where teachers gave no more than the log-probs of the tokens themselves."""


def corrected(term_T: Tensor, spec: Correction | None, inputs: TermInputs) -> Tensor:
    """Return [T] the term times its correction's weight; unchanged without a correction."""
    if spec is None:
        return term_T
    return correction_weight(spec, inputs.proximal_T, inputs.behaviour_T, inputs.row_T) * term_T


def clipped(spec: Clipped, inputs: TermInputs) -> Tensor:
    """Return the `clipped_surrogate` of the ratio that `spec` names, times its correction.

    With pi_prox recomputed at the start of the step and a token correction it is decoupled PPO (arXiv 2110.00641, eq.
    7). With the sampler as base and without correction it is PPO on rows of any sampler. Returns [T].
    """
    base_T = inputs.proximal_T if spec.base == "proximal" else inputs.behaviour_T
    if spec.ratio == "sequence":
        ratio_T = sequence_ratio(inputs.logprobs_T, base_T, inputs.row_T)
    else:
        ratio_T = bounded_ratio(inputs.logprobs_T, base_T)
    term_T = clipped_surrogate(
        ratio_T, inputs.advantages_T, clip_low=spec.clip_low, clip_high=spec.clip_high, dual_clip=spec.dual_clip
    )
    return corrected(term_T, spec.correction, inputs)


def clipped_surrogate(
    ratio_T: Tensor, advantages_T: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """Return the per-token clipped surrogate, as a loss.

        L_t = -min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t);   where A_t < 0:  L_t <- min(L_t, -dual A_t)

    With r = pi_theta / pi_prox, equal clips give PPO (arXiv 1707.06347, eq. 7) and, with group-normalised advantages,
    GRPO (arXiv 2402.03300, eq. 3); a larger `clip_high` is DAPO's clip-higher (arXiv 2503.14476, eq. 8); a ratio of
    whole rows is GSPO (arXiv 2507.18071, eq. 5). The dual clip bounds what one unlikely token of a bad answer can cost
    (arXiv 1912.09729). Gradient flows through `ratio_T` only; it is exactly 0 where A_t = 0. Returns [T].
    """
    advantages_T = advantages_T.detach()
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    loss_T = -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    if dual_clip is None:
        return loss_T
    return torch.where(advantages_T < 0, torch.minimum(loss_T, -dual_clip * advantages_T), loss_T)


def cispo(spec: Cispo, inputs: TermInputs) -> Tensor:
    """Return a per-token likelihood term with a detached, clipped ratio as its weight.

        L_t = -sg[ clip(r_t, 1 - low, 1 + high) ] A_t log pi_theta(y_t),   r_t = pi_theta(y_t) / pi_prox(y_t)

    arXiv 2506.13585, eqs. 4 and 5. No token loses its gradient. A ratio is never negative, so `clip_low` >= 1 clips
    nothing. Gradient flows through log pi_theta only: -clip(r_t) A_t. Returns [T].
    """
    ratio_T = bounded_ratio(inputs.logprobs_T, inputs.proximal_T).detach()
    weight_T = ratio_T.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    return corrected(-weight_T * inputs.advantages_T.detach() * inputs.logprobs_T, spec.correction, inputs)


def dppo(spec: Dppo, inputs: TermInputs) -> Tensor:
    """Return policy-gradient terms of tokens whose probability has not moved too far, and a pull back for every token.

        L_t = -keep_t A_t r_t + penalty (log r_t)^2,   r_t = pi_theta(y_t) / pi_behaviour(y_t)
        keep_t = 0  where A_t > 0 and pi_theta - pi_behaviour >  gap
                 or where A_t < 0 and pi_theta - pi_behaviour < -gap,  else 1

    The rule of prime-rl (total-variation mask, squared log-ratio penalty). A rare token may grow by a large factor, a
    likely one may not. Gradient flows through log pi_theta in both summands, none through keep. The pull reaches the
    rows of the batch alone: a group whose advantages are all 0 has no rows there, so nothing pulls it back,
    unless the objective has a regularizer. Returns [T].
    """
    logprobs_T, behaviour_T, advantages_T = inputs.logprobs_T, inputs.behaviour_T.detach(), inputs.advantages_T.detach()
    gap_T = logprobs_T.detach().exp() - behaviour_T.exp()
    moved_T = torch.where(advantages_T > 0, gap_T, -gap_T)
    keep_T = (moved_T <= spec.max_probability_gap).to(logprobs_T.dtype)
    reward_T = keep_T * advantages_T * bounded_ratio(logprobs_T, behaviour_T)
    return spec.penalty * (logprobs_T - behaviour_T).square() - reward_T


def imitation(spec: Imitation, inputs: TermInputs) -> Tensor:
    """Return the per-token negative log-likelihood of given tokens.

        L_t = -log pi_theta(y*_t | x, y*_<t)

    The residual term of success-gated transfer (SGT, arXiv 2605.07244) is the mean of L_t over the tokens of one
    verified peer answer: no ratio, no clip, no advantage. Gradient flows through `logprobs_T`. Returns [T].
    """
    return -inputs.logprobs_T


def cross_sequence(spec: CrossSequence, inputs: TermInputs) -> Tensor:
    """Return the stepwise clipped sequence ratio times advantage, without a min.

        L_t = -c(s_t) sg[c(s_t)]^alpha A,   c(s) = clip(s, min(1, lower + m lower_step), 1)
        s   = exp( mean_t log pi_theta(y_t) - mean_t log pi_source(y_t) )

    arXiv 2603.02604, cross-agent part of the objective; A holds the capability ratio. `behaviour_T` is the source's
    mean over its own tokens, at every token of the row; m is the number of updates already made in this step. Where s
    lies outside the clip the gradient is exactly 0, whatever the sign of A. The token form of GSPO gives each token its
    share of the gradient, -s^(alpha + 1) A. Returns [T].
    """
    lower = min(1.0, spec.lower + inputs.update_index * spec.lower_step)
    ratio_T = sequence_ratio(inputs.logprobs_T, inputs.behaviour_T, inputs.row_T).clamp(lower, 1.0)
    return -ratio_T * ratio_T.detach().pow(spec.alpha) * inputs.advantages_T.detach()


def grafted(spec: Grafted, inputs: TermInputs) -> Tensor:
    """Return `graft_weight` times the clipped term, whose ratio is the receiver's own pi_theta / pi_prox.

    From "Learning beyond what you sample" (GRAFT). Gradient flows through the clipped term only. Returns [T].
    """
    weight_T = graft_weight(inputs.proximal_T, inputs.behaviour_T, inputs.row_T, floor=spec.floor)
    return weight_T * clipped(spec.clipped, inputs)


def graft_weight(proximal_logprobs_T: Tensor, behaviour_logprobs_T: Tensor, row_T: Tensor, *, floor: float) -> Tensor:
    """Return the weight of each token's row, from the parameters at the start of the step.

        w = 1[s > floor] min(s, 1),   s = exp( mean_t log pi_prox(y_t) - mean_t log pi_source(y_t) )

    `behaviour_logprobs_T` is the source's mean over its own tokens, at every token of the row. No gradient flows.
    Returns [T].
    """
    ratio_T = bounded_exp(row_mean(proximal_logprobs_T - behaviour_logprobs_T, row_T))
    return torch.where(ratio_T > floor, ratio_T.clamp(max=1.0), 0.0)


def filtered(spec: Filtered, inputs: TermInputs) -> Tensor:
    """Return the clipped term, 0 at `filtered_tokens`. Gradient flows through the clipped term only. Returns [T]."""
    return torch.where(filtered_tokens(spec, inputs), 0.0, clipped(spec.clipped, inputs))


@torch.no_grad()
def filtered_tokens(spec: Filtered, inputs: TermInputs) -> Tensor:
    """Return which tokens have a negative advantage in rows too far from the policy of the step's start.

        A < 0  and  D > max,   D = (1/|y|) sum_t (log pi_behaviour(y_t) - log pi_prox(y_t))

    D is the k1 estimate of KL(behaviour || prox) per token, on tokens that the behaviour policy drew. After F-TIS
    (arXiv 2605.22537), which drops negative rows above a divergence; the form of D is a choice of this code. Of
    estimators k1 alone is a sum of log-probs, the same however those of a span are spread over its tokens. Returns [T]
    bool.
    """
    divergence_T = row_mean(inputs.behaviour_T - inputs.proximal_T, inputs.row_T)
    return (inputs.advantages_T < 0) & (divergence_T > spec.max_divergence_nats)


def trrd(spec: Trrd, inputs: TermInputs) -> Tensor:
    """Return the clipped surrogate of the ratio to a mixture of the old policy and the teacher.

        log r_t = alpha (log pi_theta - log pi_prox) + (1 - alpha) clamp(log pi_theta - log pi_teacher)

    arXiv 2602.22495, eq. 3 (alpha = 1 is GRPO); the clamp to +-`teacher_clamp` is its appendix B, read as a plain one:
    outside it the teacher's part has no gradient. Where the teacher's number is not finite, the ratio is pi_theta /
    pi_prox. Gradient flows through log pi_theta only. Returns [T].
    """
    ratio_T = bounded_exp(mixed_log_ratio(spec, inputs.logprobs_T, inputs.proximal_T, inputs.teacher_T))
    term_T = clipped_surrogate(
        ratio_T, inputs.advantages_T, clip_low=spec.clip_low, clip_high=spec.clip_high, dual_clip=spec.dual_clip
    )
    return corrected(term_T, spec.correction, inputs)


def mixed_log_ratio(spec: Trrd, logprobs_T: Tensor, proximal_T: Tensor, teacher_T: Tensor) -> Tensor:
    """Return [T] log r of `trrd` in nats, not yet bounded; gradient through `logprobs_T` only."""
    own_T = logprobs_T - proximal_T.detach()
    teacher_gap_T = logprobs_T - teacher_T.detach()
    if spec.teacher_clamp is not None:
        teacher_gap_T = teacher_gap_T.clamp(-spec.teacher_clamp, spec.teacher_clamp)
    return torch.where(teacher_T.isfinite(), spec.alpha * own_T + (1 - spec.alpha) * teacher_gap_T, own_T)


def distilled(spec: Distilled, inputs: TermInputs) -> Tensor:
    """Return the clipped term with `distilled_advantages`; at tokens with units, `beta unit_divergence` instead.

    Gradient flows through the ratio, or through the policy's log-probs of the units. Returns [T].
    """
    term_T = clipped(spec.clipped, replace(inputs, advantages_T=distilled_advantages(spec, inputs)))
    if inputs.units is None:
        return term_T
    divergence_T = spec.coefficient * unit_divergence(inputs.units, spec.max_gap_nats)
    return torch.where(inputs.units.are_there, divergence_T, term_T)


@torch.no_grad()
def distilled_advantages(spec: Distilled, inputs: TermInputs) -> Tensor:
    """Return the advantages of tokens that a teacher scored; the other tokens keep theirs.

        A_t = beta clamp(log pi_teacher(y_t) - log pi_prox(y_t))

    arXiv 2604.27083, eq. 8 and the line below it, at the parameters of the step's start. On tokens that pi_prox drew,
    -A_t is the k1 estimate of KL(pi_prox || pi_teacher) at their states, and -A_t grad log pi estimates its gradient,
    states held fixed: what a token does to the divergence further on is left out. Returns [T].
    """
    gap_T = (inputs.teacher_T - inputs.proximal_T).clamp(-spec.max_gap_nats, spec.max_gap_nats)
    return torch.where(inputs.teacher_T.isfinite(), spec.coefficient * gap_T, inputs.advantages_T)


def unit_divergence(units: UnitLogprobs, max_gap_nats: float) -> Tensor:
    """Return the reverse divergence of the policy from a teacher over units and the rest, in nats, [T].

        D_t = sum_u p(u) g(u) + p(rest) g(rest),   g = sg[clamp(log p - log q)],   p(rest) = 1 - sum_u p(u)

    p and q are the probabilities of the same units under policy and teacher, as SimCT (arXiv 2605.07711) compares
    them. Unclamped, D_t is KL(p || q) of the two coarser distributions, with its gradient: the part through g would be
    the gradient of a sum of probabilities, which is 1. `distilled_advantages` of units drawn from p have the mean
    -beta D_t at the step's start. Over all of a shared vocabulary the rest is nothing, and D_t the divergence of the
    two policies; over fewer units it is a lower bound of that divergence.
    """
    is_unit_TK = units.teacher_TK.isfinite()
    own_TK = torch.where(is_unit_TK, units.own_TK, 0.0)
    p_TK = torch.where(is_unit_TK, own_TK.exp(), 0.0)
    q_TK = torch.where(is_unit_TK, units.teacher_TK, -math.inf).exp()
    rest_p_T, rest_q_T = (1.0 - values_TK.sum(-1) for values_TK in (p_TK, q_TK))
    gap_TK = torch.where(is_unit_TK, own_TK - units.teacher_TK, 0.0).detach()
    rest_gap_T = (rest_p_T.clamp(min=LEAST_REST).log() - rest_q_T.clamp(min=LEAST_REST).log()).detach()
    gap_TK, rest_gap_T = (gap.clamp(-max_gap_nats, max_gap_nats) for gap in (gap_TK, rest_gap_T))
    return (p_TK * gap_TK).sum(-1) + rest_p_T * rest_gap_T


def shaped(spec: Shaped, inputs: TermInputs) -> Tensor:
    """Return the per-token shaped likelihood, with neither ratio nor clip.

        L_t = -A_t f(pi_theta(y_t)),   f(p) = p / (p + gamma) = sigmoid(log p - log gamma)

    arXiv 2504.14945, off-policy part. f'(p) p = gamma p / (p + gamma)^2 is largest at p = gamma, where the plain
    policy gradient would favour tokens that are likely already. Gradient flows through `logprobs_T`. Returns [T].
    """
    return -inputs.advantages_T.detach() * torch.sigmoid(inputs.logprobs_T - math.log(spec.gamma))


TERMS: dict[type[Any], Callable[[Any, TermInputs], Tensor]] = {
    Clipped: clipped,
    Cispo: cispo,
    Dppo: dppo,
    Imitation: imitation,
    CrossSequence: cross_sequence,
    Grafted: grafted,
    Filtered: filtered,
    Trrd: trrd,
    Distilled: distilled,
    Shaped: shaped,
}
"""Spec -> its function, which takes the spec and the tokens of one component and returns [T] losses."""


def term_losses(spec: Term, inputs: TermInputs) -> Tensor:
    """Return the per-token loss of one component, [T], unweighted and unnormalised.

    Gradient flows through the policy's own log-probs only: of the tokens, and of their units.
    """
    return TERMS[type(spec)](spec, inputs)
