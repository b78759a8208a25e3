"""The share of a worker's places that held-out prompts have."""

import pytest

from mrl.rollout.held_out_answers import HeldOutRoom, HeldOutShare, InFlight


@pytest.mark.parametrize(
    ("share", "in_flight", "room"),
    [
        (0.5, InFlight(0, 0), HeldOutRoom(16, 32)),
        (0.5, InFlight(28, 0), HeldOutRoom(4, 0)),
        (0.5, InFlight(8, 12), HeldOutRoom(4, 0)),
        (0.5, InFlight(8, 20), HeldOutRoom(0, 0)),
        (0.5, InFlight(0, 20), HeldOutRoom(0, 12)),
        (0.5, InFlight(40, 0), HeldOutRoom(0, 0)),
        (0.01, InFlight(8, 0), HeldOutRoom(1, 0)),
        (0.01, InFlight(8, 1), HeldOutRoom(0, 0)),
        (0.99, InFlight(0, 20), HeldOutRoom(8, 12)),
        (1.0, InFlight(0, 20), HeldOutRoom(12, 12)),
        (1.0, InFlight(4, 20), HeldOutRoom(8, 0)),
    ],
    ids=[
        "idle", "nearly full", "within the share", "beyond it, as after being alone", "alone", "a smaller lease",
        "at least one", "and no more",
        "all but a group", "all", "all that others leave",
    ],
)  # fmt: skip
def test_the_share_bounds_what_is_in_flight(share, in_flight, room):
    """Of 32 places, groups of four; where there are no groups all places may be had."""
    assert HeldOutShare(share, group_size=4).room(32, in_flight) == room


def test_where_one_group_has_all_places_the_two_take_turns():
    """Of 8 places, groups of eight: held-out prompts, then a group, and neither in the turn of the other."""
    share = HeldOutShare(0.5, group_size=8)
    assert share.room(8, InFlight(0, 0)) == HeldOutRoom(8, 8)
    share.departed(groups=False)
    assert share.room(8, InFlight(0, 3)) == HeldOutRoom(0, 5), "only where the learner has no group"
    assert share.room(8, InFlight(0, 0)) == HeldOutRoom(0, 8)
    share.departed(groups=True)
    assert share.room(8, InFlight(5, 0)) == HeldOutRoom(0, 0)
    assert share.room(8, InFlight(0, 0)) == HeldOutRoom(8, 8)


def test_without_a_lease_there_is_no_room():
    assert HeldOutShare(0.5, group_size=4).room(0, InFlight(0, 0)) == HeldOutRoom(0, 0)
