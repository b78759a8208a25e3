"""The budget is one of memory, and every type has a quota of its own."""

import tracemalloc
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.exchange.entry import Entry
from mrl.exchange.kinds import quotas
from mrl.exchange.shelf import Shelf
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


def hold(shelf, record, offset=0):
    """Add a record."""
    body = encode(record)
    shelf.add(Entry(tags_of(body), body, 0, offset=offset))


@pytest.mark.parametrize("size", [1, 8, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_used_bytes_bounds_the_memory_really_used(make, kind, size):
    """In the worst case, where every record has a prompt and a version of its own, and answers are short."""
    number = max(20, 1500 // size)
    bodies = [encode(make(kind, f"ticket-{n:06}", "qwen", f"spell_backward:{n:06}", n, size)) for n in range(number)]
    shelf = Shelf(quotas=quotas(4), budget_bytes=10**9)
    tracemalloc.start()
    try:
        for body in bodies:
            shelf.add(Entry(tags_of(body), bytes(bytearray(body)), 0))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.5 * shelf.used_bytes < used < shelf.used_bytes


class ReferenceQuotas:
    """Sort everything that ever came, newest first, and keep the head of every (type, source, prompt)."""

    def __init__(self, quotas):
        self.quotas, self.came = quotas, []

    def held(self):
        kept, counts = set(), Counter()
        for _, record in sorted(enumerate(self.came), key=lambda item: (-item[1].oldest.step, -item[0])):
            shelf = (kind_of(record), record.source, record.prompt_id)
            counts[shelf] += 1
            if counts[shelf] <= self.quotas[kind_of(record)]:
                kept.add(record.record_id)
        return kept


RECORDS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from("ab"), st.sampled_from("pq"), st.integers(0, 5)), max_size=40
)


@settings(deadline=None)
@given(records=RECORDS, successes=st.integers(1, 5))
def test_every_type_keeps_the_newest_within_its_own_quota(make, records, successes):
    """Whatever comes in whatever order: no type displaces another, and of each the newest stay."""
    shelf, reference = Shelf(quotas=quotas(successes), budget_bytes=10**9), ReferenceQuotas(quotas(successes))
    for number, (kind, source, prompt_id, step) in enumerate(records):
        record = make(kind, f"r{number}", source, prompt_id, step)
        hold(shelf, record)
        reference.came.append(record)
    assert {entry.tags.record_id for entry in shelf.entries()} == reference.held()
    found = [entry.tags for prompt_id in "pq" for entry in shelf.on_prompt(prompt_id, ["value"], of_others_than="a")]
    held = [r for r in reference.came if r.record_id in reference.held()]
    assert {tags.record_id for tags in found} == {
        r.record_id for r in held if kind_of(r) == "value" and r.source == "b"
    }
    for source in shelf.policies:
        kinds = Counter(kind_of(record) for record in held if record.source == source)
        assert +shelf.policies[source].kinds == kinds


def test_what_leaves_is_told_and_only_evictions_are_counted(make):
    """Removal on purpose, displacement and staleness all reach `on_removal`, each once."""
    gone = []
    shelf = Shelf(quotas=quotas(1), budget_bytes=10**9, on_removal=gone.append)
    for number in range(4):
        hold(shelf, make("value", f"r{number}", "a", f"p{number // 2}", number))
    shelf.remove("r1")
    shelf.remove("r1")
    shelf.evict_stale("a", before_step=9)
    assert gone == ["r0", "r2", "r1", "r3"]
    assert shelf.policies["a"].evicted == {"surpassed": 2, "stale": 1}
    assert (shelf.used_bytes, shelf.body_bytes, len(shelf)) == (0, 0, 0)
