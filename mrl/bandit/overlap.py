"""Measures of the distance between learner and peer, and of how often one can help the other.

These quantities belong to this project's bandit analysis of methods named in arXiv 2605.07244. Shapes: K arms.
"""

import numpy as np

from mrl.bandit.problem import Bandit, Floats


def rescue_probability(p: float | Floats, q: float | Floats, group: int, peer_group: int) -> Floats:
    """Return alpha(p, q) = (1 - p)^G [ 1 - (1 - q)^G' ]: all G own answers fail and one of the peer's G' is right.

    Broadcasts over p and q below 1; small values keep their digits.
    """
    all_fail = np.exp(group * np.log1p(-np.asarray(p, dtype=np.float64)))
    peer_finds = -np.expm1(peer_group * np.log1p(-np.asarray(q, dtype=np.float64)))
    result: Floats = all_fail * peer_finds
    return result


def ratio_second_moment(bandit: Bandit) -> float:
    """Return E_mu[w^2] = 1 + chi^2(pi || mu), with w = pi / mu."""
    return float(bandit.mu_K @ bandit.ratio**2)


def chi_squared(bandit: Bandit) -> float:
    """Return chi^2(pi || mu) = E_mu[w^2] - 1, the variance of the density ratio."""
    return ratio_second_moment(bandit) - 1


def sequence_growth(num_tokens: float | Floats, ratio_std_nats: float) -> Floats:
    """Return 1 + chi^2 of a whole sequence, exp(T d^2), for T independent tokens with a log-ratio of std d.

    For one token with a normal log-ratio, mean -d^2/2 under mu, E_mu[w^2] = exp(d^2); over tokens it multiplies.
    """
    result: Floats = np.exp(np.asarray(num_tokens, dtype=np.float64) * ratio_std_nats**2)
    return result
