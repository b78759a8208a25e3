"""One function per method: expectation and second moment of its gradient estimator on one prompt.

The methods GRPO, PRP, XGRPO and SGT are those of arXiv 2605.07244; these formulas are this project's own analysis of
them in the bandit model, written for rewards of 0 and 1, no division by the standard deviation, no clipping.

    pi, mu      learner, peer          pi_C, mu_C, mu_F   restricted to correct (C) or wrong (F) arms
    p, q        pi(C), mu(C)           w                  pi / mu, the density ratio
    G, G'       own rows, peer rows    s(a)               e_a - pi, the score
    g*          p (pi_C - pi)          b                  a baseline that does not depend on the rows

Each returns `Moments`, from which follow support S = < E ghat, pi_C - pi > and variance V = E||ghat||^2 - ||E ghat||^2.
"""

import numpy as np

from mrl.bandit.counting import mixed_baseline, own_baseline
from mrl.bandit.moments import Moments, of_independent_rows
from mrl.bandit.overlap import rescue_probability
from mrl.bandit.problem import Bandit, Floats, restricted


def grpo_mean_baseline(bandit: Bandit, group: int) -> Moments:
    """Return the moments of GRPO with the group's mean as baseline.

        E ghat = (1 - 1/G) g*

    A group whose rewards are all equal gives nothing, which happens with probability (1-p)^G + p^G. E||ghat||^2 is a
    sum over the number of successes (`counting.own_baseline`).
    """
    return Moments((1 - 1 / group) * bandit.gradient, own_baseline(bandit, group).second)


def grpo_fixed_baseline(bandit: Bandit, group: int, baseline: float) -> Moments:
    """Return the moments of GRPO with a fixed baseline b.

    E ghat = g*,   V = (1/G) ( E_pi[(r - b)^2 ||s||^2] - ||g*||^2 )
    """
    second = bandit.pi_K @ ((bandit.rewards - baseline) ** 2 * bandit.score_squares)
    return of_independent_rows(bandit.gradient, float(second), group)


def prp_weighted(bandit: Bandit, peer_group: int, baseline: float, weights_K: Floats) -> Moments:
    """Return the moments of PRP: peer rows, each with a weight what(a) in place of the density ratio.

    E ghat = E_mu[what (r - b) s],   V = (1/G') ( E_mu[what^2 (r - b)^2 ||s||^2] - ||E ghat||^2 )
    """
    factors_K = weights_K * (bandit.rewards - baseline)
    mean_K = (bandit.mu_K * factors_K) @ bandit.scores
    return of_independent_rows(mean_K, float(bandit.mu_K @ (factors_K**2 * bandit.score_squares)), peer_group)


def prp_exact(bandit: Bandit, peer_group: int, baseline: float) -> Moments:
    """Return the moments of PRP with the exact density ratio w = pi / mu.

        E ghat = g*,   V = (1/G') ( E_pi[w (r - b)^2 ||s||^2] - ||g*||^2 )

    Unbiased, so its support vanishes with p as GRPO's does; the variance is heavy in chi^2(pi || mu).
    """
    second = bandit.pi_K @ (bandit.ratio * (bandit.rewards - baseline) ** 2 * bandit.score_squares)
    return of_independent_rows(bandit.gradient, float(second), peer_group)


def prp_residual(bandit: Bandit, peer_group: int, baseline: float, residual_nats_K: Floats) -> Moments:
    """Return the moments of PRP when alignment adds a residual xi to each log-ratio: what = w e^xi.

    E ghat = E_pi[e^xi (r - b) s],   V = (1/G') ( E_pi[w e^(2 xi) (r - b)^2 ||s||^2] - ||E ghat||^2 )
    """
    return prp_weighted(bandit, peer_group, baseline, bandit.ratio * np.exp(residual_nats_K))


def residual_bias_bound(bandit: Bandit, baseline: float, kappa_nats: float) -> float:
    """Return a bound on the bias of `prp_residual` when |xi| <= kappa everywhere.

    || E_pi[(e^xi - 1)(r - b) s] || <= (e^kappa - 1) E_pi[|r - b| ||s||]
    """
    norms_K = np.sqrt(bandit.score_squares)
    return float(np.expm1(kappa_nats) * (bandit.pi_K @ (np.abs(bandit.rewards - baseline) * norms_K)))


