"""What a reader makes of a batch: every record that can be read, whatever stands beside it."""

import msgpack
import msgspec
import pytest

from mrl.exchange.log.frames import HEAD_BYTES
from mrl.exchange.log.segments import SegmentLog
from mrl.exchange.packing import OpenPut
from mrl.exchange.reader import MAX_LOST, LogLost, Reader
from mrl.exchange.shared_files import SharedFiles
from mrl.records.codec import encode
from mrl.records.exchange_messages import Batch, Stream
from mrl.records.packs import Parcel


@pytest.fixture
def log(tmp_path):
    """A log beside which the reader lives."""
    log = SegmentLog(tmp_path, max_bytes=1 << 30, durability="written")
    assert list(log.replay()) == []
    yield log
    log.close()


@pytest.fixture
def reader(tmp_path):
    """Of outcomes, from the beginning."""
    files = SharedFiles(lambda: tmp_path, "learner/llama")
    files.look()
    yield Reader(Stream(client="l", stream="s", kinds=["outcome"]), files)
    files.close()


def array_of(*records):
    """As a client packs them."""
    put = OpenPut()
    for record in records:
        put.add(record)
    [array] = put.sealed()[1]
    return bytes(array)


def batch(*parcels, previous=0):
    """A message of these."""
    return Batch(incarnation="one", stream="s", previous=previous, parcels=list(parcels))


def parcel(array, count, *, number=1, source="qwen", **options):
    """Records that are sent."""
    return Parcel(
        source=source, number=number, count=count, age_versions=3, **({"records": msgspec.Raw(array)} | options)
    )


def on_log(log, array, count, **options):
    """Records that lie on the log."""
    place = log.append([[b"before", array]])[0] + HEAD_BYTES + 6
    return parcel(array, count, records=msgspec.Raw(b"\xc0"), place=place, num_bytes=len(array), **options)


def ids(taken):
    """(number, id) of what was taken."""
    return [(item.number, item.record.record_id) for item in taken[0]]


def test_records_come_by_message_and_by_place(log, reader, outcome):
    """With the same numbers and ages."""
    sent, laid = array_of(outcome("r1"), outcome("r2")), array_of(outcome("r3"))
    taken = reader.take(batch(parcel(sent, 2), on_log(log, laid, 1, number=5)))
    assert ids(taken) == [(1, "r1"), (2, "r2"), (5, "r3")]
    assert {item.age_versions for item in taken[0]} == {3}
    assert (taken[1], reader.came_to, reader.took().upto) == (len(sent) + len(laid), 5, 5)


def test_a_repeated_or_overlapping_batch_brings_nothing_twice(log, reader, outcome):
    """Parcels come whole; what had come before is left out."""
    reader.came_to = 2
    array = array_of(*[outcome(f"r{n}") for n in range(1, 5)])
    assert ids(reader.take(batch(parcel(array, 4)))) == [(3, "r3"), (4, "r4")]
    assert reader.take(batch(parcel(array, 4))) == ([], 0)
    assert reader.take(batch(parcel(array, 4, number=9), previous=8)) is None
    assert reader.came_to == 4


def test_what_cannot_be_read_is_counted_and_hides_nothing(reader, outcome):
    """A record with a wrong field, one of another source, an array that is none, one that is too short."""
    bad = msgpack.unpackb(encode(outcome("bad"))) | {"reward": "high"}
    array = msgpack.packb([bad, msgpack.unpackb(encode(outcome("good")))])
    foreign = array_of(outcome("mine"), outcome("theirs", source="llama"))
    taken = reader.take(
        batch(
            parcel(array, 2),
            parcel(foreign, 2, number=3),
            parcel(b"\xc1garbage", 2, number=5),
            parcel(array_of(outcome("only")), 3, number=7),
            parcel(array_of(outcome("a"), outcome("more than said")), 1, number=10),
        )
    )
    assert ids(taken) == [(2, "good"), (3, "mine"), (7, "only"), (10, "a")]
    assert (reader.unreadable, reader.came_to) == (1 + 1 + 2 + 2, 10)


def test_a_log_that_cannot_be_read_costs_nothing_but_the_way(log, reader, outcome):
    """Nothing is taken, and the daemon is asked to send from where the stream stands."""
    array = array_of(outcome("r1"))
    reader.take(batch(parcel(array, 1)))
    assert reader.wish.reads_log
    good = on_log(log, array, 1, number=2)
    gone = msgspec.structs.replace(good, number=3, place=good.place + 10**6)
    other = msgspec.structs.replace(good, number=3, place=good.place - 3)
    for wrong in (gone, other):
        with pytest.raises(LogLost):
            reader.take(batch(good, wrong, previous=1))
        assert reader.came_to == 1
    for _ in range(MAX_LOST - 1):
        wish = reader.leave_log()
        assert (wish.reads_log, wish.after, reader.wish.reads_log) == (False, reader.came_to, False)
        reader.take(batch(parcel(array, 1, number=reader.came_to + 1), previous=reader.came_to))
        assert reader.wish.reads_log
    reader.leave_log()
    reader.take(batch(parcel(array, 1, number=reader.came_to + 1), previous=reader.came_to))
    assert not reader.wish.reads_log


def test_a_log_that_is_found_again_is_there(log, reader, outcome):
    """Over weeks records move now and then while they are on their way."""
    array = array_of(outcome("r1"))
    for _ in range(MAX_LOST):
        reader.leave_log()
        reader.take(batch(parcel(array, 1, number=reader.came_to + 1), previous=reader.came_to))
        reader.take(batch(on_log(log, array, 1, number=reader.came_to + 1), previous=reader.came_to))
        assert reader.wish.reads_log


def test_what_was_lost_with_its_batch_is_not_taken_for_seen(log, reader, outcome):
    """Its second parcel could not be read: the first one comes again, and counts."""
    first = parcel(array_of(outcome("r1")), 1)
    good = on_log(log, array_of(outcome("r2")), 1, number=2)
    with pytest.raises(LogLost):
        reader.take(batch(first, msgspec.structs.replace(good, place=good.place - 3)))

    assert ids(reader.take(batch(first, good))) == [(1, "r1"), (2, "r2")]


def test_a_reader_far_away_wants_no_places():
    """It learns of the daemon's folder later, or never."""
    where = [None]
    files = SharedFiles(lambda: where[0], "l")
    reader = Reader(Stream(client="l", stream="s", kinds=["outcome"]), files)
    assert not reader.wish.reads_log
