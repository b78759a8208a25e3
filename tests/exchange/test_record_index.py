"""The budget is one of memory, and every type has a quota of its own."""

import tracemalloc
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.exchange.limits import Limits, held_bytes_of
from mrl.exchange.record_index import Entry, RecordIndex
from mrl.records.codec import encode
from mrl.records.experience import kind_of
from mrl.records.tags import tags_of

KINDS = ("outcome", "rollout", "value", "score_request", "score")


@pytest.fixture(scope="module")
def make(outcome, rollout, value, request_for, score_of):
    """Makes a small record of any type; `size` answers where it has several."""

    def make_record(kind, record_id, source, prompt_id, step, size=2):
        tags = (record_id, source, prompt_id, step)
        match kind:
            case "outcome":
                return outcome(*tags)
            case "rollout":
                return rollout(*tags, group=size)
            case "value":
                return value(*tags, group=size)
            case "score_request":
                return request_for("teacher", *tags, group=size)
            case "score":
                return score_of(request_for(source, "q", "x", prompt_id, step, group=size), record_id, step=step)

    return make_record


def index_of(successes=4, *, gone=None, budget_bytes=10**9):
    """An empty one; what leaves it is noted in `gone`."""
    gone = [] if gone is None else gone
    limits = Limits(successes_per_prompt=successes, budget_bytes=budget_bytes)
    return RecordIndex(limits, lambda entry, reason: gone.append((entry.record_id, reason)))


def hold(index, number, record):
    """Add a record; whether it stayed."""
    body = encode(record)
    return index.add(Entry(number, tags_of(body), body))


def filled(bodies):
    """An index with these records, and the bytes that this took: those of all threads, so that another one's may be in
    them."""
    index = index_of()
    tracemalloc.start()
    try:
        for place, body in enumerate(bodies):
            index.add(Entry(place, tags_of(body), bytes(bytearray(body))))
        return index, tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [1, 8, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_used_bytes_bounds_the_memory_really_used(make, kind, size):
    """In the worst case, where every record has a prompt and a version of its own, and answers are short."""
    number = max(20, 1500 // size)
    bodies = [encode(make(kind, f"ticket-{n:06}", "qwen", f"spell_backward:{n:06}", n, size)) for n in range(number)]
    index, used = min((filled(bodies) for _ in range(3)), key=lambda one: one[1])
    assert 0.5 * index.used_bytes < used < index.used_bytes


class ReferenceQuotas:
    """Sort everything that ever came, newest first, and keep the head of every (type, source, prompt)."""

    def __init__(self, limits):
        self.limits, self.came = limits, []

    def held(self):
        kept, counts = set(), Counter()
        for _, record in sorted(enumerate(self.came), key=lambda item: (-item[1].oldest.step, -item[0])):
            key = (kind_of(record), record.source, record.prompt_id)
            counts[key] += 1
            if counts[key] <= self.limits.quota(kind_of(record)):
                kept.add(record.record_id)
        return kept


RECORDS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from("ab"), st.sampled_from("pq"), st.integers(0, 5)), max_size=40
)


@settings(deadline=None)
@given(records=RECORDS, successes=st.integers(1, 5))
def test_every_type_keeps_the_newest_within_its_own_quota(make, records, successes):
    """Whatever comes in whatever order: no type displaces another, and of each the newest stay."""
    index, reference = index_of(successes), ReferenceQuotas(Limits(successes_per_prompt=successes))
    for number, (kind, source, prompt_id, step) in enumerate(records):
        record = make(kind, f"r{number}", source, prompt_id, step)
        hold(index, number, record)
        reference.came.append(record)
    assert {entry.tags.record_id for entry in index.entries()} == reference.held()
    found = [entry.tags for prompt_id in "pq" for entry in index.on_prompt(prompt_id, ["value"], of_others_than="a")]
    held = [r for r in reference.came if r.record_id in reference.held()]
    assert {tags.record_id for tags in found} == {
        r.record_id for r in held if kind_of(r) == "value" and r.source == "b"
    }
    for source in index.policies:
        kinds = Counter(kind_of(record) for record in held if record.source == source)
        assert +index.policies[source].kinds == kinds


def test_what_leaves_is_told_with_the_reason(make):
    """Each once: displaced, stale, or on purpose."""
    gone = []
    index = index_of(gone=gone)
    assert [hold(index, n, make("value", f"r{n}", "a", f"p{n // 2}", n)) for n in range(6)] == [True] * 6
    assert not hold(index, 6, make("value", "late", "a", "p2", 0))
    index.remove(index.get("r1"), "served")
    index.remove_stale("a", before_step=4)
    assert [entry.record_id for entry in index.entries()] == ["r5"]
    index.remove_void("a", lambda tags: tags.newest.step == 5)
    surpassed = [(name, "surpassed") for name in ("r0", "r2", "r4", "late")]
    assert gone == [*surpassed, ("r1", "served"), ("r3", "stale"), ("r5", "void")]
    assert (index.used_bytes, len(index)) == (0, 0)


def test_the_oldest_arrivals_make_room(make):
    """Whatever their versions; a newcomer that is alone too large for the budget does not stay."""
    gone = []
    held_bytes = held_bytes_of(len(encode(make("value", "r0", "a", "p0", 0))))
    index = index_of(gone=gone, budget_bytes=3 * held_bytes + 100)
    for number in range(5):
        assert hold(index, number, make("value", f"r{number}", "a", f"p{number}", 9 - number))
        assert index.used_bytes <= 3 * held_bytes + 100
    assert gone == [("r0", "full"), ("r1", "full")]
    assert not hold(index, 9, make("value", "huge", "a", "p9", 9, size=1000))
    assert len(index) == 0
