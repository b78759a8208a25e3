"""A record or a file as lines for a person."""

import msgspec
import pytest
from see_dump import MAX_FRAMES, MAX_LINES, file_lines, find_on_log, record_lines

from mrl.errors import RunFolderError
from mrl.exchange.entry import Entry
from mrl.exchange.journal import arrays_of, stored_of, written
from mrl.exchange.log.frames import HEAD_BYTES
from mrl.exchange.log.recovery import segments_in
from mrl.exchange.log.segments import SegmentLog
from mrl.records.codec import encode
from mrl.records.exchange_messages import Announce
from mrl.records.experience import OutcomeRecord
from mrl.records.finish import FinishReason
from mrl.records.tags import tags_of
from mrl.records.version import Version


def outcome(record_id, completion=b"reverse: yah"):
    """A success."""
    version = Version(0, 3)
    return OutcomeRecord(
        record_id=record_id, source="qwen", oldest=version, newest=version, fingerprint="f", prompt_id="p1", task="t",
        created_unix_s=0.0, completion=completion, finish_reason=FinishReason.STOP, verifier="v", reward=1.0,
    )  # fmt: skip


def stored(*records):
    """What the daemon writes of records that were put together."""
    entries = [Entry(tags_of(body), body, number) for number, body in enumerate(map(encode, records), 1)]
    return b"".join(written(stored_of(entries), arrays_of(entries)))


@pytest.fixture
def log(tmp_path):
    """A log with three entries in two segments, and what it holds twice."""
    log = SegmentLog(tmp_path / "exchange", max_bytes=1 << 20, segment_bytes=1000, durability="written")
    list(log.replay())
    announcement = Announce(client="w", policy="qwen", version=Version(0, 3))
    log.append([[stored(outcome("r1"), outcome("r2"))], written(announcement)])
    log.roll(b"")
    log.append([[stored(outcome("r2", b"again"))]])
    yield log
    log.close()


def test_a_record_is_shown_field_by_field():
    """With where it was found, and whether it is what its type demands."""
    first, verdict, *tree = record_lines(encode(outcome("r1")), found="held by the daemon")
    assert first.endswith(" bytes, held by the daemon")
    assert verdict == "as a record: whole, OutcomeRecord"
    assert '  record_id: "r1"' in tree
    assert '  completion: 12 bytes "reverse: yah"' in tree
    assert "    step: 3" in tree


def test_a_record_that_is_not_valid_is_shown_all_the_same():
    """What is wrong with it stands above."""
    body = encode(outcome("r1")).replace(b"\xa4stop", b"\xa4sto\x1b")
    _, verdict, *tree = record_lines(body, found="x")
    assert verdict.startswith("as a record: not a valid record: Invalid enum value")
    assert verdict.isprintable()
    assert '  finish_reason: "sto\\x1b"' in tree
    assert list(record_lines(b"\xc1", found="x"))[-1].startswith("... broken off at byte 0")


def test_a_record_is_found_on_the_log_without_a_daemon(log, tmp_path):
    """Its last copy, at the offset of its entry."""
    offset, body = find_on_log(tmp_path / "exchange", "r1")
    assert body == encode(outcome("r1"))
    later, body = find_on_log(tmp_path / "exchange", "r2")
    assert body == encode(outcome("r2", b"again"))
    assert later > offset
    assert find_on_log(tmp_path / "exchange", "r3") is None


def test_a_log_that_cannot_be_read_is_one_clear_line(tmp_path):
    """No traceback."""
    with pytest.raises(RunFolderError, match="the log cannot be read"):
        find_on_log(tmp_path / "nowhere", "r1")
    with pytest.raises(RunFolderError, match="cannot be read"):
        list(file_lines(tmp_path))


def test_a_segment_is_shown_entry_by_entry(log, tmp_path):
    """Each with its offset; what is damaged is passed over."""
    path = segments_in(tmp_path / "exchange")[0].path
    shown = list(file_lines(path))
    assert sum("checksums hold" in line for line in shown) == 3
    assert sum("record_id" in line for line in shown) == 2
    data = bytearray(path.read_bytes())
    data[data.index(b"reverse")] ^= 1
    path.write_bytes(data)
    shown = list(file_lines(path))
    assert sum("damaged or unfinished" in line for line in shown) == 1
    assert sum("record_id" in line for line in shown) == 0


def test_a_quarantined_stretch_is_searched_for_entries(log, tmp_path):
    """A turned-over bit leaves the rest of an entry readable."""
    data = bytearray(segments_in(tmp_path / "exchange")[0].path.read_bytes())
    data[data.index(b"reverse")] ^= 1
    stretch = tmp_path / "00000000000000000042.damaged"
    stretch.write_bytes(b"torn" + data[data.index(b"RM\x02") :])
    shown = list(file_lines(stretch))
    assert any("its checksum does not hold" in line for line in shown)
    assert any('completion: 12 bytes "severse: yah"' in line for line in shown)
    assert any("its checksum holds" in line for line in shown)
    assert any("the first 256 bytes" in line for line in shown)


@pytest.mark.parametrize("data", [b"", b"\xff" * 3, bytes(5000), b"RM" * 5000, b"RM\x02\0" * 9000, b"\x81\xa1a" * 9000])
def test_any_file_is_shown_within_bounds(tmp_path, data):
    """Nothing raises, and nobody scrolls for ever."""
    path = tmp_path / "x.damaged"
    path.write_bytes(data)
    shown = list(file_lines(path))
    assert 2 <= len(shown) <= 60 * MAX_FRAMES
    assert all(line.isprintable() for line in shown)


def test_records_are_found_where_no_entry_begins(log, tmp_path):
    """Of a stretch that lacks the heads of its entries: a whole one once, and what a broken one swallowed."""
    bodies = [encode(outcome(f"r{number}")) for number in range(3)]
    stretch = tmp_path / "x.damaged"
    stretch.write_bytes(b"torn" + bodies[0] + b"\0" + bodies[1][:80] + bodies[2])
    shown = list(file_lines(stretch))
    assert sum("perhaps a record" in line for line in shown) == 3
    ids = [line.strip() for line in shown if line.strip().startswith("record_id: ")]
    assert ids.count('record_id: "r0"') == 1
    assert set(ids) == {f'record_id: "r{number}"' for number in range(3)}


def test_a_file_with_much_in_it_ends_somewhere(tmp_path):
    """Entry after entry, each with many values."""
    payload = msgspec.msgpack.encode({str(number): number for number in range(1900)})
    path = tmp_path / "x.damaged"
    path.write_bytes((b"RM\x02\0" + len(payload).to_bytes(4, "little") + bytes(HEAD_BYTES - 8) + payload) * 4)
    shown = list(file_lines(path))
    assert (len(shown), shown[-1]) == (MAX_LINES + 2, f"... more than {MAX_LINES} lines")


def test_a_record_as_plain_msgpack_is_read_too(tmp_path):
    """A file that holds one, from wherever."""
    path = tmp_path / "record"
    path.write_bytes(encode(outcome("r1")))
    assert any('record_id: "r1"' in line for line in file_lines(path))