def prp_truncated(bandit: Bandit, peer_group: int, baseline: float, cap: float) -> Moments:
    """Return the moments of PRP with the ratio cut at c: what = min(w, c).

    E ghat = E_mu[min(w, c) (r - b) s] = g* - E_pi[(1 - c/w)_+ (r - b) s],
    V = (1/G') ( E_mu[min(w, c)^2 (r - b)^2 ||s||^2] - ||E ghat||^2 )
    """
    return prp_weighted(bandit, peer_group, baseline, np.minimum(bandit.ratio, cap))


def prp_recompute(bandit: Bandit, peer_group: int) -> Moments:
    """Return the moments of PRP that treats peer rows as its own, baseline b = q: what = 1.

        E ghat = q (1 - q) (mu_C - mu_F),   V = (1/G') ( E_mu[(r - q)^2 ||s||^2] - ||E ghat||^2 )

    Neither p nor pi stands in the expectation: support where the learner has none, and a bias that never goes away.
    """
    right_K, wrong_K = (restricted(bandit.mu_K, keep_K) for keep_K in (bandit.correct_K, ~bandit.correct_K))
    mean_K = bandit.q * (1 - bandit.q) * (right_K - wrong_K)
    second = bandit.mu_K @ ((bandit.rewards - bandit.q) ** 2 * bandit.score_squares)
    return of_independent_rows(mean_K, float(second), peer_group)


def xgrpo_peer_only(bandit: Bandit, group: int, peer_group: int) -> Moments:
    """Return the moments of XGRPO with the mean reward of the peer's group as baseline.

        E ghat = g* for any peer,   E||(r - b) s||^2 = E_pi[((r - q)^2 + q (1-q) / G') ||s||^2]

    All rows share one random baseline, yet V = (1/G) ( E_pi[...] - ||g*||^2 ) as if each had its own: the mean score is
    zero, so a common shift of the rewards moves no two rows together.
    """
    noise = bandit.q * (1 - bandit.q) / peer_group
    second = bandit.pi_K @ (((bandit.rewards - bandit.q) ** 2 + noise) * bandit.score_squares)
    return of_independent_rows(bandit.gradient, float(second), group)


def xgrpo_pooled(bandit: Bandit, group: int, peer_group: int, peer_weight: float) -> Moments:
    """Return the moments of XGRPO with the pooled baseline (1 - w) mean(own) + w mean(peer).

        E ghat = (1 - (1 - w)/G) g*

    No density ratio. E||ghat||^2 is a sum over the numbers of successes (`counting.mixed_baseline`).
    """
    mean_K = (1 - (1 - peer_weight) / group) * bandit.gradient
    return Moments(mean_K, mixed_baseline(bandit, group, peer_group, peer_weight).second)


def sgt(bandit: Bandit, group: int, peer_group: int, lambda_: float) -> Moments:
    """Return the moments of SGT: GRPO, and where the own group failed, lambda times the score of a peer success.

        E ghat     = (1 - 1/G) g* + lambda alpha (mu_C - pi),   alpha = (1-p)^G [ 1 - (1-q)^G' ]
        E||ghat||^2 = E||ghat_GRPO||^2 + lambda^2 alpha E_{mu_C}||s||^2     <=  E||ghat_GRPO||^2 + 2 lambda^2 alpha

    The peer success is verified. There is no cross term: a group that failed as a whole gives GRPO exactly zero.
    """
    own = grpo_mean_baseline(bandit, group)
    alpha = float(rescue_probability(bandit.p, bandit.q, group, peer_group))
    right_K = restricted(bandit.mu_K, bandit.correct_K)
    mean_K = own.mean_K + lambda_ * alpha * (right_K - bandit.pi_K)
    return Moments(mean_K, own.second + lambda_**2 * alpha * float(right_K @ bandit.score_squares))
