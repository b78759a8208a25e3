"""Monte Carlo agrees with the closed forms within its own standard error."""

import numpy as np
import pytest

from mrl.bandit.methods import METHODS, Settings, reference_rows
from mrl.bandit.problem import Bandit
from mrl.bandit.sampled import draw_groups, is_rescued, measure, own_rows, weighted_scores

FOUR_SIGMA = 4.0


def test_every_method_is_within_four_standard_errors(reference: Bandit) -> None:
    """Support and variance of all methods on one set of 60 000 draws; the rescue rate is alpha."""
    rows = reference_rows(reference, Settings(), 60_000, seed=11)

    assert [row.name for row in rows] == [method.name for method in METHODS]
    for row in rows:
        assert abs(row.measured.support - row.support) < FOUR_SIGMA * row.measured.support_error, row.name
        assert abs(row.measured.variance - row.variance) < FOUR_SIGMA * row.measured.variance_error, row.name
        assert row.measured.rescued == pytest.approx(0.674708, abs=4 * np.sqrt(0.25 / 60_000))


def test_other_group_sizes_agree_too(small: Bandit) -> None:
    """G = 3, G' = 5, other constants: nothing is tied to the reference instance."""
    settings = Settings(3, 5, 0.4, 0.8, 0.3, (0.2, -0.4, 0.1, 0.3))

    for row in reference_rows(small, settings, 60_000, seed=5):
        assert abs(row.measured.support - row.support) < FOUR_SIGMA * row.measured.support_error, row.name
        assert abs(row.measured.variance - row.variance) < FOUR_SIGMA * row.measured.variance_error, row.name


def test_the_block_size_changes_nothing(small: Bandit) -> None:
    """One block or many give the same estimate."""
    rng = np.random.default_rng(2)
    groups = draw_groups(small, 1000, 3, 3, rng)

    whole = measure(small, own_rows(0.5), groups, rng, block=5000)
    assert measure(small, own_rows(0.5), groups, rng, block=7) == pytest.approx(whole)


def test_weighted_scores_are_a_sum_of_scores(small: Bandit) -> None:
    """Repeated arms add up."""
    arms, weights = np.array([[0, 0, 3], [2, 1, 2]]), np.array([[0.5, -1.0, 2.0], [1.0, 0.0, 3.0]])

    slow = [
        sum(w * (np.eye(4)[a] - small.pi_K) for a, w in zip(*row, strict=True))
        for row in zip(arms, weights, strict=True)
    ]
    np.testing.assert_allclose(weighted_scores(small, arms, weights), slow, atol=1e-14)


def test_rescues_need_failure_and_success(small: Bandit) -> None:
    """All own answers wrong, some peer answer right."""
    groups = draw_groups(small, 500, 2, 2, np.random.default_rng(0))

    slow = [
        max(own) == 0 and max(peer) == 1
        for own, peer in zip(groups.own_rewards_NG, groups.peer_rewards_NH, strict=True)
    ]
    assert is_rescued(groups).tolist() == slow
    assert 0 < sum(slow) < 500
