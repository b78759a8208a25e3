"""Exact moments where the baseline depends on the rewards of the group: a sum over the counts of successes.

With fixed rewards every row gets a fixed coefficient, and rows are independent given their rewards. So the K^G groups
fall into G + 1 cases, and a group of 64 costs a few thousand additions. Shapes: K arms; k own successes of G.
"""

import math

import numpy as np

from mrl.bandit.moments import Moments
from mrl.bandit.problem import Bandit, Floats, restricted


def binomial(group: int, probability: float) -> Floats:
    """Return P(k successes of `group`) for k = 0..group, [group + 1]."""
    counts = np.arange(group + 1)
    ways = np.array([float(math.comb(group, k)) for k in counts])
    result: Floats = ways * probability**counts * (1 - probability) ** (group - counts)
    return result


def own_baseline(bandit: Bandit, group: int) -> Moments:
    """Return the moments of ghat with the mean of the group's own rewards as baseline: no peer."""
    return mixed_baseline(bandit, group, 0, 0.0)


def mixed_baseline(bandit: Bandit, group: int, peer_group: int, peer_weight: float) -> Moments:
    """Return the moments of ghat = (1/G) sum_i (r_i - b) s_i with b = (1 - w) mean(own rewards) + w mean(peer rewards).

        E||ghat||^2 = E_{k,k'} [ sum_i c_i^2 var_i + || sum_i c_i m_i ||^2 ],   c_i = (r_i - b) / G

    m and var are mean and variance of the score given the reward of a row; k ~ Bin(G, p), k' ~ Bin(G', q). w = 0 is
    GRPO with the group mean, which needs no peer (G' = 0), w = 1 the peer's mean alone.
    """
    right_K, wrong_K = (restricted(bandit.pi_K, keep_K) for keep_K in (bandit.correct_K, ~bandit.correct_K))
    squares = [_score_variance(bandit, given_K) for given_K in (right_K, wrong_K)]
    scores_2K = np.stack([right_K, wrong_K]) - bandit.pi_K
    chance = np.outer(binomial(group, bandit.p), binomial(peer_group, bandit.q))
    own = np.arange(group + 1)[:, None]
    peer_means = np.arange(peer_group + 1)[None, :] / max(1, peer_group)
    baseline = (1 - peer_weight) * own / group + peer_weight * peer_means
    per_right, per_wrong = (1 - baseline) / group, -baseline / group
    spread = own * per_right**2 * squares[0] + (group - own) * per_wrong**2 * squares[1]
    means = np.stack([own * per_right, (group - own) * per_wrong], axis=-1) @ scores_2K
    mean_K = np.einsum("ij,ijk->k", chance, means)
    return Moments(mean_K, float((chance * (spread + (means**2).sum(axis=-1))).sum()))


def _score_variance(bandit: Bandit, given_K: Floats) -> float:
    """Return E||s||^2 - ||E s||^2 when the arm is drawn from `given_K`."""
    mean_K = given_K - bandit.pi_K
    return float(given_K @ bandit.score_squares - mean_K @ mean_K)
