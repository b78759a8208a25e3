"""Monte Carlo twins of the closed forms: draw groups, form the estimate, average.

Shapes: K arms; N draws of an estimator; G own rows, H peer rows of each draw.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mrl.bandit.problem import Bandit, Floats

Ints = npt.NDArray[np.intp]


class SampledGroups(NamedTuple):
    """N independent prompts: the arms that learner and peer played, and the rewards."""

    own_NG: Ints
    peer_NH: Ints
    own_rewards_NG: Floats
    peer_rewards_NH: Floats

    def block(self, start: int, end: int) -> "SampledGroups":
        """Return the draws from `start` up to `end`."""
        part = slice(start, end)
        return SampledGroups(
            self.own_NG[part], self.peer_NH[part], self.own_rewards_NG[part], self.peer_rewards_NH[part]
        )


Estimator = Callable[[Bandit, SampledGroups, np.random.Generator], Floats]
"""(Bandit, groups, random generator) -> [N, K] draws of ghat."""


class Measured(NamedTuple):
    """Support and variance as measured, with their standard errors."""

    support: float
    support_error: float
    variance: float
    variance_error: float
    rescued: float
    """Share of draws in which the own group failed as a whole and the peer had a success."""


def draw_groups(bandit: Bandit, num_draws: int, group: int, peer_group: int, rng: np.random.Generator) -> SampledGroups:
    """Draw independent own and peer groups."""
    own_NG = rng.choice(len(bandit.pi_K), size=(num_draws, group), p=bandit.pi_K)
    peer_NH = rng.choice(len(bandit.mu_K), size=(num_draws, peer_group), p=bandit.mu_K)
    return SampledGroups(own_NG, peer_NH, bandit.rewards[own_NG], bandit.rewards[peer_NH])


def measure(
    bandit: Bandit, estimator: Estimator, groups: SampledGroups, rng: np.random.Generator, *, block: int = 20_000
) -> Measured:
    """Return support and variance of an estimator over all drawn groups, computed in blocks that fit the cache."""
    count = len(groups.own_NG)
    blocks = (groups.block(start, start + block) for start in range(0, count, block))
    draws_NK = np.concatenate([estimator(bandit, one, rng) for one in blocks])
    along_N = draws_NK @ bandit.direction
    distance_N = ((draws_NK - draws_NK.mean(axis=0)) ** 2).sum(axis=1)
    errors = [float(values_N.std() / np.sqrt(count)) for values_N in (along_N, distance_N)]
    rescued = float(is_rescued(groups).mean())
    return Measured(float(along_N.mean()), errors[0], float(distance_N.mean()), errors[1], rescued)


def is_rescued(groups: SampledGroups) -> npt.NDArray[np.bool_]:
    """Return [N] whether the own group failed as a whole and the peer had a success."""
    failed_N = groups.own_rewards_NG.sum(axis=1) == 0
    rescued_N: npt.NDArray[np.bool_] = failed_N & (groups.peer_rewards_NH.sum(axis=1) > 0)
    return rescued_N


def weighted_scores(bandit: Bandit, arms_NG: Ints, weights_NG: Floats) -> Floats:
    """Return sum_i weight_i s(a_i) per draw, [N, K]."""
    played_NK = np.zeros((len(arms_NG), len(bandit.pi_K)))
    for arms_N, weights_N in zip(arms_NG.T, weights_NG.T, strict=True):
        played_NK[np.arange(len(arms_N)), arms_N] += weights_N
    scored_NK: Floats = played_NK - weights_NG.sum(axis=1, keepdims=True) * bandit.pi_K
    return scored_NK


def own_rows(peer_weight: float) -> Estimator:
    """Return the estimator of GRPO (peer_weight 0) and XGRPO: own rows against a mixed baseline."""

    def estimate(bandit: Bandit, groups: SampledGroups, rng: np.random.Generator) -> Floats:
        own_N1, peer_N1 = (rows.mean(axis=1, keepdims=True) for rows in groups[2:])
        centred_NG = groups.own_rewards_NG - (1 - peer_weight) * own_N1 - peer_weight * peer_N1
        return weighted_scores(bandit, groups.own_NG, centred_NG / groups.own_NG.shape[1])

    return estimate


def own_rows_fixed(baseline: float) -> Estimator:
    """Return the estimator of GRPO against a fixed baseline."""

    def estimate(bandit: Bandit, groups: SampledGroups, rng: np.random.Generator) -> Floats:
        return weighted_scores(bandit, groups.own_NG, (groups.own_rewards_NG - baseline) / groups.own_NG.shape[1])

    return estimate


def peer_rows(weights_K: Floats, baseline: float) -> Estimator:
    """Return the estimator of PRP: peer rows with a weight per arm."""

    def estimate(bandit: Bandit, groups: SampledGroups, rng: np.random.Generator) -> Floats:
        factors_NH = weights_K[groups.peer_NH] * (groups.peer_rewards_NH - baseline)
        return weighted_scores(bandit, groups.peer_NH, factors_NH / groups.peer_NH.shape[1])

    return estimate


def rescued_rows(lambda_: float) -> Estimator:
    """Return the estimator of SGT: GRPO, and where the own group failed, lambda times the score of a uniformly drawn
    peer success.
    """
    grpo = own_rows(0.0)

    def estimate(bandit: Bandit, groups: SampledGroups, rng: np.random.Generator) -> Floats:
        tickets_NH = rng.random(groups.peer_NH.shape) * groups.peer_rewards_NH
        chosen_N1 = np.take_along_axis(groups.peer_NH, tickets_NH.argmax(axis=1)[:, None], axis=1)
        weights_N1 = lambda_ * is_rescued(groups)[:, None].astype(np.float64)
        return grpo(bandit, groups, rng) + weighted_scores(bandit, chosen_N1, weights_N1)

    return estimate
