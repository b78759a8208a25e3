"""Open questions, and what all of them may take."""

import tracemalloc

import pytest

from mrl.exchange.limits import WATCH_OVERHEAD_BYTES, Limits
from mrl.exchange.record_index import RecordIndex
from mrl.exchange.versions import VersionTracker
from mrl.exchange.watches import Watches
from mrl.records.exchange_messages import Fetch


def watches(**limits):
    """No watch, and nothing that answers a question."""
    bounds = Limits(**limits)
    return Watches(bounds, RecordIndex(bounds, lambda entry, reason: None), VersionTracker())


def watch(found, client, *prompt_ids):
    """The client's policy watches these prompts."""
    message = Fetch(client="c", policy="qwen", prompt_ids=list(prompt_ids), limit=1, max_age_versions=None, watch=True)
    assert found.answer(client, "qwen", message, is_new=True) == []


@pytest.mark.parametrize(("length", "number"), [(10, 10), (1000, 5)])
def test_long_ids_leave_room_for_fewer(length, number):
    """What does not fit is counted, and fits once another is closed."""
    found = watches(watches_bytes=10_000)
    ids = [f"{place:0{length}}" for place in range(number + 3)]
    for prompt_id in ids:
        watch(found, b"c", prompt_id)
    assert (found.num_prompts()["qwen"], found.num_dropped) == (number, 3)
    found.remove(b"c", ids[0])
    watch(found, b"c", ids[-1])
    assert found.num_prompts()["qwen"] == number
    found.forget(b"c")
    assert found.num_prompts()["qwen"] == 0
    for prompt_id in ids:
        watch(found, b"d", prompt_id)
    assert found.num_prompts()["qwen"] == number


def test_a_watch_weighs_no_more_than_is_reckoned():
    """The bytes of all watches are a bound of memory."""
    found, ids = watches(), [f"spell_backward:{number:06}" for number in range(4000)]
    message = Fetch(client="c", policy="qwen", prompt_ids=ids, limit=1, max_age_versions=None, watch=True)
    tracemalloc.start()
    try:
        found.answer(b"c", "qwen", message, is_new=True)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.3 * WATCH_OVERHEAD_BYTES < used / len(ids) < WATCH_OVERHEAD_BYTES
