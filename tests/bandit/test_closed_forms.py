"""Closed forms against enumeration, against the printed table, and against each other."""

import numpy as np
import pytest

from mrl.bandit import closed_forms as forms
from mrl.bandit.methods import METHODS, Settings
from mrl.bandit.moments import Moments
from mrl.bandit.overlap import rescue_probability
from mrl.bandit.problem import REFERENCE_RESIDUAL_NATS, Bandit, restricted
from mrl.bandit.sweeps import with_success

G, H, LAMBDA, CAP, WEIGHT = 2, 3, 0.3, 0.9, 0.35
XI = np.array([0.4, -0.3, 0.2, -0.5])


def score(bandit: Bandit, arm: int) -> np.ndarray:
    """s(a) = e_a - pi."""
    return np.eye(len(bandit.pi_K))[arm] - bandit.pi_K


def own_average(bandit: Bandit, own, baseline: float) -> np.ndarray:
    """(1/G) sum_i (r_i - b) s_i."""
    return sum((bandit.rewards[a] - baseline) * score(bandit, a) for a in own) / len(own)


def peer_average(bandit: Bandit, peer, baseline: float, weight) -> np.ndarray:
    """(1/G') sum_j what(a_j) (r_j - b) s_j."""
    return sum(weight(a) * (bandit.rewards[a] - baseline) * score(bandit, a) for a in peer) / len(peer)


def mean_reward(bandit: Bandit, arms) -> float:
    """Mean reward of a group."""
    return sum(bandit.rewards[a] for a in arms) / len(arms)


def rescue(bandit: Bandit, own, peer) -> list[np.ndarray]:
    """Scores of the peer's successes when all own answers failed; nothing otherwise."""
    if any(bandit.rewards[a] for a in own):
        return []
    return [score(bandit, a) for a in peer if bandit.rewards[a]]


def own_only(bandit: Bandit, own, peer) -> np.ndarray:
    return own_average(bandit, own, mean_reward(bandit, own))


def pooled(bandit: Bandit, own, peer) -> np.ndarray:
    baseline = (1 - WEIGHT) * mean_reward(bandit, own) + WEIGHT * mean_reward(bandit, peer)
    return own_average(bandit, own, baseline)


def ratio(bandit: Bandit, arm: int) -> float:
    return bandit.pi_K[arm] / bandit.mu_K[arm]


CASES = {
    "GRPO": (lambda b: forms.grpo_mean_baseline(b, G), own_only),
    "GRPO fixed": (lambda b: forms.grpo_fixed_baseline(b, G, 0.3), lambda b, o, m: own_average(b, o, 0.3)),
    "PRP exact": (
        lambda b: forms.prp_exact(b, H, 0.3),
        lambda b, o, m: peer_average(b, m, 0.3, lambda a: ratio(b, a)),
    ),
    "PRP residual": (
        lambda b: forms.prp_residual(b, H, 0.3, XI),
        lambda b, o, m: peer_average(b, m, 0.3, lambda a: ratio(b, a) * np.exp(XI[a])),
    ),
    "PRP truncated": (
        lambda b: forms.prp_truncated(b, H, 0.3, CAP),
        lambda b, o, m: peer_average(b, m, 0.3, lambda a: min(ratio(b, a), CAP)),
    ),
    "PRP recompute": (
        lambda b: forms.prp_recompute(b, H),
        lambda b, o, m: peer_average(b, m, b.q, lambda a: 1.0),
    ),
    "XGRPO peer-only": (
        lambda b: forms.xgrpo_peer_only(b, G, H),
        lambda b, o, m: own_average(b, o, mean_reward(b, m)),
    ),
    "XGRPO pooled": (lambda b: forms.xgrpo_pooled(b, G, H, WEIGHT), pooled),
}


@pytest.mark.parametrize("name", CASES)
def test_closed_form_is_what_enumeration_gives(name: str, small: Bandit, enumerate_moments) -> None:
    """Mean and second moment over all possible groups, to 1e-10."""
    closed, estimate = CASES[name]

    found = closed(small)

    wanted = enumerate_moments(small, G, H, lambda own, peer: estimate(small, own, peer))
    np.testing.assert_allclose(found.mean_K, wanted.mean_K, rtol=0, atol=1e-10)
    assert found.second == pytest.approx(wanted.second, rel=0, abs=1e-10)


