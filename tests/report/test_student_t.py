"""Quantiles of Student's t: printed tables, and those of scipy."""

import pytest
from scipy import stats

from mrl.report.student_t import two_sided_quantile, two_sided_tail

KNOWN = {
    0.95: {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 15: 2.1314, 16: 2.1199, 17: 2.1098, 30: 2.0423, 120: 1.9799},
    0.99: {1: 63.6567, 2: 9.9248, 5: 4.0321, 16: 2.9208, 29: 2.7564, 60: 2.6603},
}


@pytest.mark.parametrize(("probability", "degrees"), [(p, n) for p, column in KNOWN.items() for n in column])
def test_quantiles_are_those_of_printed_tables(probability, degrees):
    """To all four digits that tables print."""
    assert two_sided_quantile(probability, degrees) == pytest.approx(KNOWN[probability][degrees], abs=5.1e-5)


def test_many_degrees_tend_to_the_normal_distribution():
    """From above, by z (z^2 + 1) / 4n."""
    z, degrees = 1.959963985, 5_000
    assert two_sided_quantile(0.95, degrees) == pytest.approx(z + z * (z**2 + 1) / (4 * degrees), abs=1e-6)


@pytest.mark.parametrize("degrees", [1, 2, 5, 6, 40])
def test_quantiles_are_those_of_scipy(degrees):
    """To nine digits, from narrow to wide."""
    for probability in (0.08, 0.5, 0.8, 0.999):
        wanted = stats.t.ppf((1 + probability) / 2, degrees)
        assert two_sided_quantile(probability, degrees) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("degrees", [1, 2, 7, 40])
def test_tails_are_those_of_scipy(degrees):
    """On both sides of 0."""
    for t in (0.0, 0.3, -2.0, 9.0):
        assert two_sided_tail(t, degrees) == pytest.approx(2 * stats.t.sf(abs(t), degrees), rel=1e-9, abs=1e-14)
