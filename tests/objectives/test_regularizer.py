"""Divergence from a reference, and the entropy bonus."""

import math

import pytest
import torch

from mrl.objectives.regularizer import reference_divergence, regularizer_losses
from mrl.objectives.specs import Regularizer

# Differences log ref - log theta inside every bound, at k3's bound, and beyond the exponent's.
DIFFERENCES = [-25.0, -9.0, -1.0, -0.1, 0.0, 0.1, 1.0, 2.5, 2.7, 25.0]


def make_logprobs():
    reference = torch.linspace(-3, -0.1, len(DIFFERENCES), dtype=torch.float64, requires_grad=True)
    logprobs = (reference - torch.tensor(DIFFERENCES, dtype=torch.float64)).detach().requires_grad_()
    return logprobs, reference


def slow(estimator, lp, ref):
    d = max(-20.0, min(20.0, ref - lp))
    k3 = max(-10.0, min(10.0, math.exp(d) - d - 1))
    return {"k1": -d, "k2": d * d / 2, "k3": k3}[estimator]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimators_equal_their_slow_twins(estimator):
    """Values, and gradients through the policy in training only."""
    logprobs, reference = make_logprobs()
    found = reference_divergence(estimator, logprobs, reference)
    expected = [slow(estimator, lp, ref) for lp, ref in zip(logprobs.tolist(), reference.tolist(), strict=True)]
    assert found.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15)
    found.sum().backward()
    assert reference.grad is None
    for lp, ref, slope in zip(logprobs.tolist(), reference.tolist(), logprobs.grad.tolist(), strict=True):
        numeric = (slow(estimator, lp + 1e-6, ref) - slow(estimator, lp - 1e-6, ref)) / 2e-6
        assert slope == pytest.approx(numeric, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_over_own_samples_is_the_divergence(estimator):
    """k1 and k3 are unbiased for KL(pi || ref)."""
    policy = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.2, 0.2, 0.4], dtype=torch.float64)
    mean = (policy * reference_divergence(estimator, policy.log(), reference.log())).sum()
    assert mean.item() == pytest.approx((policy * (policy / reference).log()).sum().item(), rel=1e-12)


def test_the_sum_is_kl_minus_entropy():
    """Both coefficients count, and their gradients reach the policy."""
    logprobs, reference = make_logprobs()
    entropy = torch.linspace(0, 1, len(DIFFERENCES), dtype=torch.float64, requires_grad=True)
    loss = regularizer_losses(Regularizer(0.3, "k2", 0.5), logprobs, reference_T=reference, entropy_T=entropy)
    torch.testing.assert_close(loss, 0.3 * reference_divergence("k2", logprobs, reference) - 0.5 * entropy)
    loss.sum().backward()
    assert entropy.grad.eq(-0.5).all()
    assert logprobs.grad.any()


def test_what_has_no_coefficient_is_not_needed():
    """A bonus without a reference, a divergence without entropies, and nothing at all."""
    logprobs, reference = make_logprobs()
    assert regularizer_losses(Regularizer(), logprobs).eq(0).all()
    assert regularizer_losses(Regularizer(entropy_coefficient=1.0), logprobs, entropy_T=reference).equal(-reference)
    only_kl = regularizer_losses(Regularizer(kl_coefficient=1.0), logprobs, reference_T=reference)
    assert only_kl.equal(reference_divergence("k3", logprobs, reference))
