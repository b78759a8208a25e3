"""A reader beside the daemon finds what the daemon has told it the place of."""

import errno
import os

import pytest

from mrl.exchange.log import places as places_module
from mrl.exchange.log.frames import HEAD_BYTES
from mrl.exchange.log.places import Places
from mrl.exchange.log.segments import SegmentLog


@pytest.fixture
def log(tmp_path):
    """An empty log."""
    log = SegmentLog(tmp_path, max_bytes=1 << 20, segment_bytes=1000, durability="written")
    assert list(log.replay()) == []
    yield log
    log.close()


def write(log, payload):
    """Returns the place of the payload."""
    return log.append([[payload]])[0] + HEAD_BYTES


def test_what_was_written_is_read_in_any_order(log, tmp_path):
    """Across segments, those included that begin after the reader has looked."""
    places = Places(tmp_path)
    written = {}
    for number in range(10):
        payload = b"%d" % number * 300
        written[write(log, payload)] = payload
        if log.wants_roll:
            log.roll(b"snapshot")
        for place, expected in written.items():
            assert places.read(place, len(expected)) == expected
            assert places.read(place + 7, 5) == expected[7:12]
    assert len(list(tmp_path.glob("*.segment"))) > 2


def test_a_released_segment_is_gone(log, tmp_path):
    """Nothing else is ever read in its place, though its file is open here and is written over."""
    early = write(log, b"a" * 100)
    reader, late_comer = Places(tmp_path), Places(tmp_path)
    assert reader.read(early, 100) == b"a" * 100
    log.roll(b"")
    later = write(log, b"b" * 100)
    inode = log._segments[0].path.stat().st_ino
    log.release(later)
    assert reader.read(early, 100) is None
    assert late_comer.read(early, 100) is None
    log.roll(b"")
    last = write(log, b"c" * 100)
    assert log._segments[-1].path.stat().st_ino == inode
    for places in (reader, late_comer):
        assert places.read(early, 100) is None
        assert places.read(later, 100) == b"b" * 100
        assert places.read(last, 100) == b"c" * 100


def test_what_is_released_while_it_is_read_is_not_taken_for_it(log, tmp_path, monkeypatch):
    """Between finding the file and reading from it, the daemon has made another segment of it."""
    early = write(log, b"a" * 100)
    places = Places(tmp_path)
    assert places.read(early, 100) == b"a" * 100
    pread = os.pread

    def late(*args):
        monkeypatch.setattr(os, "pread", pread)
        log.roll(b"")
        log.release(log.second_offset)
        log.roll(b"")
        assert write(log, b"c" * 100) > early
        return pread(*args)

    monkeypatch.setattr(os, "pread", late)
    assert places.read(early, 100) is None


def test_a_place_that_nobody_told_is_none(log, tmp_path):
    """Behind the end, or where there is no log."""
    place = write(log, b"a" * 100)
    assert Places(tmp_path).read(place + 50, 100) is None
    assert Places(tmp_path / "missing").read(place, 100) is None


def test_a_folder_that_is_closed_to_the_reader_is_none(log, tmp_path, monkeypatch):
    """Though the file was open before that."""
    places, place = Places(tmp_path), write(log, b"a" * 100)
    assert places.read(place, 100) == b"a" * 100

    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "stat", refuse)
    assert places.read(place, 100) is None


def test_files_of_other_names_are_other_segments(log, tmp_path):
    """A new daemon may have begun a new log in the same folder; what nobody reads any more is closed."""
    places, place = Places(tmp_path), write(log, b"a" * 100)
    assert places.read(place, 100) == b"a" * 100
    for path in tmp_path.glob("*.segment"):
        path.rename(tmp_path / f"{int(path.name[:20]):020d}-{5:016x}.segment")
    assert places.read(place, 100) == b"a" * 100
    assert len(places._files) == 1
    places.close()
    assert not places._files


def test_open_files_are_bounded(log, tmp_path, monkeypatch):
    """Segments are many over weeks."""
    monkeypatch.setattr(places_module, "MAX_OPEN", 2)
    places, written = Places(tmp_path), []
    for _ in range(4):
        written.append(write(log, b"x" * 50))
        log.roll(b"")
    assert all(places.read(place, 50) == b"x" * 50 for place in written * 2)
    assert len(places._files) == 2
