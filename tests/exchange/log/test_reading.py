"""A log as a person reads it: unchanged, beside a living daemon, and when it is damaged."""

import pytest
from log_payloads import whole

from mrl.exchange.log.frames import END, ENTRY, HEAD_BYTES, HEADER, Damage, claims_in
from mrl.exchange.log.reading import entries_in, frames_of
from mrl.exchange.log.recovery import segment_at, segments_in
from mrl.exchange.log.segments import SegmentLog

PAYLOADS = [[b"a" * 40, b"b" * 3], [b"c" * 50], [b"d" * 9]]
ALL = [payload for payloads in PAYLOADS for payload in payloads]


@pytest.fixture
def log(tmp_path):
    """One of three segments, open as a daemon has it."""
    log = SegmentLog(tmp_path / "log", max_bytes=1 << 20, segment_bytes=1000, durability="written")
    list(log.replay())
    for number, payloads in enumerate(PAYLOADS):
        if number:
            log.roll(b"snapshot")
        log.append(whole(payloads))
    yield log
    log.close()


def test_a_living_log_is_read_beside_its_daemon(log, tmp_path):
    """Everything in order, at the offsets that a daemon would be told; nothing is changed or locked."""
    before = {path: path.read_bytes() for path in (tmp_path / "log").iterdir()}
    read = list(entries_in(tmp_path / "log"))
    assert [payload for _, payload in read] == ALL
    assert log.append([[b"later"]])[0] > read[-1][0]
    assert list(entries_in(tmp_path / "log"))[:-1] == read
    log.close()
    again = SegmentLog(tmp_path / "log", max_bytes=1 << 20, segment_bytes=1000, durability="written")
    assert list(again.replay())[: len(read)] == read
    again.close()
    assert set(before) == set((tmp_path / "log").iterdir())


def test_an_unfinished_end_is_damage_and_not_cut(log, tmp_path):
    """The daemon that is writing it would not like that."""
    last = segments_in(tmp_path / "log")[-1].path
    with last.open("ab") as file:
        file.write(b"half an entry")
    assert [payload for _, payload in entries_in(tmp_path / "log")] == ALL
    [*_, end] = frames_of(segment_at(last))
    assert isinstance(end, Damage)
    assert last.read_bytes().endswith(b"half an entry")


def test_a_segment_that_goes_meanwhile_is_passed_over(log, tmp_path):
    """The daemon may release it at any time."""
    first, second, _ = segments_in(tmp_path / "log")
    reading = entries_in(tmp_path / "log")
    next(reading)
    second.path.unlink()
    assert [payload for _, payload in reading] == [b"b" * 3, b"d" * 9]
    first.path.unlink()
    assert segment_at(first.path) is None
    assert segment_at(tmp_path / "log" / "lock") is None


def test_what_is_written_over_while_it_is_read_was_released(tmp_path):
    """What takes its place is no damage; what was moved up meanwhile is found where it is now."""
    log = SegmentLog(tmp_path, max_bytes=1 << 26, segment_bytes=1000, durability="written")
    assert list(log.replay()) == []
    payloads = [bytes([65 + number]) * 700_000 for number in range(4)]
    log.append(whole(payloads))
    log.roll(b"")
    frames, reading = frames_of(segments_in(tmp_path)[0]), entries_in(tmp_path)
    assert (next(frames).kind, next(reading)[1]) == (HEADER, payloads[0])
    log.append(whole(payloads[2:]))
    log.release(log.second_offset)
    log.roll(b"")
    log.append(whole([b"f" * 3_000_000]))
    with pytest.raises(FileNotFoundError):
        list(frames)
    assert [payload[:1] for _, payload in reading] == [b"C", b"D", b"f"]
    log.close()


def test_the_end_of_a_living_segment_is_no_damage(log, tmp_path):
    """Where it is written over a longer one."""
    log.release(log.end_offset)
    log.roll(b"")
    log.append(whole([b"e"]))
    *_, last, end = frames_of(segments_in(tmp_path / "log")[-1])
    assert (last.payload, end.kind, end.position) == (b"e", END, last.end)


def test_damaged_bytes_are_searched_for_what_says_it_is_a_frame(log, tmp_path):
    """Wherever it begins, whole or cut, with its own checksum as the only witness."""
    data = segments_in(tmp_path / "log")[0].path.read_bytes()
    header, whole, other = claims_in(data)
    assert (header.kind, whole.kind, whole.payload, whole.is_whole) == (HEADER, ENTRY, b"a" * 40, True)
    assert other.payload == b"b" * 3
    torn = b"junk RM RM" + data[whole.position : whole.position + HEAD_BYTES + 10]
    [claim] = [claim for claim in claims_in(torn) if claim.kind == ENTRY]
    assert (claim.position, claim.length, claim.payload, claim.is_whole) == (10, 40, b"a" * 10, False)


def test_bytes_that_are_no_frame_claim_nothing():
    """Also the mark alone, at the very end, and with an absurd length."""
    for data in (b"", b"RM", b"RM" * 100, bytes(1000), b"\xff" * 50, b"RM\x02\0" + b"\xff" * 16):
        assert list(claims_in(data)) == []