def test_sgt_is_what_enumeration_gives(small: Bandit, enumerate_moments) -> None:
    """The choice among several peer successes is averaged: first moment by its mean, second by its mean square."""
    found = forms.sgt(small, G, H, LAMBDA)

    def mean(own, peer) -> np.ndarray:
        chosen = rescue(small, own, peer)
        return own_only(small, own, peer) + (LAMBDA * np.mean(chosen, axis=0) if chosen else 0)

    def root_of_mean_square(own, peer) -> np.ndarray:
        chosen = rescue(small, own, peer) or [np.zeros(4)]
        squares = [np.sum((own_only(small, own, peer) + LAMBDA * one) ** 2) for one in chosen]
        return np.array([np.sqrt(np.mean(squares)), 0.0, 0.0, 0.0])

    wanted = enumerate_moments(small, G, H, mean).mean_K
    np.testing.assert_allclose(found.mean_K, wanted, rtol=0, atol=1e-10)
    second = enumerate_moments(small, G, H, root_of_mean_square).second
    assert found.second == pytest.approx(second, rel=0, abs=1e-10)


def test_the_cross_term_of_sgt_is_exactly_zero(small: Bandit, enumerate_moments) -> None:
    """On every single outcome GRPO's part or the rescue's part is the zero vector."""

    def product(own, peer) -> np.ndarray:
        chosen = rescue(small, own, peer)
        grpo = own_only(small, own, peer)
        return np.array([abs(float(grpo @ one)) for one in chosen] or [0.0]).max() * np.ones(4)

    assert enumerate_moments(small, G, H, product).second == 0.0


@pytest.mark.parametrize(
    ("name", "support", "variance"),
    [
        ("GRPO", "0.00759317", "0.00288569"),
        ("GRPO, fixed b", "0.0101242", "0.00418256"),
        ("PRP exact", "0.0101242", "0.000263326"),
        ("PRP truncated", "0.00976433", "0.000226403"),
        ("PRP residual", "0.0115665", "0.000315011"),
        ("PRP recompute", "0.130577", "0.0478249"),
        ("XGRPO peer-only", "0.0101242", "0.026016"),
        ("XGRPO pooled", "0.00885869", "0.00865481"),
        ("SGT", "0.0552983", "0.00666715"),
    ],
)
def test_the_reference_instance_to_the_printed_digits(
    name: str, support: str, variance: str, reference: Bandit
) -> None:
    """Every row of the table, six significant digits."""
    moments = next(method for method in METHODS if method.name == name).closed(reference, Settings())

    assert (f"{moments.support(reference):.6g}", f"{moments.variance:.6g}") == (support, variance)


def test_second_moments_and_biases_to_the_printed_digits(reference: Bandit) -> None:
    """What the table says beside support and variance."""
    settings = Settings()
    moments = {method.name: method.closed(reference, settings) for method in METHODS}

    assert f"{moments['GRPO'].second:.6g}" == "0.00296772"
    assert f"{moments['SGT'].second:.6g}" == "0.0110274"
    assert f"{moments['PRP recompute'].bias(reference):.6g}" == "0.155448"
    assert f"{moments['PRP residual'].bias(reference):.6g}" == "0.00321449"
    assert f"{forms.residual_bias_bound(reference, reference.p, 0.3):.6g}" == "0.00979971"
    inner = (restricted(reference.mu_K, reference.correct_K) - reference.pi_K) @ reference.direction
    assert f"{inner:.6g}" == "0.707049"


def test_support_of_a_hopeless_learner(reference: Bandit) -> None:
    """At p = 4.9e-6 only recompute and SGT have support left."""
    hopeless = with_success(reference, p=4.9e-6)
    supports = {method.name: method.closed(hopeless, Settings()).support(hopeless) for method in METHODS}

    assert supports["GRPO"] == pytest.approx(2.7e-6, rel=0.05)
    assert supports["PRP exact"] == pytest.approx(3.6e-6, rel=0.05)
    assert supports["PRP recompute"] == pytest.approx(0.132, rel=0.02)
    assert supports["SGT"] == pytest.approx(0.052, rel=0.02)


