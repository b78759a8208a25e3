"""CoPD's term."""

import math
from dataclasses import replace

import pytest
import torch

from mrl.objectives.diagnostics import clipped_tokens
from mrl.objectives.specs import Clipped, Correction, Distilled
from mrl.objectives.terms import TermInputs, distilled_advantages, term_losses

SPECS = [
    Distilled(Clipped()),
    Distilled(Clipped(0.2, 0.28), coefficient=0.3, max_gap_nats=1.0),
    Distilled(Clipped(dual_clip=3.0), coefficient=2.0),
    Distilled(Clipped(correction=Correction())),
]


def twin(spec):
    """arXiv 2604.27083: eq. 8 at the old parameters, beta times it as the advantage in eq. 7."""

    def losses(row, _start, _updates):
        found = []
        for lp, prox, mu, teacher, a in zip(row.lp, row.prox, row.mu, row.teacher, row.a, strict=True):
            advantage = a
            if not math.isnan(teacher):
                delta = teacher - prox
                delta = max(-spec.max_gap_nats, min(spec.max_gap_nats, delta))
                advantage = spec.coefficient * delta
            own = spec.clipped
            r = math.exp(max(-20.0, min(20.0, lp - prox)))
            loss = -min(r * advantage, max(1 - own.clip_low, min(1 + own.clip_high, r)) * advantage)
            if own.dual_clip and advantage < 0:
                loss = min(loss, -own.dual_clip * advantage)
            w = min(5.0, math.exp(max(-20.0, min(20.0, prox - mu)))) if own.correction else 1.0
            found.append(w * loss)
        return found

    return losses


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_term_equals_its_slow_twin(spec, make_inputs, check_term):
    """Values, gradients and detachments; with teachers on both sides of the bound, and absent ones."""
    inputs = make_inputs()
    assert 0 < int(inputs.teacher_T.isnan().sum()) < len(inputs.teacher_T)
    check_term(spec, twin(spec), inputs)


@pytest.mark.parametrize("absent", [math.nan, math.inf, -math.inf])
def test_without_a_teacher_it_is_the_own_term(make_inputs, gradient, absent):
    """Value and gradient, bit for bit; a number that is none never reaches either."""
    inputs = make_inputs()
    inputs = replace(inputs, teacher_T=torch.full_like(inputs.proximal_T, absent))
    assert torch.equal(term_losses(Distilled(Clipped()), inputs), term_losses(Clipped(), inputs))
    assert torch.equal(gradient(Distilled(Clipped()), inputs), gradient(Clipped(), inputs))


def test_a_teacher_that_thinks_the_same_moves_nothing(make_inputs, gradient):
    """Whatever advantages the tokens have of their own."""
    inputs = make_inputs()
    inputs = replace(inputs, teacher_T=inputs.proximal_T.detach())
    assert not gradient(Distilled(Clipped()), inputs).any()


def test_its_mean_is_the_gradient_of_the_reverse_divergence():
    """Exact over a whole vocabulary: sum_y pi(y) A_y grad log pi(y) = -grad KL(pi || teacher)."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(7, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.randn(7, generator=generator, dtype=torch.float64), -1)
    own = torch.log_softmax(logits, -1)
    (expected,) = torch.autograd.grad((own.exp() * (own - teacher)).sum(), logits, retain_graph=True)
    zero = torch.zeros_like(teacher)
    inputs = inputs_of(own, teacher, zero)
    losses = term_losses(Distilled(Clipped()), inputs)
    (found,) = torch.autograd.grad((own.detach().exp() * losses).sum(), logits)
    torch.testing.assert_close(found, expected)


def inputs_of(own, teacher, advantages):
    """Every token a row, sampled by the policy as it is."""
    old = own.detach()
    return TermInputs(own, old, old, advantages, torch.arange(len(own)), teacher)


def test_clipped_tokens_are_counted_by_the_teacher_s_advantage():
    """A row whose own advantages are 0 is moved all the same, and clipped."""
    own, teacher = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-0.5, -1.0, -0.5])
    inputs = inputs_of(own, teacher, torch.zeros(3))
    inputs = replace(inputs, proximal_T=torch.tensor([-2.0, -1.0, -1.0]), behaviour_T=torch.tensor([-2.0, -1.0, -9.0]))
    assert distilled_advantages(Distilled(Clipped()), inputs).tolist() == [1.5, 0.0, 0.5]
    spec = Distilled(Clipped(correction=Correction(action="mask")))
    assert clipped_tokens(spec, inputs).tolist() == [True, False, False], "the mask of the last one is no clip"
