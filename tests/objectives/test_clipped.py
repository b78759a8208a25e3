"""PPO, GRPO, DAPO, GSPO: the clipped terms."""

import math
from dataclasses import replace

import pytest
import torch

from mrl.objectives.specs import Clipped, Correction
from mrl.objectives.terms import clipped_surrogate, term_losses

SPECS = [
    Clipped(0.2, 0.2),
    Clipped(0.2, 0.28),
    Clipped(0.4, 0.1, dual_clip=3.0),
    Clipped(1.0, math.inf),
    Clipped(0.2, 0.2, correction=Correction()),
    Clipped(0.2, 0.2, correction=Correction("token", "mask", 0.5, 5.0)),
    Clipped(0.2, 0.2, base="behaviour"),
    Clipped(0.2, 0.2, base="behaviour", dual_clip=3.0),
    Clipped(3e-4, 4e-4, ratio="sequence"),
    Clipped(3e-4, 4e-4, ratio="sequence", dual_clip=3.0),
    Clipped(0.2, 0.2, ratio="sequence", base="behaviour"),
]


def bounded(value, low, high):
    return max(low, min(high, value))


def twin(spec):
    """PPO, eq. 7, and GSPO, eq. 5, one row at a time: r of a token, or the geometric mean of the row's ratios."""

    def losses(row, start, _updates):
        base = row.prox if spec.base == "proximal" else row.mu
        logs = [lp - q for lp, q in zip(row.lp, base, strict=True)]
        if spec.ratio == "sequence":
            ratios = [math.exp(min(10.0, sum(logs) / len(logs)))] * len(logs)
        else:
            ratios = [math.exp(bounded(log, -20.0, 20.0)) for log in logs]
        found = []
        for r, a, prox, mu in zip(ratios, row.a, start.prox, start.mu, strict=True):
            loss = -min(r * a, bounded(r, 1 - spec.clip_low, 1 + spec.clip_high) * a)
            if spec.dual_clip and a < 0:
                loss = min(loss, -spec.dual_clip * a)
            w, correction = math.exp(bounded(prox - mu, -20.0, 20.0)), spec.correction
            if correction is None:
                w = 1.0
            elif correction.action == "mask":
                w = w if correction.lower <= w <= correction.upper else 0.0
            else:
                w = bounded(w, correction.lower, correction.upper)
            found.append(w * loss)
        return found

    return losses


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_term_equals_its_slow_twin(spec, make_inputs, check_term):
    """Values, gradients and detachments, on every side of every clip. Rows give sequence ratios one row-wise twin."""
    check_term(spec, twin(spec), make_inputs())


def test_zero_advantage_gives_exactly_zero(make_inputs, gradient):
    """A token without advantage contributes exactly nothing, whatever its ratio."""
    for spec in SPECS:
        inputs = make_inputs()
        none = inputs.advantages_T == 0
        assert not term_losses(spec, inputs)[none].any()
        assert not gradient(spec, inputs)[none].any()


def test_at_the_start_of_a_step_the_ratio_is_exactly_one(make_inputs, gradient):
    """pi_theta = pi_prox: the gradient is that of REINFORCE, -A, bit for bit, also for tokens of a peer."""
    inputs = make_inputs()
    inputs = replace(inputs, proximal_T=inputs.logprobs_T.detach())
    for spec in (Clipped(0.2, 0.2), Clipped(3e-4, 4e-4, ratio="sequence")):
        assert torch.equal(term_losses(spec, inputs), -inputs.advantages_T)
        assert torch.equal(gradient(spec, inputs), -inputs.advantages_T)


def test_a_peer_that_is_the_learner_itself_is_grpo(make_inputs):
    """PRP `behaviour` with the peer's log-probs equal to those of the step's start is the own term, bit for bit."""
    inputs = make_inputs()
    inputs = replace(inputs, behaviour_T=inputs.proximal_T)
    own, peer = Clipped(0.2, 0.28), Clipped(0.2, 0.28, base="behaviour")
    assert torch.equal(term_losses(own, inputs), term_losses(peer, inputs))


def test_a_weight_of_one_changes_nothing(make_inputs):
    """`decoupled` with pi_prox = pi_behaviour is `recompute`, bit for bit."""
    inputs = make_inputs()
    inputs = replace(inputs, behaviour_T=inputs.proximal_T)
    with_weight, without = Clipped(correction=Correction()), Clipped()
    assert torch.equal(term_losses(with_weight, inputs), term_losses(without, inputs))


def test_the_token_form_of_gspo_has_the_gradient_of_the_sequence_form(make_inputs, gradient):
    """d/d theta of s A is s A times the mean score of the row (arXiv 2507.18071), here before any clip."""
    inputs = make_inputs()
    spec = Clipped(1.0, math.inf, ratio="sequence")
    found = gradient(spec, inputs)
    for row in range(int(inputs.row_T.max()) + 1):
        mine = inputs.row_T == row
        logprobs = inputs.logprobs_T[mine].detach().requires_grad_()
        log_ratio = (logprobs - inputs.proximal_T[mine].detach()).mean()
        loss = -log_ratio.exp() * inputs.advantages_T[mine].detach().mean()
        (expected,) = torch.autograd.grad(loss, logprobs)
        if log_ratio < 10:
            torch.testing.assert_close(found[mine] / mine.sum(), expected)


def test_the_dual_clip_bounds_bad_answers_only():
    """A ratio of 9 costs 3 |A| where A < 0, and is clipped as ever where A > 0."""
    loss = clipped_surrogate(
        torch.tensor([9.0, 2.0, 9.0]), torch.tensor([-0.5, -0.5, 0.5]), clip_low=0.2, clip_high=0.2, dual_clip=3.0
    )
    assert loss.tolist() == pytest.approx([1.5, 1.0, -0.6])
