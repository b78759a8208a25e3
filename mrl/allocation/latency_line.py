"""How much slower a request gets beside others: seconds per token as a line a + b c over the c that run at once.

An engine that never ran full has shown what it makes when it is half empty; by the line a full one is foreseen.
"""

from dataclasses import dataclass

RIDGE = (1e-4, 1e-2)
"""Added to the diagonal of the normal equations, so that samples at one place are no division by zero."""


@dataclass
class LatencyLine:
    """Seconds per token of a request beside c - 1 others, by decayed least squares with a ridge."""

    ones: float = 0.0
    sum_c: float = 0.0
    sum_cc: float = 0.0
    sum_z: float = 0.0
    sum_cz: float = 0.0

    def add(self, running: float, seconds_per_token: float, keep: float) -> None:
        """Count one sample, after scaling those before by `keep`."""
        self.ones = self.ones * keep + 1.0
        self.sum_c = self.sum_c * keep + running
        self.sum_cc = self.sum_cc * keep + running * running
        self.sum_z = self.sum_z * keep + seconds_per_token
        self.sum_cz = self.sum_cz * keep + running * seconds_per_token

    def seconds_per_token(self, running: float) -> float | None:
        """The line at c = running; the mean where samples tell no line; None without samples.

        They tell none where one request would take no time (a <= 0), or more requests less time each (b < 0).
        """
        if self.ones <= 0.0:
            return None
        p, q, r = self.ones + RIDGE[0], self.sum_c, self.sum_cc + RIDGE[1]
        determinant = p * r - q * q
        a = (self.sum_z * r - self.sum_cz * q) / determinant
        b = (self.sum_cz * p - self.sum_z * q) / determinant
        return self.sum_z / self.ones if a <= 0.0 or b < 0.0 else a + b * running
