"""A list that is sorted anew for every question says what the order should."""

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.exchange import arrival_order
from mrl.exchange.arrival_order import ArrivalOrder
from mrl.exchange.entry import Entry
from mrl.records.codec import SCHEMA
from mrl.records.tags import Tags
from mrl.records.version import Version

TAGS = Tags(
    type="value", record_id="r", source="s", oldest=Version(0, 0), newest=Version(0, 0), prompt_id="p", task="t",
    schema=SCHEMA,
)  # fmt: skip
STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "add again", "remove", "remove first", "after"]), st.integers(1, 40)),
    max_size=80,
)


@pytest.fixture
def few_gaps(monkeypatch):
    """Gaps are closed soon."""
    monkeypatch.setattr(arrival_order, "MIN_GAPS", 3)


@pytest.mark.usefixtures("few_gaps")
@settings(deadline=None)
@given(steps=STEPS)
def test_the_order_agrees_with_a_sorted_list(steps):
    """Newcomers at the end or anywhere, numbers that come back, gaps at the front and in the middle."""
    order, held = ArrivalOrder(), {}
    for action, number in steps:
        if action == "add":
            number += max(held, default=0)
        if action in ("add", "add again") and number not in held:
            held[number] = Entry(TAGS, b"", number)
            order.add(held[number])
        elif action == "remove first" and held:
            order.remove(held.pop(min(held)))
        elif action == "remove" and number in held:
            order.remove(held.pop(number))
        elif action == "after":
            assert [entry.number for entry in order.after(number)] == sorted(n for n in held if n > number)
    assert list(order.after(0)) == [held[number] for number in sorted(held)]


def test_the_bodies_of_what_left_do_not_stay():
    """A few large ones weigh as much as thousands of small ones."""
    order, body_bytes = ArrivalOrder(), 1_000_000
    tracemalloc.start()
    try:
        for number in range(1, 51):
            order.add(Entry(TAGS, bytearray(body_bytes), number))
            if number > 4:
                order.remove(next(order.after(0)))
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used_bytes < 4 * body_bytes + arrival_order.MIN_GAP_BYTES + 100_000
