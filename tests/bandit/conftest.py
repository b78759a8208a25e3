"""Bandits, and the slow twin of every closed form: all possible groups, one by one."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from mrl.bandit.moments import Moments
from mrl.bandit.problem import Bandit, make_bandit, reference_bandit


@pytest.fixture
def reference() -> Bandit:
    """The instance of the printed table."""
    return reference_bandit()


@pytest.fixture
def small() -> Bandit:
    """Four arms, two correct, a learner and a peer that differ on every arm."""
    return make_bandit((-0.4, -1.1, 0.9, 0.3), (0.5, -0.2, -0.9, 0.1), (0, 1))


Estimate = Callable[[tuple[int, ...], tuple[int, ...]], np.ndarray]


@pytest.fixture
def enumerate_moments() -> Callable[..., Moments]:
    """E ghat and E||ghat||^2 over all K^(G + G') outcomes of own and peer rows."""

    def enumerate_(bandit: Bandit, group: int, peer_group: int, estimate: Estimate) -> Moments:
        arms = range(len(bandit.pi_K))
        mean, second = np.zeros(len(bandit.pi_K)), 0.0
        for own in itertools.product(arms, repeat=group):
            for peer in itertools.product(arms, repeat=peer_group):
                chance = np.prod(bandit.pi_K[list(own)]) * np.prod(bandit.mu_K[list(peer)])
                ghat = estimate(own, peer)
                mean += chance * ghat
                second += float(chance * (ghat @ ghat))
        return Moments(mean, second)

    return enumerate_
