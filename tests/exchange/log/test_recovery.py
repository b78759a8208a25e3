"""What is read of a folder whose files were damaged, cut, lost or never this log's."""

import errno
import os
import random
import struct
import zlib

import pytest
from log_disks import SwiftDisk
from log_payloads import whole

from mrl.errors import RunFolderError
from mrl.exchange.log import recovery
from mrl.exchange.log.frames import FORMAT, HEAD_BYTES, MAGIC, PREFIX_BYTES
from mrl.exchange.log.segments import SegmentLog

SEGMENTS = [[b"a" * 40, b"b" * 3], [b"c" * 50, b"d" * 9, b"e" * 20], [b"f" * 33, b"g" * 7]]
SNAPSHOTS = [b"", b"s1", b"s2"]


@pytest.fixture
def folder(tmp_path):
    """Of a log with three segments."""
    log = opened(tmp_path / "log")
    list(log.replay())
    for number, payloads in enumerate(SEGMENTS):
        if number:
            log.roll(SNAPSHOTS[number])
        log.append(whole(payloads))
    log.close()
    return tmp_path / "log"


def opened(folder, **options) -> SegmentLog:
    """Not yet replayed."""
    defaults = {"max_bytes": 1 << 30, "segment_bytes": 1000, "durability": "written", "disk": SwiftDisk()}
    return SegmentLog(folder, **{**defaults, **options})


def replayed(folder, **options) -> tuple[SegmentLog, list[tuple[int, bytes]]]:
    """Opened, read and closed again; the properties stay."""
    log = opened(folder, **options)
    try:
        return log, list(log.replay())
    finally:
        log.close()


def files_of(folder) -> list:
    """The segments, the oldest first."""
    return sorted(folder.glob("*.segment"))


def quarantined(folder) -> dict[int, bytes]:
    """Copies of damaged stretches, by their absolute offset."""
    return {int(path.name.split(".")[0]): path.read_bytes() for path in (folder / "quarantine").glob("*.damaged")}


def payloads(entries) -> list[bytes]:
    """Without their offsets."""
    return [payload for _, payload in entries]


def goes_on(folder, before) -> bool:
    """Whether an entry can be added, and all of it is there at the next start, with nothing left to cut."""
    log = opened(folder)
    list(log.replay())
    added = (log.append(whole([b"added"]))[0], b"added")
    log.close()
    log, entries = replayed(folder)
    return entries == [*before, added] and log.cut_bytes == 0


def test_the_end_of_the_last_segment_is_cut_at_every_length(folder):
    """Wherever the last write was interrupted, all before it is there, and nothing is called damaged."""
    last = files_of(folder)[-1]
    whole, entries = last.read_bytes(), replayed(folder)[1]
    frame_bytes = HEAD_BYTES + 7
    for missing in range(1, frame_bytes + 1):
        last.write_bytes(whole[:-missing])
        log, left = replayed(folder)
        assert left == entries[:-1]
        assert (log.cut_bytes, log.damaged) == (frame_bytes - missing, 0)
        assert last.read_bytes() == whole[:-frame_bytes]
        assert goes_on(folder, left)
    assert quarantined(folder) == {}


def test_a_last_segment_without_a_whole_header_is_set_aside_at_every_length(folder):
    """The one before it goes on in its place; an empty file leaves nothing to look at."""
    last = files_of(folder)[-1]
    whole, entries = last.read_bytes(), replayed(folder)[1][:-2]
    end = int(last.name[:20])
    for length in range(PREFIX_BYTES + HEAD_BYTES + len(SNAPSHOTS[-1])):
        last.write_bytes(whole[:length])
        log, left = replayed(folder)
        assert left == entries
        assert (log.damaged, log.damaged_bytes, log.cut_bytes, log.end_offset) == (1, length, 0, end)
        assert (folder / "quarantine" / last.name).read_bytes() == whole[:length]
        before = files_of(folder)[-1].read_bytes()
        assert goes_on(folder, left)
        files_of(folder)[-1].write_bytes(before)


