"""A part of a pack is a pack."""

import msgpack
import msgspec
import pytest

from mrl.errors import RecordError
from mrl.records.packs import Pack
from mrl.records.version import Version

HASHES = [b"hash--%02d" % number for number in range(3)]
ALL_HASHES = b"".join(HASHES)


def pack(array, count=3, id_hashes=ALL_HASHES):
    """Of three records, whatever they are."""
    return Pack(
        type="outcome", oldest=Version(0, 0), newest=Version(0, 0), task="t", count=count, num_bytes=len(array),
        records=msgspec.Raw(array), id_hashes=id_hashes,
    )  # fmt: skip


@pytest.mark.parametrize("wanted", [(1, 0, 1), (0, 1, 0), (1, 1, 1)])
def test_the_records_that_are_wanted_make_a_pack(wanted):
    """With as many hashes, or with none where there were none."""
    bodies = [{"record_id": "a"}, "b" * 40, [1, 2]]
    part = pack(msgpack.packb(bodies)).only(map(bool, wanted))
    chosen = [place for place in range(3) if wanted[place]]
    assert msgpack.unpackb(bytes(part.records)) == [bodies[place] for place in chosen]
    assert part.id_hashes == b"".join(HASHES[place] for place in chosen)
    assert (part.count, part.is_consistent) == (len(chosen), True)
    assert pack(msgpack.packb(bodies), id_hashes=b"").only(map(bool, wanted)).id_hashes == b""


def test_nothing_of_a_pack_is_none():
    """There is no pack of no records."""
    assert pack(msgpack.packb([1, 2, 3])).only([False] * 3) is None


@pytest.mark.parametrize("array", [msgpack.packb([1, 2]), msgpack.packb([1, 2, 3, 4]), b"\xc1", msgpack.packb("abc")])
def test_what_is_no_array_of_its_length_cannot_be_parted(array):
    """Told as any other malformed record."""
    with pytest.raises(RecordError):
        pack(array).only([True, False, True])


@pytest.mark.parametrize("wrong", [{"num_bytes": 3}, {"id_hashes": HASHES[0]}, {"id_hashes": b"1234567" * 3}])
def test_lengths_have_to_agree(wrong):
    """Those of the records and those of the hashes."""
    whole = pack(msgpack.packb(["long enough"] * 3))
    assert whole.is_consistent
    assert not msgspec.structs.replace(whole, **wrong).is_consistent


def test_hashes_are_shorter_than_the_records():
    """Or they would be memory that nobody counts."""
    assert not pack(msgpack.packb([1, 2, 3])).is_consistent
    assert pack(msgpack.packb([1, 2, 3]), id_hashes=b"").is_consistent


def test_a_reader_of_an_earlier_version_reads_a_pack_with_hashes():
    """And a later one a pack without: fields are only added, with defaults."""

    class EarlierPack(msgspec.Struct, frozen=True, kw_only=True):
        type: str
        oldest: Version
        newest: Version
        task: str
        count: int
        num_bytes: int
        records: msgspec.Raw

    whole = pack(msgpack.packb([1, 2, 3]))
    earlier = msgspec.msgpack.decode(msgspec.msgpack.encode(whole), type=EarlierPack)
    assert (earlier.count, bytes(earlier.records)) == (3, bytes(whole.records))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(earlier), type=Pack).id_hashes == b""
