"""The bandit itself: scores, gradients, and what is refused."""

import numpy as np
import pytest

from mrl.bandit.problem import Bandit, make_bandit, softmax
from mrl.errors import ConfigError


def test_reference_success_to_the_printed_digits(reference: Bandit) -> None:
    """p and q of the instance."""
    assert (f"{reference.p:.6g}", f"{reference.q:.6g}") == ("0.0144038", "0.269362")


def test_gradient_is_the_slope_of_success() -> None:
    """g* and grad log p equal finite differences in the logits."""
    logits, correct, step = np.array([0.3, -0.7, 1.1, 0.2]), (0, 3), 1e-6
    bandit = make_bandit(logits, (0, 0, 0, 0), correct)

    ups = [make_bandit(logits + step * np.eye(4)[a], (0, 0, 0, 0), correct).p for a in range(4)]
    downs = [make_bandit(logits - step * np.eye(4)[a], (0, 0, 0, 0), correct).p for a in range(4)]
    slope = (np.array(ups) - np.array(downs)) / (2 * step)
    np.testing.assert_allclose(bandit.gradient, slope, atol=1e-9)
    np.testing.assert_allclose(bandit.direction, slope / bandit.p, atol=1e-8)


def test_scores_have_the_stated_squares_and_no_mean(small: Bandit) -> None:
    """||s(a)||^2 = 1 - 2 pi_a + ||pi||^2 and E_pi s = 0."""
    np.testing.assert_allclose((small.scores**2).sum(axis=1), small.score_squares, atol=1e-15)
    np.testing.assert_allclose(small.pi_K @ small.scores, np.zeros(4), atol=1e-15)


def test_softmax_bears_large_logits() -> None:
    """No overflow, and rows sum to 1."""
    np.testing.assert_allclose(softmax([[1000.0, 1000.0], [-2000.0, 0.0]]), [[0.5, 0.5], [0.0, 1.0]])


@pytest.mark.parametrize(
    ("learner", "peer", "correct", "word"),
    [
        ([0.5, 0.5], [1.0, 0.0], [True, False], "peer"),
        ([0.5, 0.6], [0.5, 0.5], [True, False], "learner"),
        ([0.5, 0.5], [0.5, 0.5], [True, True], "correct"),
        ([0.5, 0.5], [0.5, 0.5], [False, False], "correct"),
    ],
)
def test_what_the_formulas_cannot_divide_by_is_refused(learner, peer, correct, word: str) -> None:
    """A peer without support, no distribution, nothing or everything correct."""
    with pytest.raises(ConfigError, match=word):
        Bandit(np.array(learner), np.array(peer), np.array(correct))
