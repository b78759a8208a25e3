"""Families of bandits in which one quantity varies, and the path that each method takes through the plane.

Shapes: K arms; P points of a path.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mrl.bandit.closed_forms import prp_residual, residual_bias_bound
from mrl.bandit.methods import MAIN, Settings, method_named
from mrl.bandit.overlap import chi_squared
from mrl.bandit.problem import Bandit, Floats, restricted


class Path(NamedTuple):
    """Support and variance of one method along a sweep."""

    support_P: Floats
    variance_P: Floats


class Sweep(NamedTuple):
    """A quantity, its values, and one path per method."""

    values_P: Floats
    paths: dict[str, Path]


def with_success(bandit: Bandit, *, p: float | None = None, q: float | None = None) -> Bandit:
    """The same bandit with another success of learner or peer; inside C and outside, arms stay in proportion."""
    learner_K, peer_K = bandit.pi_K, bandit.mu_K
    if p is not None:
        learner_K = _blend(learner_K, bandit, p)
    if q is not None:
        peer_K = _blend(peer_K, bandit, q)
    return Bandit(learner_K, peer_K, bandit.correct_K)


def with_mismatch(bandit: Bandit, tilt: float) -> Bandit:
    """A peer of the same success q that inside C and outside prefers other arms: mu proportional to pi e^(tilt z).

    z alternates between +1 and -1 along the arms. At 0 only p and q tell the two apart, and chi^2 is the least that
    they allow, p^2/q + (1-p)^2/(1-q) - 1.
    """
    signs_K = np.where(np.arange(len(bandit.pi_K)) % 2 == 0, 1.0, -1.0)
    tilted_K = bandit.pi_K * np.exp(tilt * signs_K)
    return Bandit(bandit.pi_K, _blend(tilted_K, bandit, bandit.q), bandit.correct_K)


def _blend(weights_K: Floats, bandit: Bandit, success: float) -> Floats:
    right_K, wrong_K = (restricted(weights_K, keep_K) for keep_K in (bandit.correct_K, ~bandit.correct_K))
    return success * right_K + (1 - success) * wrong_K


def sweep(values_P: Sequence[float] | Floats, bandits: Sequence[Bandit], settings: Sequence[Settings]) -> Sweep:
    """The path of every main method over pairs of bandit and settings."""
    paths = {}
    for name in MAIN:
        closed = method_named(name).closed
        moments = [closed(bandit, one) for bandit, one in zip(bandits, settings, strict=True)]
        support_P = [one.support(bandit) for one, bandit in zip(moments, bandits, strict=True)]
        paths[name] = Path(np.array(support_P), np.array([one.variance for one in moments]))
    return Sweep(np.asarray(values_P, dtype=np.float64), paths)


def over_p(bandit: Bandit, settings: Settings, values_P: Sequence[float] | Floats) -> Sweep:
    """The learner's success varies."""
    return sweep(values_P, [with_success(bandit, p=float(p)) for p in values_P], [settings] * len(values_P))


def over_q(bandit: Bandit, settings: Settings, values_P: Sequence[float] | Floats) -> Sweep:
    """The peer's success varies."""
    return sweep(values_P, [with_success(bandit, q=float(q)) for q in values_P], [settings] * len(values_P))


def over_group(bandit: Bandit, settings: Settings, sizes_P: Sequence[int]) -> Sweep:
    """Both groups grow together, G = G'."""
    grown = [settings._replace(group=size, peer_group=size) for size in sizes_P]
    return sweep(list(map(float, sizes_P)), [bandit] * len(sizes_P), grown)


def over_mismatch(bandit: Bandit, settings: Settings, tilts_P: Sequence[float] | Floats) -> Sweep:
    """chi^2(pi || mu) varies at fixed p and q; `values_P` holds chi^2."""
    bandits = [with_mismatch(bandit, float(tilt)) for tilt in tilts_P]
    return sweep([chi_squared(one) for one in bandits], bandits, [settings] * len(bandits))


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
    """Residuals uniform in [-kappa, kappa], independent per arm; every kappa scales the same draws."""
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