def test_a_last_segment_keeps_its_entries_without_its_header(folder):
    """Name and frames are enough: only the header is lost."""
    last = files_of(folder)[-1]
    entries, whole = replayed(folder)[1], last.read_bytes()
    last.write_bytes(bytes(PREFIX_BYTES + HEAD_BYTES + 2) + whole[PREFIX_BYTES + HEAD_BYTES + 2 :])
    log, left = replayed(folder)
    assert left == entries
    assert (log.damaged, log.damaged_bytes) == (1, PREFIX_BYTES + HEAD_BYTES + 2)
    assert goes_on(folder, entries)


def test_a_log_of_one_unusable_segment_begins_anew_behind_it(tmp_path):
    """Its offsets are not given a second time."""
    log, _ = replayed(tmp_path)
    (only,) = files_of(tmp_path)
    only.write_bytes(b"x" * 500)
    log, entries = replayed(tmp_path)
    assert (entries, log.damaged, log.first_offset, log.snapshot) == ([], 1, 500, b"")
    assert goes_on(tmp_path, [])


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_flipped_bit_costs_one_frame_and_is_kept_for_inspection(folder, number):
    """At every byte of a segment; only at the end of the last one it cannot be told from an interrupted write."""
    file = files_of(folder)[number]
    whole, entries = file.read_bytes(), replayed(folder)[1]
    first = int(file.name[:20])
    for position in range(len(whole)):
        data = bytearray(whole)
        data[position] ^= 1 << position % 8
        file.write_bytes(data)
        log, left = replayed(folder)
        hit = [(at, one) for at, one in entries if at <= first + position < at + HEAD_BYTES + len(one)]
        assert left == [entry for entry in entries if entry not in hit]
        if hit and number == 2 and hit[0] == entries[-1]:
            assert (log.damaged, log.cut_bytes) == (0, HEAD_BYTES + len(hit[0][1]))
        else:
            assert (log.damaged, log.cut_bytes) == (1, 0)
            start = hit[0][0] if hit else first + (0 if position < PREFIX_BYTES else PREFIX_BYTES)
            assert quarantined(folder) == {start: bytes(data[start - first : start - first + log.damaged_bytes])}
            for copy in (folder / "quarantine").iterdir():
                copy.unlink()
    file.write_bytes(whole)
    assert replayed(folder)[1] == entries


def test_zeros_behind_the_last_frame_are_cut(folder):
    """As some file systems leave them after a power cut."""
    entries = replayed(folder)[1]
    with files_of(folder)[-1].open("ab") as file:
        file.write(bytes(5000))
    log, left = replayed(folder)
    assert (left, log.cut_bytes, log.damaged) == (entries, 5000, 0)
    assert goes_on(folder, entries)


def test_a_hole_inside_the_last_group_costs_only_what_it_covers(folder):
    """Pages reach the disk in any order: what lies whole behind the hole is kept."""
    log = opened(folder)
    entries = list(log.replay())
    offsets = log.append(whole([bytes([65 + number]) * 5000 for number in range(4)]))
    log.close()
    last = files_of(folder)[-1]
    data, first = bytearray(last.read_bytes()), int(last.name[:20])
    begin, end = offsets[1] - first + 100, offsets[2] - first + 100
    data[begin:end] = bytes(end - begin)
    last.write_bytes(data)
    log, left = replayed(folder)
    assert left == [*entries, (offsets[0], b"A" * 5000), (offsets[3], b"D" * 5000)]
    assert (log.damaged, log.damaged_bytes, log.cut_bytes) == (1, offsets[3] - offsets[1], 0)


def test_a_missing_middle_segment_is_counted(folder):
    """The others are there at their offsets, the snapshot of the oldest too."""
    entries, file = replayed(folder)[1], files_of(folder)[1]
    size = file.stat().st_size
    file.unlink()
    log, left = replayed(folder)
    assert payloads(left) == SEGMENTS[0] + SEGMENTS[2]
    assert set(left) < set(entries)
    assert (log.damaged, log.damaged_bytes) == (1, size)
    assert goes_on(folder, left)


