"""RLAD's trust-region ratio distillation: the clip's centre lies between the old policy and a teacher.

Shapes: T tokens.
"""

import torch
from torch import Tensor

from mrl.objectives.clipped import clipped_surrogate
from mrl.objectives.correction import corrected
from mrl.objectives.inputs import TermInputs
from mrl.objectives.ratios import bounded_exp
from mrl.objectives.specs import Trrd


def trrd(spec: Trrd, inputs: TermInputs) -> Tensor:
    """Clipped surrogate of the ratio to a mixture of the old policy and the teacher.

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
    """log r of `trrd` in nats, not yet bounded; gradient through `logprobs_T` only. Returns [T]."""
    own_T = logprobs_T - proximal_T.detach()
    teacher_gap_T = logprobs_T - teacher_T.detach()
    if spec.teacher_clamp is not None:
        teacher_gap_T = teacher_gap_T.clamp(-spec.teacher_clamp, spec.teacher_clamp)
    return torch.where(teacher_T.isfinite(), spec.alpha * own_T + (1 - spec.alpha) * teacher_gap_T, own_T)
