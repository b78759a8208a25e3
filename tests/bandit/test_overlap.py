"""Rescue probability, chi^2, effective rows, growth with length."""

import itertools

import numpy as np
import pytest

from mrl.bandit.overlap import chi_squared, ratio_second_moment, rescue_probability, sequence_growth
from mrl.bandit.problem import Bandit


def test_reference_figures_to_the_printed_digits(reference: Bandit) -> None:
    """chi^2 and alpha of the instance."""
    alpha = rescue_probability(reference.p, reference.q, 4, 4)

    assert (f"{chi_squared(reference):.6g}", f"{float(alpha):.6g}") == ("1.12959", "0.674708")


def test_rescue_probability_counts_outcomes() -> None:
    """Over all reward patterns of three own and two peer answers."""
    p, q, total = 0.2, 0.35, 0.0
    for own in itertools.product((0, 1), repeat=3):
        for peer in itertools.product((0, 1), repeat=2):
            chance = np.prod([p if r else 1 - p for r in own]) * np.prod([q if r else 1 - q for r in peer])
            total += chance * (not any(own) and any(peer))

    assert float(rescue_probability(p, q, 3, 2)) == pytest.approx(total, abs=1e-15)


def test_rescue_probability_keeps_tiny_values() -> None:
    """q = 1e-18 is not lost against 1."""
    assert float(rescue_probability(0.0, 1e-18, 4, 8)) == pytest.approx(8e-18, rel=1e-12)


def test_ratio_moments(small: Bandit) -> None:
    """E_mu[w^2] by its definition; equal policies lose no rows."""
    slow = sum(small.mu_K[a] * (small.pi_K[a] / small.mu_K[a]) ** 2 for a in range(4))

    assert ratio_second_moment(small) == pytest.approx(slow)
    assert ratio_second_moment(Bandit(small.pi_K, small.pi_K, small.correct_K)) == pytest.approx(1)


@pytest.mark.parametrize(
    ("spread", "wanted"),
    [(0.05, (1.17, 1.90, 12.9)), (0.1, (1.90, 12.9, 2.8e4)), (0.2, (12.9, 2.8e4, 6.1e17))],
)
def test_sequence_growth_to_the_printed_digits(spread: float, wanted: tuple[float, ...]) -> None:
    """T = 64, 256, 1024."""
    np.testing.assert_allclose(sequence_growth(np.array([64, 256, 1024]), spread), wanted, rtol=0.012)


def test_sequence_growth_is_a_product_over_tokens() -> None:
    """Normal log-ratios of mean -d^2/2: the second moment of the product, sampled."""
    spread, tokens = 0.1, 40
    logs = np.random.default_rng(0).normal(-(spread**2) / 2, spread, (200_000, tokens)).sum(axis=1)
    squares = np.exp(2 * logs)

    assert abs(squares.mean() - sequence_growth(tokens, spread)) < 4 * squares.std() / np.sqrt(len(squares))
