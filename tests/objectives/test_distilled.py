"""CoPD's term."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from mrl.objectives.diagnostics import clipped_tokens
from mrl.objectives.specs import Clipped, Correction, Distilled
from mrl.objectives.terms import TermInputs, UnitLogprobs, distilled_advantages, term_losses, unit_divergence

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


def units_of(logits, teacher, places):
    """What both give to the units in these places of a vocabulary."""
    own = torch.log_softmax(logits, -1)
    return UnitLogprobs(own[..., places], torch.log_softmax(teacher, -1)[..., places])


def slow_divergence(logits, teacher, places, most):
    """KL of the policy from the teacher over units and their rest, event by event; logarithms are constants."""
    p, q = torch.softmax(logits, -1), torch.softmax(teacher, -1).tolist()
    events = [(p[u], q[u]) for u in places]
    if len(places) < len(p):
        rest = [v for v in range(len(p)) if v not in places]
        events.append((sum(p[v] for v in rest), sum(q[v] for v in rest)))
    return sum(a * max(-most, min(most, math.log(a.item() / b))) for a, b in events)


@pytest.fixture
def two_distributions():
    """[5, 7] logits of a policy, which are differentiated, and of a teacher."""
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(5, 7, generator=generator, dtype=torch.float64).mul(2).requires_grad_()
    return logits, 2 * torch.randn(5, 7, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("places", [[2], [6, 0, 3], list(range(7))], ids=str)
@pytest.mark.parametrize("most", [0.5, 1e9])
def test_the_divergence_over_units_equals_its_slow_twin(two_distributions, places, most):
    """Values and gradients, with a rest and without, within the bound and beyond."""
    logits, teacher = two_distributions
    found = unit_divergence(units_of(logits, teacher, places), most)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    for t in range(5):
        written = slow_divergence(logits[t], teacher[t], places, most)
        (expected,) = torch.autograd.grad(written, logits)
        assert found[t].item() == pytest.approx(written.item(), abs=1e-6)
        torch.testing.assert_close(gradient[t], expected[t], rtol=1e-6, atol=1e-6)


def test_over_all_units_it_is_the_divergence_and_the_mean_of_the_sampled_term(two_distributions):
    """KL(pi || teacher) and its gradient by autograd; and what the term gives to tokens drawn from pi, in the mean."""
    logits, teacher = two_distributions
    own, told = torch.log_softmax(logits, -1), torch.log_softmax(teacher, -1)
    exact = (own.exp() * (own - told)).sum(-1)
    (expected,) = torch.autograd.grad(exact.sum(), logits, retain_graph=True)
    found = unit_divergence(units_of(logits, teacher, list(range(7))), 1e9)
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9)
    (gradient,) = torch.autograd.grad(found.sum(), logits, retain_graph=True)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)

    flat, of_teacher = own.flatten(), told.flatten()
    sampled = term_losses(Distilled(Clipped()), inputs_of(flat, of_teacher, torch.zeros_like(of_teacher)))
    (mean,) = torch.autograd.grad((flat.detach().exp() * sampled).sum(), logits)
    torch.testing.assert_close(mean, gradient, rtol=1e-9, atol=1e-9)


def test_fewer_units_are_a_lower_bound(two_distributions):
    """Each unit more can only add."""
    logits, teacher = two_distributions
    found = [unit_divergence(units_of(logits, teacher, list(range(n))), 1e9) for n in range(1, 8)]
    assert all((more >= less - 1e-9).all() for less, more in pairwise(found))
    assert (found[0] >= 0).all()
    assert (found[-1] > found[0] + 0.1).any()


def test_tokens_without_units_keep_the_sampled_term(make_inputs):
    """Bit for bit, value and gradient; at the others beta times the divergence stands, whatever was sampled."""
    inputs = make_inputs()
    size = len(inputs.logprobs_T)
    own = torch.full((size, 2), math.log(0.25), dtype=torch.float64).requires_grad_()
    teacher = torch.full((size, 2), math.nan, dtype=torch.float64)
    teacher[::3, 0] = math.log(0.5)
    spec = Distilled(Clipped(), coefficient=0.7)
    plain = term_losses(spec, inputs)
    (wanted,) = torch.autograd.grad(plain.sum(), inputs.logprobs_T)

    losses = term_losses(spec, replace(inputs, units=UnitLogprobs(own, teacher)))
    by_token, by_unit = torch.autograd.grad(losses.sum(), (inputs.logprobs_T, own))

    is_told = torch.arange(size) % 3 == 0
    assert torch.equal(losses[~is_told], plain[~is_told])
    assert torch.equal(by_token, torch.where(is_told, 0.0, wanted))
    of_one = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    torch.testing.assert_close(losses[is_told], torch.full_like(losses[is_told], 0.7 * of_one))
    assert by_unit[is_told, 0].all()
    assert not by_unit[~is_told].any()
    assert not by_unit[:, 1].any()
    assert not clipped_tokens(spec, replace(inputs, units=UnitLogprobs(own, teacher)))[is_told].any()
    assert clipped_tokens(spec, inputs)[is_told].any()


def test_a_teacher_that_leaves_no_rest_gives_numbers():
    """Its units have all probability, as float32 rounds it, and the policy's have none."""
    own = torch.full((1, 2), -200.0).requires_grad_()
    loss = unit_divergence(UnitLogprobs(own, torch.log(torch.tensor([[0.5, 0.5]]))), 5.0)
    loss.sum().backward()
    assert float(loss.detach()) == pytest.approx(5.0)
    assert own.grad.isfinite().all()


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
