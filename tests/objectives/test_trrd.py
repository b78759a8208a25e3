"""RLAD's term."""

import math
from dataclasses import replace

import pytest
import torch

from mrl.objectives.specs import Clipped, Correction, Trrd
from mrl.objectives.terms import mixed_log_ratio, term_losses

SPECS = [
    Trrd(),
    Trrd(alpha=0.3, clip_low=0.2, clip_high=0.28),
    Trrd(alpha=0.0),
    Trrd(teacher_clamp=None, dual_clip=3.0),
    Trrd(correction=Correction()),
]


def twin(spec):
    """arXiv 2602.22495, eq. 3, with the clamp of appendix B."""

    def losses(row, _start, _updates):
        found = []
        for lp, prox, mu, teacher, a in zip(*row, strict=True):
            own, gap = lp - prox, lp - teacher
            if spec.teacher_clamp is not None:
                gap = max(-spec.teacher_clamp, min(spec.teacher_clamp, gap))
            log = own if math.isnan(teacher) else spec.alpha * own + (1 - spec.alpha) * gap
            r = math.exp(max(-20.0, min(20.0, log)))
            loss = -min(r * a, max(1 - spec.clip_low, min(1 + spec.clip_high, r)) * a)
            if spec.dual_clip and a < 0:
                loss = min(loss, -spec.dual_clip * a)
            w = min(5.0, math.exp(max(-20.0, min(20.0, prox - mu)))) if spec.correction else 1.0
            found.append(w * loss)
        return found

    def ordered(row, start, updates):
        return losses((row.lp, row.prox, row.mu, row.teacher, row.a), start, updates)

    return ordered


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_term_equals_its_slow_twin(spec, make_inputs, check_term):
    """Values, gradients and detachments; with teachers on both sides of the clamp, and absent ones."""
    inputs = make_inputs()
    assert 0 < int(inputs.teacher_T.isnan().sum()) < len(inputs.teacher_T)
    check_term(spec, twin(spec), inputs)


def test_alpha_one_is_grpo(make_inputs, gradient):
    """Whatever the teacher says: value and gradient, bit for bit."""
    inputs = make_inputs()
    assert torch.equal(term_losses(Trrd(alpha=1.0), inputs), term_losses(Clipped(), inputs))
    assert torch.equal(gradient(Trrd(alpha=1.0), inputs), gradient(Clipped(), inputs))


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.9])
def test_a_teacher_equal_to_the_old_policy_is_grpo(make_inputs, alpha):
    """Inside the clamp, for every alpha."""
    inputs = make_inputs()
    inputs = replace(inputs, teacher_T=inputs.proximal_T)
    spec = Trrd(alpha=alpha, teacher_clamp=None)
    torch.testing.assert_close(term_losses(spec, inputs), term_losses(Clipped(), inputs))


def test_the_log_ratio_is_linear_in_alpha(make_inputs):
    """The value at alpha is the mixture of the values at 0 and 1."""
    inputs = make_inputs()
    args = (inputs.logprobs_T, inputs.proximal_T, inputs.teacher_T)
    at_0, at_3, at_1 = (mixed_log_ratio(Trrd(alpha=alpha), *args) for alpha in (0.0, 0.3, 1.0))
    torch.testing.assert_close(at_3, 0.7 * at_0 + 0.3 * at_1)


@pytest.mark.parametrize("alpha", [0.5, 1.0])
@pytest.mark.parametrize("absent", [math.nan, math.inf, -math.inf])
def test_an_absent_teacher_leaves_grpo_with_a_finite_gradient(make_inputs, gradient, absent, alpha):
    """A number that is none never reaches the gradient."""
    inputs = make_inputs()
    inputs = replace(inputs, teacher_T=torch.full_like(inputs.proximal_T, absent))
    for spec in (Trrd(alpha=alpha), Trrd(alpha=alpha, teacher_clamp=None)):
        assert torch.equal(term_losses(spec, inputs), term_losses(Clipped(), inputs))
        assert torch.equal(gradient(spec, inputs), gradient(Clipped(), inputs))


def test_outside_the_clamp_the_teacher_has_no_gradient(make_inputs, gradient):
    """What stays is alpha r A times the score."""
    inputs = replace(
        make_inputs(),
        logprobs_T=torch.tensor([-1.0, -1.0], requires_grad=True),
        proximal_T=torch.tensor([-1.0, -1.0]),
        teacher_T=torch.tensor([-1.01, -4.0]),
        advantages_T=torch.tensor([-2.0, -2.0]),
    )
    inside, outside = math.exp(0.5 * 0.01), math.exp(0.5)
    assert gradient(Trrd(), inputs).tolist() == pytest.approx([2 * inside, 2 * 0.5 * outside], rel=1e-5)