def test_missing_first_segments_are_what_a_release_leaves(folder):
    """No damage, and the snapshot of the oldest that is left."""
    files_of(folder)[0].unlink()
    log, left = replayed(folder)
    assert (payloads(left), log.damaged, log.snapshot) == (SEGMENTS[1] + SEGMENTS[2], 0, b"s1")


@pytest.mark.parametrize("lost", [1, HEAD_BYTES + 20, HEAD_BYTES + 21])
def test_a_shortened_earlier_segment_is_damage(folder, lost):
    """Unlike the last one it was whole once; what follows keeps its offsets."""
    entries, file = replayed(folder)[1], files_of(folder)[1]
    whole = file.read_bytes()
    file.write_bytes(whole[:-lost])
    log, left = replayed(folder)
    gone = entries[3:5] if lost > HEAD_BYTES + 20 else entries[4:5]
    assert left == [entry for entry in entries if entry not in gone]
    assert log.cut_bytes == 0
    assert log.damaged_bytes == sum(HEAD_BYTES + len(payload) for _, payload in gone)
    assert file.read_bytes() == whole[:-lost]


def test_what_stands_behind_the_end_of_an_earlier_segment_is_no_entry(folder):
    """Even a whole copy of it: its place belongs to the next one."""
    entries, file = replayed(folder)[1], files_of(folder)[0]
    whole = file.read_bytes()
    file.write_bytes(whole * 2)
    log, left = replayed(folder)
    assert (left, log.damaged, log.damaged_bytes) == (entries, 1, len(whole))
    assert quarantined(folder) == {len(whole): whole}


def test_a_damaged_snapshot_is_empty_and_counted(folder):
    """The entries do not depend on it."""
    files_of(folder)[0].unlink()
    entries, file = replayed(folder)[1], files_of(folder)[0]
    data = bytearray(file.read_bytes())
    data[PREFIX_BYTES + HEAD_BYTES] ^= 1
    file.write_bytes(data)
    log, left = replayed(folder)
    assert (left, log.snapshot, log.damaged) == (entries, b"", 1)


class Refusing(SwiftDisk):
    """Has an error at one kind of call for one file."""

    def __init__(self, name, call, code):
        self._name, self._call, self._code = name, call, code

    def open(self, path, flags):
        self._fail("open", str(path))
        return super().open(path, flags)

    def pread(self, file, length, position):
        self._fail("pread", os.readlink(f"/proc/self/fd/{file}"))
        return super().pread(file, length, position)

    def _fail(self, call, path):
        if call == self._call and path.endswith(self._name):
            raise OSError(self._code, os.strerror(self._code))


@pytest.mark.parametrize(("call", "code"), [("open", errno.EACCES), ("pread", errno.EIO)])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_file_that_cannot_be_read_is_one_line(folder, number, call, code):
    """It names the file and the cure, and nothing is changed; the folder is free again."""
    before = {path: path.read_bytes() for path in files_of(folder)}
    name = files_of(folder)[number].name
    with pytest.raises(RunFolderError) as caught:
        replayed(folder, disk=Refusing(name, call, code))
    message = str(caught.value)
    assert message.count("\n") == 0
    assert name in message
    assert os.strerror(code) in message
    assert "cure: make it usable" in message
    assert {path: path.read_bytes() for path in files_of(folder)} == before
    assert len(replayed(folder)[1]) == 7


@pytest.mark.parametrize("number", [0, 1, 2])
def test_another_format_is_refused_and_left_alone(folder, number):
    """In whichever segment; the line says what is there and what is wanted."""
    file = files_of(folder)[number]
    begin = MAGIC + struct.pack("<I", 7)
    data = begin + struct.pack("<I", zlib.crc32(begin)) + file.read_bytes()[PREFIX_BYTES:]
    file.write_bytes(data)
    with pytest.raises(RunFolderError, match=f"got 'format 7'; wanted format {FORMAT}; cure: use the version"):
        opened(folder)
    assert file.read_bytes() == data


