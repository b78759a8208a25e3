"""Quantiles of Student's t: printed tables, and the density integrated by hand."""

import math

import pytest

from mrl.report.student_t import probability_within, two_sided_quantile

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
def test_probabilities_are_areas_below_the_density(degrees):
    """Simpson's rule over Gamma((n+1)/2) / (sqrt(n pi) Gamma(n/2)) (1 + t^2/n)^(-(n+1)/2)."""
    log_scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - math.log(degrees * math.pi) / 2

    def density(t: float) -> float:
        return math.exp(log_scale - (degrees + 1) / 2 * math.log1p(t**2 / degrees))

    for edge in (0.1, 1.0, 2.5):
        width, inner = edge / 1000, range(1, 1000)
        sum_of_heights = density(0) + density(edge) + sum((4 if k % 2 else 2) * density(k * width) for k in inner)
        assert probability_within(edge, degrees) == pytest.approx(2 * width / 3 * sum_of_heights, abs=1e-9)