def sgt_support(bandit: Bandit, group: int, peer_group: int, lambda_: float) -> float:
    """Support of SGT written out, which shows the part that stays when p goes to zero.

    S = (1 - 1/G) p ||pi_C - pi||^2 + lambda alpha [ (1-p) <mu_C, pi_C> - p ||pi_C||^2 + ||pi||^2 ]
    """
    pi_C, mu_C = (restricted(probs_K, bandit.correct_K) for probs_K in (bandit.pi_K, bandit.mu_K))
    own = (1 - 1 / group) * bandit.p * float(bandit.direction @ bandit.direction)
    alpha = float(rescue_probability(bandit.p, bandit.q, group, peer_group))
    overlap = (1 - bandit.p) * (mu_C @ pi_C) - bandit.p * (pi_C @ pi_C) + bandit.pi_K @ bandit.pi_K
    return own + lambda_ * alpha * float(overlap)


def test_sgt_support_written_out(reference: Bandit, small: Bandit) -> None:
    """The formula with alpha equals the inner product of the expected step."""
    for bandit in (reference, small):
        moments = forms.sgt(bandit, 4, 5, 0.2)
        assert sgt_support(bandit, 4, 5, 0.2) == pytest.approx(moments.support(bandit), abs=1e-12)


def test_sgt_second_moment_stays_below_its_bound(reference: Bandit) -> None:
    """E||ghat||^2 <= E||ghat_GRPO||^2 + 2 lambda^2 alpha, .0164619 on the reference instance."""
    bound = forms.grpo_mean_baseline(reference, 4).second + 2 * 0.1**2 * 0.674708

    assert forms.sgt(reference, 4, 4, 0.1).second <= bound
    assert bound == pytest.approx(0.0164619, abs=5e-8)


def test_bias_of_random_residuals_stays_below_the_bound(reference: Bandit) -> None:
    """Residuals of at most kappa never bias PRP by more than (e^kappa - 1) E|r - b| ||s||."""
    rng = np.random.default_rng(3)
    for kappa in (0.05, 0.5, 2.0):
        bound = forms.residual_bias_bound(reference, reference.p, kappa)
        for xi in rng.uniform(-kappa, kappa, (200, 8)):
            assert forms.prp_residual(reference, 4, reference.p, xi).bias(reference) <= bound


def test_bias_of_truncation_is_the_mass_above_the_cap(reference: Bandit) -> None:
    """E ghat - g* = -E_pi[(1 - c/w)_+ (r - b) s]."""
    found = forms.prp_truncated(reference, 4, reference.p, 1.5).mean_K - reference.gradient

    cut = np.maximum(0, 1 - 1.5 / reference.ratio)
    wanted = -(reference.pi_K * cut * (reference.rewards - reference.p)) @ reference.scores
    np.testing.assert_allclose(found, wanted, atol=1e-15)


def test_reductions_to_known_cases(small: Bandit) -> None:
    """No residual, no cap and no peer weight give the plain methods back; lambda 0 makes SGT GRPO."""
    exact = forms.prp_exact(small, H, 0.3)

    for same, plain in (
        (forms.prp_residual(small, H, 0.3, np.zeros(4)), exact),
        (forms.prp_truncated(small, H, 0.3, 1e9), exact),
        (forms.xgrpo_pooled(small, G, H, 0.0), forms.grpo_mean_baseline(small, G)),
        (forms.xgrpo_pooled(small, G, H, 1.0), forms.xgrpo_peer_only(small, G, H)),
        (forms.sgt(small, G, H, 0.0), forms.grpo_mean_baseline(small, G)),
    ):
        np.testing.assert_allclose(same.mean_K, plain.mean_K, atol=1e-15)
        assert same.second == pytest.approx(plain.second, abs=1e-14)


def test_a_peer_equal_to_the_learner_makes_exact_prp_grpo(small: Bandit) -> None:
    """With w = 1 peer rows are own rows."""
    twin = Bandit(small.pi_K, small.pi_K, small.correct_K)

    assert forms.prp_exact(twin, G, 0.3).second == pytest.approx(forms.grpo_fixed_baseline(twin, G, 0.3).second)


def test_moments_know_support_variance_and_bias(small: Bandit) -> None:
    """An estimator that always returns g* has no variance and no bias."""
    sure = Moments(small.gradient, float(small.gradient @ small.gradient))

    assert sure.variance == pytest.approx(0, abs=1e-16)
    assert sure.bias(small) == 0
    assert sure.support(small) == pytest.approx(small.p * float(small.direction @ small.direction))


def test_table_and_xi_belong_together() -> None:
    """The default settings carry the residual that the table was made with."""
    assert Settings().residual_nats == REFERENCE_RESIDUAL_NATS
    assert np.abs(Settings().residual).max() == 0.3