def test_the_log_of_an_earlier_version_is_refused_and_left_alone(tmp_path):
    """It was one file with another layout."""
    (tmp_path / "log").write_bytes(b"mrl exchange log 1\n")
    with pytest.raises(RunFolderError, match=r"log: a log of an earlier version of the exchange; cure: move"):
        opened(tmp_path)
    assert (tmp_path / "log").read_bytes() == b"mrl exchange log 1\n"


def test_foreign_content_under_a_segment_name_is_moved_not_destroyed(folder):
    """Behind the last segment, where it would otherwise count as a torn one."""
    name = f"{10**9:020d}-{5:016x}.segment"
    (folder / name).write_bytes(b"precious")
    assert len(replayed(folder)[1]) == 7
    assert (folder / "quarantine" / name).read_bytes() == b"precious"


def test_other_files_are_left_alone_and_half_a_segment_is_removed(folder):
    """A roll that was interrupted leaves a file without a segment's name."""
    (folder / "segment.new").write_bytes(b"half")
    (folder / "notes.txt").write_bytes(b"mine")
    assert len(replayed(folder)[1]) == 7
    assert not (folder / "segment.new").exists()
    assert (folder / "notes.txt").read_bytes() == b"mine"


def damage(file):
    """Flip a bit of the first entry."""
    data = bytearray(file.read_bytes())
    data[PREFIX_BYTES + HEAD_BYTES + 2 + HEAD_BYTES] ^= 1
    file.write_bytes(data)


def test_the_quarantine_is_bounded_and_filled_once(folder, monkeypatch):
    """A second start copies nothing again; beyond its bound damage is only counted."""
    damage(files_of(folder)[0])
    replayed(folder)
    (copy,) = (folder / "quarantine").iterdir()
    assert copy.stat().st_mode & 0o777 == 0o600
    size = copy.stat().st_size
    copy.write_bytes(b"x" * size)
    replayed(folder)
    assert copy.read_bytes() == b"x" * size
    monkeypatch.setattr(recovery, "MAX_QUARANTINE_BYTES", size + 10)
    damage(files_of(folder)[1])
    log, entries = replayed(folder)
    assert (log.damaged, len(entries)) == (2, 5)
    assert len(quarantined(folder)) == 1


def test_a_full_disk_does_not_stop_the_replay(folder):
    """The damaged bytes are still in their segment; half a copy is not kept."""

    class Full(SwiftDisk):
        def pwritev(self, file, buffers, position):
            raise OSError(errno.ENOSPC, "full")

    damage(files_of(folder)[1])
    log, entries = replayed(folder, disk=Full())
    assert (log.damaged, len(entries)) == (1, 6)
    assert quarantined(folder) == {}


def test_random_damage_never_invents_an_entry(folder):
    """Bytes changed, runs zeroed, files cut and swapped: what is replayed was written, at that offset, in order."""
    entries = replayed(folder)[1]
    pristine = {path.name: path.read_bytes() for path in files_of(folder)}
    draw = random.Random(0)
    for _ in range(40):
        for path in files_of(folder):
            path.unlink()
        for name, data in pristine.items():
            (folder / name).write_bytes(damaged(bytearray(data), draw))
        log, left = replayed(folder)
        rest = iter(entries)
        assert all(entry in rest for entry in left)
        assert left == entries or log.damaged or log.cut_bytes
        assert replayed(folder)[1] == left


def damaged(data: bytearray, draw: random.Random) -> bytes:
    """One kind of damage, or none."""
    at, length = draw.randrange(len(data)), draw.randrange(1, 60)
    kind = draw.choice(["none", "none", "byte", "zeros", "cut", "doubled"])
    if kind == "byte":
        data[at] ^= draw.randrange(1, 256)
    elif kind == "zeros":
        data[at : at + length] = bytes(len(data[at : at + length]))
    elif kind == "cut":
        del data[at:]
    elif kind == "doubled":
        data[at:at] = data[at : at + length]
    return bytes(data)
