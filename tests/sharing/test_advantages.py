import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.sharing.advantages import against, group_advantages, overlong_penalties

REWARDS = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16)


def slow(rewards, *, divide=True, eps=1e-6, correction=1):
    """GRPO's advantage in plain arithmetic; the standard deviation divides by G - correction."""
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - correction))
    return [(r - mean) / (std + eps) if divide else r - mean for r in rewards]


@pytest.mark.parametrize("correction", [0, 1])
@given(rewards=REWARDS)
def test_advantages_equal_their_slow_twin(rewards, correction):
    """Mean and either standard deviation of the group, and exact zeros when all rewards are equal."""
    found = group_advantages(rewards, std_correction=correction)
    assert found.dtype == np.float32
    if len(set(rewards)) == 1:
        assert found.tolist() == [0] * len(rewards)
    else:
        assert found.tolist() == pytest.approx(slow(rewards, correction=correction), rel=1e-5, abs=1e-5)


@given(REWARDS)
def test_dr_grpo_sums_to_zero_and_needs_no_deviation(rewards):
    """group_mean is the distance from the mean, undivided: over the group it adds up to nothing."""
    found = group_advantages(rewards, "group_mean")
    assert found.tolist() == pytest.approx(slow(rewards, divide=False), rel=1e-5, abs=1e-5)
    assert found.sum() == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("kind", ["group_std", "group_mean"])
@pytest.mark.parametrize("rewards", [[0.0] * 8, [1.0] * 8, [0.1] * 7, [1.0], []])
def test_uniform_groups_and_groups_of_one_have_no_advantage(rewards, kind):
    """Equal rewards give exact zeros, also where the mean does not round to the reward."""
    assert group_advantages(rewards, kind).tolist() == [0] * len(rewards)


def test_known_values():
    """One success in four: mean 0.25, standard deviation 0.5."""
    assert group_advantages([1, 0, 0, 0]).tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)
    assert against([1, 0], 0.25, 0.5).tolist() == pytest.approx([1.5, -0.5], rel=1e-5)
    assert against([1, 0], 0.25, None).tolist() == [0.75, -0.25]


def test_overlong_answers_lose_in_a_straight_line():
    """DAPO's context: no loss up to 16384 of 20480 tokens, all at the limit, half in the middle of the buffer."""
    found = overlong_penalties([0, 16384, 18432, 20480], max_tokens=20480, buffer_tokens=4096)
    assert found.tolist() == [0, 0, -0.5, -1]
