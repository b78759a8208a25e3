"""A released file becomes the next segment: nothing of its earlier life is read, however little is written over it."""

import errno
import os
import random

import pytest
from log_disks import Crash, FaultyDisk, SwiftDisk, Torn, failing, kill, on_disk, open_log
from log_payloads import whole

from mrl.errors import DiskFull
from mrl.exchange.log.frames import HEAD_BYTES
from mrl.exchange.log.recovery import NEW_SEGMENT

OLD = [b"old" * 100, b"older" * 60, b"", b"oldest" * 50]
PAGE_BYTES = 64


def written_over(log):
    """Lets the last segment of a log be one of whose file the larger part is of its earlier life; returns its path."""
    old = log._segments[-1].path
    inode = old.stat().st_ino
    log.append(whole(OLD))
    log.roll(b"")
    log.release(log.second_offset)
    assert (log._folder / NEW_SEGMENT).stat().st_ino == inode
    log.roll(b"snapshot")
    new = log._segments[-1].path
    assert new.stat().st_ino == inode
    assert new.stat().st_size > log._segments[-1].size_bytes + 900
    return new


@pytest.mark.parametrize("groups", [[], [[b"a"]], [[b"a", b"b"], [b"c" * 500], [b""]], [[b"x" * 2000]]])
def test_a_killed_daemon_leaves_a_whole_log(reopen, groups):
    """After no, one and many appends; nothing is called torn or damaged, and the file has its own length again."""
    log, _ = reopen()
    path = written_over(log)
    written = []
    for group in groups:
        written += zip(log.append(whole(group)), group, strict=True)
    end = log.end_offset
    kill(log)
    log, entries = reopen()
    assert entries == written
    assert (log.cut_bytes, log.damaged, log.end_offset) == (0, 0, end)
    assert path.stat().st_size == log._segments[-1].size_bytes


def test_a_crash_in_the_middle_of_a_write_leaves_what_was_whole(tmp_path):
    """After each number of bytes of a group of three and its end."""
    group = [b"x" * 20, b"y" * 3, b"z" * 9]
    size = sum(HEAD_BYTES + len(payload) for payload in group) + HEAD_BYTES

    for left in range(size):
        folder, disk = tmp_path / f"{left}", Torn()
        log = open_log(folder, disk=disk)
        assert list(log.replay()) == []
        written_over(log)
        before = (log.append(whole([b"before"]))[0], b"before")
        disk.left = left
        with pytest.raises(Crash):
            log.append(whole(group))
        kill(log)
        log = open_log(folder)
        entries = list(log.replay())
        assert entries[0] == before
        kept = [payload for _, payload in entries[1:]]
        assert kept == group[: len(kept)]
        assert len(kept) == sum(left >= end for end in (HEAD_BYTES + 20, 2 * HEAD_BYTES + 23, 3 * HEAD_BYTES + 32))
        assert (log.cut_bytes > 0, log.damaged) == (left > len(b"RM"), 0)  # with which END begins as well
        entries.append((log.append(whole([b"x"]))[0], b"x"))
        log.close()
        log = open_log(folder)
        assert list(log.replay()) == entries
        log.close()


def test_pages_that_never_reached_the_disk_bring_nothing_back(tmp_path):
    """A power cut in the middle of a group leaves any of its pages as they were before."""
    for seed in range(200):
        draw, folder = random.Random(seed), tmp_path / f"{seed}"
        log = open_log(folder)
        assert list(log.replay()) == []
        path = written_over(log)
        before = log.append(whole([b"b" * draw.randrange(300)]))
        old = path.read_bytes()
        group = [bytes([65 + number]) * draw.randrange(200) for number in range(4)]
        offsets = log.append(whole(group))
        kill(log)
        data = bytearray(path.read_bytes())
        for begin in range(0, len(data), PAGE_BYTES):
            if draw.random() < 0.5:
                data[begin : begin + PAGE_BYTES] = old[begin : begin + PAGE_BYTES]
        path.write_bytes(data)
        log = open_log(folder)
        entries = list(log.replay())
        assert [offset for offset, _ in entries[:1]] == before
        assert set(entries[1:]) <= set(zip(offsets, group, strict=True))
        added = (log.append(whole([b"added"]))[0], b"added")
        log.close()
        log = open_log(folder)
        assert list(log.replay()) == [*entries, added]
        assert log.damaged <= 2
        log.close()


def test_the_longest_file_waits_and_the_others_are_deleted(reopen, tmp_path):
    """However many are released at once; a roll without one begins an empty file."""
    log, _ = reopen()
    for num_bytes in (50, 70, 30):
        log.append(whole([bytes(num_bytes)]))
        log.roll(b"")
    longest = log._segments[1].path.stat().st_ino
    log.release(log.end_offset)
    assert sorted(path.name for path in (tmp_path / "log").iterdir())[1:] == ["lock", NEW_SEGMENT]
    assert (tmp_path / "log" / NEW_SEGMENT).stat().st_ino == longest
    log.roll(b"")
    log.roll(b"")
    last = log._segments[-1]
    assert last.path.stat().st_size == last.size_bytes
    assert not (tmp_path / "log" / NEW_SEGMENT).exists()


