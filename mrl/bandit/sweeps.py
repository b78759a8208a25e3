"""Families of bandits in which one quantity varies, and the path that each method takes through the plane.

Shapes: K arms; P points of a path.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mrl.bandit.closed_forms import prp_residual, residual_bias_bound
from mrl.bandit.methods import MAIN, Settings, method_named
from mrl.bandit.problem import Bandit, Floats, restricted


class Path(NamedTuple):
    """Support and variance of one method along a sweep."""

    support_P: Floats
    variance_P: Floats


class Sweep(NamedTuple):
    """A quantity, its values, and one path per method."""

    values_P: Floats
    paths: dict[str, Path]


def with_success(bandit: Bandit, p: float) -> Bandit:
    """Return the bandit with another success of the learner; inside C and outside, arms stay in proportion."""
    right_K, wrong_K = (restricted(bandit.pi_K, keep_K) for keep_K in (bandit.correct_K, ~bandit.correct_K))
    return Bandit(p * right_K + (1 - p) * wrong_K, bandit.mu_K, bandit.correct_K)


def over_p(bandit: Bandit, settings: Settings, values_P: Floats) -> Sweep:
    """Return the path of every main method as the learner's success varies."""
    bandits = [with_success(bandit, float(p)) for p in values_P]
    paths = {}
    for name in MAIN:
        closed = method_named(name).closed
        moments = [closed(one, settings) for one in bandits]
        support_P = [found.support(one) for found, one in zip(moments, bandits, strict=True)]
        paths[name] = Path(np.array(support_P), np.array([found.variance for found in moments]))
    return Sweep(values_P, paths)


class ResidualSweep(NamedTuple):
    """PRP under random residuals of at most kappa nats: R residuals at each of P values."""

    kappa_nats_P: Floats
    support_PR: Floats
    variance_PR: Floats
    bias_PR: Floats
    bound_P: Floats


def over_residual(
    bandit: Bandit, settings: Settings, kappas_P: Sequence[float] | Floats, num_residuals: int, seed: int
) -> ResidualSweep:
    """Return PRP's moments under residuals uniform in [-kappa, kappa], independent per arm; every kappa scales the same
    draws.
    """
    unit_RK = np.random.default_rng(seed).uniform(-1, 1, (num_residuals, len(bandit.pi_K)))
    moments = [
        [prp_residual(bandit, settings.peer_group, bandit.p, kappa * unit_K) for unit_K in unit_RK]
        for kappa in kappas_P
    ]
    return ResidualSweep(
        np.asarray(kappas_P, dtype=np.float64),
        np.array([[one.support(bandit) for one in row] for row in moments]),
        np.array([[one.variance for one in row] for row in moments]),
        np.array([[one.bias(bandit) for one in row] for row in moments]),
        np.array([residual_bias_bound(bandit, bandit.p, float(kappa)) for kappa in kappas_P]),
    )
