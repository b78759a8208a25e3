"""Labels keep apart and stay where they belong."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from mrl.bandit.labels import apart, label_points


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


def test_labels_of_points_never_overlap() -> None:
    """Ten points on a line: fewer labels than points, and no two share a place."""
    axes = Figure().subplots()
    points = np.stack([np.linspace(0.3, 0.5, 10), np.full(10, 0.5)], axis=-1)
    label_points(axes, points, [f"v = {index}" for index in range(10)], points)

    places = [text.get_position() for text in axes.texts]
    assert 2 <= len(places) < 10
    assert all(abs(a[0] - b[0]) > 0.134 or abs(a[1] - b[1]) > 0.06 for a in places for b in places if a != b)


def test_labels_leave_the_line_free() -> None:
    """On a line that is known by its two ends only, all labels stand above or below."""
    axes = Figure().subplots()
    points = np.array([[0.25, 0.5], [0.5, 0.5], [0.75, 0.5]])
    label_points(axes, points, ["a", "b", "c"], np.array([[0.05, 0.5], [0.95, 0.5]]))

    assert [text.get_text() for text in axes.texts] == ["a", "b", "c"]
    assert all(abs(text.get_position()[1] - 0.5) > 0.05 for text in axes.texts)
