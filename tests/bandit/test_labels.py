"""Names keep apart and stay where they belong."""

import numpy as np
import pytest

from mrl.bandit.labels import apart


def test_places_far_apart_stay() -> None:
    """Nothing moves that need not."""
    assert apart([0.9, 0.1, 0.5], 0.2) == [0.9, 0.1, 0.5]


def test_crowded_places_spread_in_their_order() -> None:
    """Neighbours end exactly one gap apart, around their mean, in the order they had."""
    moved = apart([0.5, 0.52, 0.51, 0.1], 0.1)

    assert moved == pytest.approx([0.41, 0.61, 0.51, 0.1])


def test_blocks_that_meet_move_together() -> None:
    """A block that grows into another one takes it along."""
    moved = sorted(apart([0.0, 0.0, 0.12, 0.13], 0.1))

    assert np.all(np.diff(moved) >= 0.1 - 1e-12)
    assert np.mean(moved) == pytest.approx(0.0625)
