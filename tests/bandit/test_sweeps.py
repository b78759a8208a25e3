"""Families of bandits move one quantity and leave the others."""

import numpy as np
import pytest

from mrl.bandit.closed_forms import grpo_mean_baseline
from mrl.bandit.methods import MAIN, Settings
from mrl.bandit.overlap import chi_squared
from mrl.bandit.problem import Bandit, restricted
from mrl.bandit.sweeps import over_group, over_mismatch, over_p, over_q, over_residual, with_mismatch, with_success


def test_success_moves_and_proportions_stay(reference: Bandit) -> None:
    """p and q are what was asked for; inside C and outside nothing else changes."""
    moved = with_success(reference, p=0.4, q=0.01)

    assert (moved.p, moved.q) == pytest.approx((0.4, 0.01))
    for keep in (reference.correct_K, ~reference.correct_K):
        np.testing.assert_allclose(restricted(moved.pi_K, keep), restricted(reference.pi_K, keep), atol=1e-15)


def test_mismatch_grows_at_fixed_success(reference: Bandit) -> None:
    """chi^2 starts at the least that p and q allow and grows with the tilt."""
    bandits = [with_mismatch(reference, tilt) for tilt in (0.0, 1.0, 2.0, 4.0)]
    p, q = reference.p, reference.q

    assert chi_squared(bandits[0]) == pytest.approx(p**2 / q + (1 - p) ** 2 / (1 - q) - 1)
    assert np.all(np.diff([chi_squared(one) for one in bandits]) > 0)
    assert {round(one.q, 12) for one in bandits} == {round(q, 12)}


def test_paths_hold_support_and_variance(reference: Bandit) -> None:
    """Each point of a path is the closed form of its bandit."""
    swept = over_p(reference, Settings(), [0.01, 0.3])
    moments = grpo_mean_baseline(with_success(reference, p=0.3), 4)

    assert list(swept.paths) == list(MAIN)
    assert swept.paths["GRPO"].support_P[1] == pytest.approx(moments.support(with_success(reference, p=0.3)))
    assert swept.paths["GRPO"].variance_P[1] == pytest.approx(moments.variance)


def test_what_the_page_says_about_the_sweeps(reference: Bandit) -> None:
    """A better peer gives XGRPO no support; mismatch costs exact PRP; SGT likes groups of middling size."""
    settings = Settings()
    by_q = over_q(reference, settings, [0.01, 0.5, 0.97]).paths
    by_chi = over_mismatch(reference, settings, [0.0, 4.0]).paths
    by_group = over_group(reference, settings, [2, 8, 128]).paths

    np.testing.assert_allclose(np.diff(by_q["XGRPO pooled"].support_P), 0, atol=1e-15)
    assert np.all(np.diff(by_q["XGRPO pooled"].variance_P) > 0)
    assert np.all(np.diff(by_q["SGT"].support_P) > 0)
    assert by_chi["PRP exact"].variance_P[1] > 100 * by_chi["PRP exact"].variance_P[0]
    assert by_chi["GRPO"].variance_P[1] == by_chi["GRPO"].variance_P[0]
    assert by_group["SGT"].support_P.argmax() == 1


def test_residuals_scale_with_kappa(reference: Bandit) -> None:
    """Bias grows from zero, stays under its bound, and is of first order in kappa."""
    found = over_residual(reference, Settings(), [0.001, 0.01, 1.0], 20, seed=4)

    assert np.all(found.bias_PR <= found.bound_P[:, None])
    np.testing.assert_allclose(found.bias_PR[1] / found.bias_PR[0], 10, rtol=0.02)
