"""Records of equal tags travel in one array; nothing exceeds a message."""

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_digest

from mrl.exchange import packing
from mrl.exchange.packing import FULL_BYTES, MAX_ALIKE_BYTES, MAX_RECORD_BYTES, OpenPut
from mrl.records.codec import encode
from mrl.records.experience import kind_of
from mrl.records.packs import MAX_PACK_RECORDS

TAGS = st.lists(st.tuples(st.sampled_from(["outcome", "value"]), st.integers(0, 1)), max_size=60)


@settings(deadline=None)
@given(tags=TAGS)
def test_packs_are_runs_of_equal_tags_in_order(outcome, value, tags):
    """Each an array that plain msgpack reads, with a head that says what is in it."""
    records = [{"outcome": outcome, "value": value}[kind](f"r{n}", step=step) for n, (kind, step) in enumerate(tags)]
    put, place = OpenPut(), 0
    while place < len(records):
        assert put.add(records[place]) == "taken"
        place += 1 + put.add_alike(records, place + 1)
    heads, arrays = put.sealed()
    found = [(head, body) for head, array in zip(heads, arrays, strict=True) for body in msgpack.unpackb(array)]
    assert [body for _, body in found] == [msgpack.unpackb(encode(record)) for record in records]
    assert [(head.type, head.newest.step) for head, _ in found] == tags
    assert all(left[0] != right[0] for left, right in zip(runs(heads), runs(heads)[1:], strict=False))
    assert [head.count for head in heads] == [len(msgpack.unpackb(array)) for array in arrays]
    assert [head.num_bytes for head in heads] == [len(array) for array in arrays]
    assert b"".join(head.id_hashes for head in heads) == b"".join(
        xxh3_64_digest(one.record_id.encode()) for one in records
    )
    assert put.num_records == len(records)


def runs(heads):
    """(tags, count) of every pack."""
    return [((head.type, head.oldest, head.newest, head.task), head.count) for head in heads]


def test_versions_and_tasks_part_packs(outcome):
    """All of the tags that a head names."""
    put = OpenPut()
    for record in (outcome(), outcome(epoch=1), outcome(epoch=1, step=1)):
        put.add(record)
    assert len(put.sealed()[0]) == 3


def test_a_record_that_does_not_fit_is_left_out_whole(outcome, rollout):
    """It belongs into the next Put, or into none."""
    put, large = OpenPut(), rollout(group=28, tokens=15_000)
    assert 5_000_000 < len(encode(large)) < MAX_RECORD_BYTES
    before = put.add(outcome()), put.num_bytes, put.num_records
    assert [put.add(large), put.add(large)] == ["taken", "no_room"]
    huge = rollout(group=40, tokens=15_000)
    assert [put.add(huge), OpenPut().add(huge)] == ["too_large", "too_large"]
    heads, arrays = put.sealed()
    assert (before, put.num_records) == (("taken", before[1], 1), 2)
    assert [kind_of(outcome()), "rollout"] == [head.type for head in heads]
    assert [len(msgpack.unpackb(array)) for array in arrays] == [1, 1]


def test_a_put_is_full_in_bytes_or_in_packs(outcome, value, monkeypatch):
    """Whichever comes first."""
    put = OpenPut()
    while not put.is_full:
        put.add(outcome(completion=bytes(100_000)))
    assert FULL_BYTES <= put.num_bytes < FULL_BYTES + 110_000
    monkeypatch.setattr(packing, "MAX_PUT_PACKS", 2)
    put = OpenPut()
    put.add(outcome())
    assert not put.is_full
    put.add(value())
    assert put.is_full


def test_a_pack_has_a_bounded_number_of_records(value):
    """The daemon takes no larger ones."""
    put = OpenPut()
    for number in range(MAX_PACK_RECORDS + 1):
        put.add(value(f"v{number}"))
    assert [head.count for head in put.sealed()[0]] == [MAX_PACK_RECORDS, 1]


def test_many_alike_are_taken_at_once_and_none_is_lost(outcome):
    """Up to a full Put; what would not fit into any is left to be tried alone."""
    records = [outcome(f"r{n}") for n in range(5000)] + [outcome(f"x{n}", step=1) for n in range(100)]
    put, place, steps = OpenPut(), 0, 0
    while not put.is_full and place < len(records):
        put.add(records[place])
        place += 1 + put.add_alike(records, place + 1)
        steps += 1
    heads, arrays = put.sealed()
    ids = [body["record_id"] for array in arrays for body in msgpack.unpackb(array)]
    assert ids == [record.record_id for record in records[:place]]
    assert (sum(head.count for head in heads), put.num_records, steps < 5) == (place, place, True)
    growing = [outcome(), *(outcome(f"l{n}", completion=bytes(250_000)) for n in range(50))]
    put = OpenPut()
    put.add(growing[0])
    before = put.num_bytes
    assert (put.add_alike(growing, 1), put.num_bytes, put.num_records) == (0, before, 1)
    assert [len(msgpack.unpackb(array)) for array in put.sealed()[1]] == [1]


@pytest.mark.parametrize("count", [0, 1])
def test_an_empty_put_has_no_packs(value, count):
    """What was refused leaves nothing behind."""
    put = OpenPut()
    for _ in range(count):
        put.add(value())
    assert len(put.sealed()[0]) == count


def test_longer_records_after_a_short_one_do_not_swell_a_put(outcome):
    """How many are taken at once is guessed from the last one."""
    records = [outcome("short"), *(outcome(f"l{n}", completion=bytes(40_000)) for n in range(100))]
    put, place = OpenPut(), 0
    while not put.is_full:
        assert put.add(records[place]) == "taken"
        place += 1 + put.add_alike(records, place + 1)
    assert put.num_bytes <= MAX_ALIKE_BYTES
