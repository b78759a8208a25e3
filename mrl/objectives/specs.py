"""Terms of a loss, for one token, as plain values: no tensor, no torch.

A sharing regime names its terms with these; `mrl.objectives.terms` holds the function of each. Symbols: theta is the
policy in training, prox its parameters at the start of the step, behaviour the policy (own or peer) that sampled.
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

Level = Literal["token", "sequence", "geometric"]

Spreading = Literal["receiver_multiplicative", "receiver_additive", "none"]
"""Rule by which a peer's log-prob of a span is divided over the span's own tokens (`mrl.objectives.ratios.spread`)."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Detached weight pi_prox / pi_behaviour of a token, or of its row, outside the clip.

    level     "token"; "sequence" the product over the row's tokens; "geometric" their geometric mean
    action    "truncate" holds the weight in [lower, upper] (TIS); "mask" zeroes tokens outside (IcePop); "gate" is 1
              inside and 0 outside (sequence masking)
    """

    level: Level = "token"
    action: Literal["truncate", "mask", "gate"] = "truncate"
    lower: float = 0.0
    upper: float = 5.0


@dataclass(frozen=True, slots=True)
class Clipped:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A): PPO, GRPO, Dr.GRPO, DAPO, GSPO.

    ratio     "token", or "sequence": one length-normalised ratio per row, gradients per token (GSPO)
    base      denominator of the ratio: the policy at the start of the step, or the policy that sampled (then
              `correction` is None)
    dual_clip bound of |term| for negative advantages, as a multiple of |A|
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio: Literal["token", "sequence"] = "token"
    base: Literal["proximal", "behaviour"] = "proximal"
    dual_clip: float | None = None
    correction: Correction | None = None


@dataclass(frozen=True, slots=True)
class Cispo:
    """-sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi_theta (arXiv 2506.13585); clip_low >= 1 is no lower clip."""

    clip_low: float = 1.0
    clip_high: float = 0.2
    correction: Correction | None = None


@dataclass(frozen=True, slots=True)
class Dppo:
    """-keep A r + penalty (log r)^2, r = pi_theta / pi_behaviour; keep by the gap of probabilities and A's sign."""

    max_probability_gap: float = 0.2
    penalty: float = 1e-3


@dataclass(frozen=True, slots=True)
class Imitation:
    """-log pi_theta of given tokens (SGT's rescues)."""


@dataclass(frozen=True, slots=True)
class CrossSequence:
    """HACPO's term for rows of another policy: stepwise clipped sequence ratio, no min with A (arXiv 2603.02604)."""

    lower: float = 0.8
    lower_step: float = 0.025
    alpha: float = 1.0


@dataclass(frozen=True, slots=True)
class Grafted:
    """GRAFT's term: a gated, capped row weight from the start of the step, times the clipped term."""

    clipped: Clipped
    floor: float = 0.8


@dataclass(frozen=True, slots=True)
class Filtered:
    """A clipped term without bad answers that the policy finds far less likely than their writer did (F-TIS)."""

    clipped: Clipped
    max_divergence_nats: float
    """Largest divergence, as the mean per token of a row."""


@dataclass(frozen=True, slots=True)
class Trrd:
    """RLAD's clipped term with the ratio pi_theta / (pi_prox^alpha pi_teacher^(1 - alpha)) (arXiv 2602.22495).

    Tokens without a teacher log-prob (NaN) have the plain ratio. `teacher_clamp` bounds |log pi_theta - log teacher|.
    """

    alpha: float = 0.5
    clip_low: float = 0.2
    clip_high: float = 0.2
    teacher_clamp: float | None = 1.0
    dual_clip: float | None = None
    correction: Correction | None = None


@dataclass(frozen=True, slots=True)
class Distilled:
    """A clipped term in which a teacher's opinion is the advantage of the tokens that it scored (arXiv 2604.27083).

    Tokens without a teacher log-prob (NaN) keep their own advantage.
    """

    clipped: Clipped
    coefficient: float = 1.0
    """beta: the advantage of a nat."""
    max_gap_nats: float = math.inf
    """Bound of |log pi_teacher - log pi_prox| of a token."""


@dataclass(frozen=True, slots=True)
class Shaped:
    """-A f(pi_theta), f(x) = x / (x + gamma): LUFFY's policy shaping of off-policy rows (arXiv 2504.14945)."""

    gamma: float = 0.1


Term: TypeAlias = Clipped | Cispo | Dppo | Imitation | CrossSequence | Grafted | Filtered | Trrd | Distilled | Shaped


@dataclass(frozen=True, slots=True)
class Regularizer:
    """Added to a term, token by token: kl_coefficient * KL(theta || reference) - entropy_coefficient * entropy."""

    kl_coefficient: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_coefficient: float = 0.0
