import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.sharing.advantages import grpo_advantages


def slow(rewards, eps=1e-6):
    """GRPO's advantage in plain arithmetic; the standard deviation divides by G - 1."""
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return [(r - mean) / (std + eps) for r in rewards]


@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16))
def test_advantages_equal_their_slow_twin(rewards):
    """Mean and corrected standard deviation of the group, and exact zeros when all rewards are equal."""
    found = grpo_advantages(rewards)
    assert found.dtype == np.float32
    if len(set(rewards)) == 1:
        assert found.tolist() == [0] * len(rewards)
    else:
        assert found.tolist() == pytest.approx(slow(rewards), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("rewards", [[0.0] * 8, [1.0] * 8, [0.1] * 7, [1.0]])
def test_uniform_groups_and_groups_of_one_have_no_advantage(rewards):
    """Equal rewards give exact zeros, also where the mean does not round to the reward."""
    assert grpo_advantages(rewards).tolist() == [0] * len(rewards)


def test_known_values():
    """One success in four: mean 0.25, standard deviation 0.5."""
    assert grpo_advantages([1, 0, 0, 0]).tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)
