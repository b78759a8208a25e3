"""Families of bandits move one quantity and leave the others."""

import numpy as np
import pytest

from mrl.bandit.closed_forms import grpo_mean_baseline
from mrl.bandit.methods import MAIN, Settings
from mrl.bandit.problem import Bandit, restricted
from mrl.bandit.sweeps import over_p, over_residual, with_success


def test_success_moves_and_proportions_stay(reference: Bandit) -> None:
    """p is what was asked for; inside C and outside nothing else changes, and the peer stays."""
    moved = with_success(reference, p=0.4)

    assert moved.p == pytest.approx(0.4)
    np.testing.assert_array_equal(moved.mu_K, reference.mu_K)
    for keep in (reference.correct_K, ~reference.correct_K):
        np.testing.assert_allclose(restricted(moved.pi_K, keep), restricted(reference.pi_K, keep), atol=1e-15)


def test_paths_hold_support_and_variance(reference: Bandit) -> None:
    """Each point of a path is the closed form of its bandit."""
    swept = over_p(reference, Settings(), np.array([0.01, 0.3]))
    moments = grpo_mean_baseline(with_success(reference, p=0.3), 4)

    assert list(swept.paths) == list(MAIN)
    assert swept.paths["GRPO"].support_P[1] == pytest.approx(moments.support(with_success(reference, p=0.3)))
    assert swept.paths["GRPO"].variance_P[1] == pytest.approx(moments.variance)


def test_residuals_scale_with_kappa(reference: Bandit) -> None:
    """Bias grows from zero, stays under its bound, and is of first order in kappa."""
    found = over_residual(reference, Settings(), [0.001, 0.01, 1.0], 20, seed=4)

    assert np.all(found.bias_PR <= found.bound_P[:, None])
    np.testing.assert_allclose(found.bias_PR[1] / found.bias_PR[0], 10, rtol=0.02)
