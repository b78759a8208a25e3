"""Mean and second moment of a gradient estimator, and the two coordinates of the plane that follow from them.

Shapes: K arms.
"""

from typing import NamedTuple

import numpy as np

from mrl.bandit.problem import Bandit, Floats


class Moments(NamedTuple):
    """`mean_K` is E ghat, `second` is E||ghat||^2, for one prompt and one step."""

    mean_K: Floats
    second: float

    @property
    def variance(self) -> float:
        """V = E||ghat||^2 - ||E ghat||^2, the stability cost."""
        return self.second - float(self.mean_K @ self.mean_K)

    def support(self, bandit: Bandit) -> float:
        """Return S = < E ghat, grad log p >: first-order rise of log p per unit of step size."""
        return float(self.mean_K @ bandit.direction)

    def bias(self, bandit: Bandit) -> float:
        """Return || E ghat - g* ||: distance from the learner's own policy gradient."""
        return float(np.linalg.norm(self.mean_K - bandit.gradient))


def of_independent_rows(mean_K: Floats, row_second: float, num_rows: int) -> Moments:
    """Return the moments of the average of n independent rows, each with this mean and second moment.

    V = (1/n) ( E||row||^2 - ||E row||^2 )
    """
    squared = float(mean_K @ mean_K)
    return Moments(mean_K, (row_second - squared) / num_rows + squared)
