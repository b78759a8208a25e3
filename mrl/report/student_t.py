"""Quantiles and tails of Student's t distribution for any whole number of degrees of freedom.

With t = sqrt(n) tan(theta), the probability between -t and t is a finite sum of powers of cos(theta) (Abramowitz and
Stegun 26.7.3 and 26.7.4), so that a bisection over theta finds a quantile to the last digits.
"""

import math

BISECTIONS = 60
"""Halvings of the interval of theta: after 60 its ends differ by less than a double can tell."""


def two_sided_quantile(probability: float, degrees: int) -> float:
    """Return the t with P(-t < T < t) = `probability`, which lies in (0, 1)."""
    low, high = 0.0, math.pi / 2
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < probability else (low, middle)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def two_sided_tail(t: float, degrees: int) -> float:
    """Return P(|T| > |t|), the p-value of a two-sided test."""
    return max(0.0, 1.0 - _within(math.atan(abs(t) / math.sqrt(degrees)), degrees))


def _within(theta: float, degrees: int) -> float:
    """Return P(-t < T < t): for even degrees of freedom the sum, for odd ones the sum plus theta, times 2 / pi."""
    is_odd = degrees % 2
    term = math.cos(theta) if is_odd else 1.0
    total = 0.0
    for power in range(1 + is_odd, degrees, 2):
        total += term
        term *= math.cos(theta) ** 2 * power / (power + 1)
    total *= math.sin(theta)
    return 2 / math.pi * (theta + total) if is_odd else total
