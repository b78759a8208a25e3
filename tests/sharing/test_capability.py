import json

import pytest

from mrl.sharing.capability import Capabilities


def test_mean_over_the_last_steps_that_had_any():
    """A step without rewards of a policy leaves its window alone; the oldest step of a full window goes."""
    seen = Capabilities(window_steps=2)
    assert seen.of("a") is None
    for rewards in ([1, 1], [], [0, 1], [0, 0]):
        seen.note({"a": rewards})
    assert seen.of("a") == 0.25
    seen.note({"b": [1]})
    assert (seen.of("a"), seen.of("b")) == (0.25, 1.0)


def test_steps_weigh_alike_whatever_their_size():
    """It is a mean of batch means (arXiv 2603.02604), not of rewards."""
    seen = Capabilities(window_steps=5)
    seen.note({"a": [1]})
    seen.note({"a": [0] * 9})
    assert seen.of("a") == 0.5


@pytest.mark.parametrize(
    ("own", "other", "ratio"), [(0.5, 0.25, 2), (0, 0, 1), (0, 1, 0.1), (1, 0, 10), (0.4, 0.4, 1), (-3, 1, 0.1)]
)
def test_ratio_is_held_in_bounds(own, other, ratio):
    """omega within [0.1, 10], 1 between equals, also between two that never passed."""
    seen = Capabilities(window_steps=5)
    seen.note({"own": [own], "other": [other]})
    assert seen.ratio("own", "other") == pytest.approx(ratio)


def test_the_unknown_is_as_able():
    """Without a step of either, omega is 1."""
    seen = Capabilities(window_steps=5)
    seen.note({"own": [0.1]})
    assert seen.ratio("own", "other") == seen.ratio("other", "own") == 1.0


def test_state_survives_json():
    """The window goes on where it was."""
    one, other = Capabilities(window_steps=2), Capabilities(window_steps=2)
    for rewards in ([1], [0]):
        one.note({"a": rewards})
    other.restore(json.loads(json.dumps(one.state())))
    for seen in (one, other):
        seen.note({"a": [1]})
    assert one.state() == other.state() == {"a": [0.0, 1.0]}