def test_the_limit_holds_for_what_is_not_written_over_yet_as_well(reopen, tmp_path):
    """It is given back before anything is refused that would fit without it."""
    log, _ = reopen(max_bytes=6000)
    path = written_over(log)
    log.append(whole([bytes(1500)]))
    log.append(whole([bytes(100)]))
    log.roll(b"")
    log.release(log.end_offset)
    log.append(whole([bytes(1000)]))
    assert (tmp_path / "log" / NEW_SEGMENT).stat().st_size > 1600
    log.append(whole([bytes(1500)]))
    log.append(whole([bytes(2300)]))
    assert on_disk(path.parent) == log.size_bytes <= 5000
    with pytest.raises(DiskFull, match="of at most 5000 bytes"):
        log.append(whole([bytes(200)]))
    assert not path.exists()


def test_the_limit_cuts_the_end_of_an_earlier_life(reopen):
    """Where it takes the room of others."""
    log, _ = reopen(max_bytes=1900, segment_bytes=800)
    path = written_over(log)
    log.append(whole([bytes(200)]))
    assert path.stat().st_size == log._segments[-1].size_bytes


class Small(SwiftDisk):
    """Has so much room for one log; writes what fits."""

    def __init__(self, folder, num_bytes):
        self._folder, self._num_bytes = folder, num_bytes

    def pwritev(self, file, buffers, position):
        data = b"".join(buffers)
        overlap = max(0, os.fstat(file).st_size - position)
        room = overlap + self._num_bytes - on_disk(self._folder)
        if room <= 0:
            raise OSError(errno.ENOSPC, "no room")
        return os.pwrite(file, data[:room], position)


def test_a_full_disk_gets_back_what_waits(reopen, tmp_path):
    """Nothing is refused for it; only what does not fit without it either is."""
    log, _ = reopen(disk=Small(tmp_path / "log", 4000))
    log.append(whole([bytes(1500)]))
    log.roll(b"")
    path = log._segments[-1].path
    log.release(log.second_offset)
    kept = [(log.append(whole([bytes(1000)]))[0], bytes(1000))]
    assert on_disk(path.parent) > 2500
    kept += [(log.append(whole([bytes(2000)]))[0], bytes(2000))]
    assert not (tmp_path / "log" / NEW_SEGMENT).exists()
    with pytest.raises(DiskFull, match="no room"):
        log.append(whole([bytes(2000)]))
    assert on_disk(path.parent) == path.stat().st_size == log.size_bytes
    kept += [(log.append(whole([bytes(500)]))[0], bytes(500))]
    kill(log)
    assert reopen()[1] == kept


def test_a_file_that_waits_may_be_deleted_by_a_person(reopen, tmp_path):
    """Whose disk is full."""
    log, _ = reopen()
    written_over(log)
    log.release(log.second_offset)
    (tmp_path / "log" / NEW_SEGMENT).unlink()
    log.roll(b"")
    log.append(whole([b"a"]))
    log.release(log.second_offset)
    (tmp_path / "log" / NEW_SEGMENT).unlink()
    log.close()
    assert [payload for _, payload in reopen()[1]] == [b"a"]


@pytest.mark.parametrize("name", ["open", "pwritev", "rename"])
def test_a_roll_without_room_loses_only_the_file_that_waited(reopen, tmp_path, name):
    """The old segment goes on, and ends where its last entry does."""
    disk = FaultyDisk()
    log, _ = reopen(disk=disk)
    written_over(log)
    log.append(whole(OLD))
    log.roll(b"")
    path = log._segments[-1].path
    log.append(whole([b"before"]))
    log.release(log.end_offset)
    disk._before = failing(name, errno.ENOSPC)
    with pytest.raises(DiskFull):
        log.roll(b"")
    disk._before = lambda number, called: None
    assert not (tmp_path / "log" / NEW_SEGMENT).exists()
    assert path.stat().st_size == log.size_bytes == log.size_bytes + log._old_bytes
    log.append(whole([b"after"]))
    assert path.stat().st_size == log.size_bytes == log.size_bytes + log._old_bytes
    log.roll(b"")
    assert [payload for _, payload in reopen()[1]] == [b"before", b"after"]


def test_closing_leaves_only_what_counts(reopen, tmp_path):
    """No file that waits, and no end of an earlier life."""
    log, _ = reopen()
    path = written_over(log)
    log.append(whole([b"a"]))
    log.release(log.second_offset)
    log.close()
    assert sorted(one.name for one in (tmp_path / "log").iterdir()) == [path.name, "lock"]
    assert path.stat().st_size == log.size_bytes
