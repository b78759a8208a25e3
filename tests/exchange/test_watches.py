"""Open questions, and what all of them may take."""

import pytest

from mrl.exchange import watches
from mrl.exchange.watches import Watch, Watches


def watch():
    return Watch("qwen", 1, None, ("outcome",))


@pytest.mark.parametrize(("length", "number"), [(10, 10), (1000, 5)])
def test_long_ids_leave_room_for_fewer(monkeypatch, length, number):
    """What does not fit is counted, and fits once another is closed."""
    monkeypatch.setattr(watches, "MAX_WATCHES_BYTES", 10_000)
    found = Watches(max_per_client=100, max_total=100)
    ids = [f"{place:0{length}}" for place in range(number + 3)]
    for prompt_id in ids:
        found.add(b"c", prompt_id, watch())
    assert (len(found), found.dropped) == (number, 3)
    found.remove(b"c", ids[0])
    found.add(b"c", ids[-1], watch())
    assert len(found) == number
    found.forget(b"c")
    for prompt_id in ids:
        found.add(b"d", prompt_id, watch())
    assert len(found) == number
