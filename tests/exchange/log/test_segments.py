"""The segmented log: what `append` has returned is there again, once, at its offset, whatever failed meanwhile."""

import contextlib
import errno
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from log_disks import Crash, FaultyDisk, ForgetfulDisk, Half, SwiftDisk, Torn, failing, kill, on_disk, open_log
from log_payloads import whole

from mrl.errors import DiskBroken, DiskFull, RunFolderError
from mrl.exchange.log.frames import HEAD_BYTES, MAX_PAYLOAD_BYTES

PAYLOADS = [b"one", b"two" * 1000, b"", b"four"]


def test_what_was_written_is_replayed_with_its_offsets(reopen):
    """Over rolls and restarts, in order; an offset is a position in all that was ever written."""
    log, entries = reopen()
    assert entries == []
    written = list(zip(log.append(whole(PAYLOADS)), PAYLOADS, strict=True))
    log.roll(b"so far")
    assert log.append(whole([])) == []
    written += zip(log.append(whole([b"five"])), [b"five"], strict=True)
    log, entries = reopen()
    assert entries == written
    written += zip(log.append(whole([b"six", b"seven"])), [b"six", b"seven"], strict=True)
    log, entries = reopen()
    assert entries == written
    offsets = [offset for offset, _ in entries]
    assert offsets == sorted(set(offsets))
    assert log.end_offset == offsets[-1] + HEAD_BYTES + len(b"seven")


def test_the_account_of_a_log(reopen, tmp_path):
    """Sizes and borders agree with the files."""
    log, _ = reopen()
    begin = log.end_offset
    assert (log.first_offset, log.second_offset, log.tail_bytes, log.size_bytes) == (0, 0, 0, begin)
    log.append(whole([bytes(900)]))
    assert (log.tail_bytes, log.wants_roll) == (900 + HEAD_BYTES, False)
    log.append(whole([bytes(100)]))
    assert log.wants_roll
    border = log.end_offset
    log.roll(b"x" * 5000)
    assert (log.first_offset, log.second_offset, log.tail_bytes, log.wants_roll) == (0, border, 0, False)
    offset = log.append(whole([b"later"]))[0]
    assert log.tail_bytes == 5 + HEAD_BYTES
    assert log.size_bytes == log.end_offset == sum(path.stat().st_size for path in tmp_path.glob("log/*.segment"))
    before = log.tail_bytes, log.size_bytes, log.second_offset
    log, _ = reopen()
    assert (log.tail_bytes, log.size_bytes, log.second_offset) == before
    log.release(border)
    assert (log.first_offset, log.second_offset, log.size_bytes) == (border, border, log.end_offset - border)
    assert reopen()[1] == [(offset, b"later")]


def test_release_deletes_whole_segments_from_the_front_only(reopen, tmp_path):
    """Never one that still reaches behind the offset, never the last."""
    log, _ = reopen()
    borders = []
    for number in range(4):
        log.append(whole([bytes([number])]))
        borders.append(log.end_offset)
        log.roll(b"")
    log.release(borders[1] - 1)
    assert log.first_offset == borders[0]
    log.release(borders[0])
    assert log.first_offset == borders[0]
    log.release(borders[2])
    assert log.first_offset == borders[2]
    log.release(1 << 60)
    assert log.first_offset == log.second_offset == borders[3]
    assert [path.name[:20] for path in tmp_path.glob("log/*.segment")] == [f"{borders[3]:020d}"]


def test_offsets_survive_deletion_and_restart(reopen):
    """Nothing deleted comes back, and nothing new stands where something old stood."""
    log, _ = reopen()
    seen = set()
    for number in range(5):
        offsets = log.append(whole([b"%d" % number, b"x" * number]))
        assert not seen & set(offsets)
        seen |= set(offsets)
        log.roll(b"")
        log.release(log.end_offset)
        log, entries = reopen()
        assert entries == []


def test_the_oldest_segment_keeps_the_snapshot_of_its_begin(reopen):
    """Empty for the first; after a release that of the next one."""
    log, _ = reopen()
    log.append(whole([b"a"]))
    log.roll(b"after a")
    log.append(whole([b"b"]))
    log.roll(b"after b")
    assert reopen()[0].snapshot == b""
    log, _ = reopen()
    log.release(log.second_offset)
    log, entries = reopen()
    assert (log.snapshot, [payload for _, payload in entries]) == (b"after a", [b"b"])
    log.release(log.second_offset)
    assert reopen()[0].snapshot == b"after b"


def test_files_are_private(reopen, tmp_path):
    """Whatever the umask lets through."""
    before = os.umask(0)
    try:
        log, _ = reopen()
        log.roll(b"")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "log").iterdir()} == {0o600}


def test_two_daemons_cannot_share_a_folder(reopen, tmp_path):
    """The second is told in one line; after the first has closed, it may have it."""
    log, _ = reopen()
    with pytest.raises(RunFolderError, match="another exchange daemon"):
        open_log(tmp_path / "log")
    log.close()
    reopen()


def test_nothing_works_before_the_replay_is_read_to_its_end(reopen, tmp_path):
    """Appending would overwrite what was not read."""
    log, _ = reopen()
    log.append(whole(PAYLOADS))
    log.close()
    log = open_log(tmp_path / "log")
    for call in (
        lambda: log.append(whole([b"x"])),
        lambda: log.roll(b""),
        lambda: log.release(0),
        lambda: log.end_offset,
    ):
        with pytest.raises(RuntimeError, match="replayed first"):
            call()
    next(entries := log.replay())
    with pytest.raises(RuntimeError, match="replayed first"):
        log.append(whole([b"x"]))
    assert len(list(entries)) == 3
    log.append(whole([b"x"]))
    log.close()
    assert [payload for _, payload in reopen()[1]] == [*PAYLOADS, b"x"]


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path):
    """A file in its place, and no room for the first segment."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(RunFolderError, match="cannot use the exchange's log"):
        open_log(tmp_path / "file")

    log = open_log(tmp_path / "log", disk=FaultyDisk(before=failing("pwritev", errno.ENOSPC)))
    with pytest.raises(RunFolderError, match="cannot begin the exchange's log"):
        list(log.replay())
    log.close()
    with pytest.raises(ValueError, match="two segments need 2000"):
        open_log(tmp_path / "log", max_bytes=1999)


def test_what_could_not_be_read_again_is_not_written(reopen):
    """A caller's mistake, before anything is written."""
    log, _ = reopen(max_bytes=1 << 30)
    size = log.size_bytes
    for call in (lambda payload: log.append([[payload]]), log.roll):
        with pytest.raises(ValueError, match="can be read again"):
            call(bytes(MAX_PAYLOAD_BYTES + 1))
    assert log.size_bytes == size


def test_groups_larger_than_one_call_takes_are_written_whole(reopen, monkeypatch):
    """The kernel takes 1024 buffers at a time."""
    seen = []

    class Counting(FaultyDisk):
        def pwritev(self, file, buffers, position):
            seen.append(len(buffers))
            return super().pwritev(file, buffers, position)

    log, _ = reopen(disk=Counting())
    seen.clear()
    payloads = [b"%d" % number for number in range(1300)]
    log.append(whole(payloads))
    assert seen == [1024, 1024, 552]
    assert [payload for _, payload in reopen()[1]] == payloads


def test_short_writes_are_completed(reopen):
    """The kernel may take a group in pieces, and a piece may end inside a buffer or between two."""

    class Short(SwiftDisk):
        def pwritev(self, file, buffers, position):
            return os.pwrite(file, b"".join(buffers)[:7], position)

    log, _ = reopen(disk=Short())
    log.append(whole(PAYLOADS))
    log.roll(b"a snapshot")
    log.append(whole([b"x" * 100]))
    assert [payload for _, payload in reopen()[1]] == [*PAYLOADS, b"x" * 100]


def test_a_write_that_takes_nothing_ends(reopen):
    """Instead of trying for ever."""

    class Stuck(SwiftDisk):
        stuck = False

        def pwritev(self, file, buffers, position):
            return 0 if self.stuck else super().pwritev(file, buffers, position)

    disk = Stuck()
    log, _ = reopen(disk=disk)
    disk.stuck = True
    with pytest.raises(DiskBroken, match="took no byte"):
        log.append(whole([b"x"]))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("durability", ["synced", "written"])
def test_a_full_disk_takes_nothing_of_the_group_and_may_be_tried_again(reopen, code, durability):
    """What was written of it is cut off, also when the next group is shorter than its rest."""
    disk = Half()
    log, _ = reopen(disk=disk, durability=durability)
    before = log.append(whole([b"before"]))
    size, end = log.size_bytes, log.end_offset
    disk.code = code
    for group in ([b"x" * 300, b"y" * 30, b"z" * 400], [b"w" * 90]):
        with pytest.raises(DiskFull, match=os.strerror(code)):
            log.append(whole(group))
        assert (log.size_bytes, log.end_offset) == (size, end) == (os.fstat(log._file).st_size,) * 2
    disk.code = 0
    after = log.append(whole([b"a"]))
    assert reopen()[1] == [(before[0], b"before"), (after[0], b"a")]


def test_a_cut_that_fails_is_not_passed_over(reopen):
    """Rests of a refused group behind the next one would be read as entries."""
    disk = Half(before=failing("ftruncate", errno.EIO))
    log, _ = reopen(disk=disk)
    disk.code = errno.ENOSPC
    with pytest.raises(DiskBroken):
        log.append(whole([b"x" * 300]))


@pytest.mark.parametrize(("name", "code"), [("pwritev", errno.EIO), ("pwritev", errno.EROFS), ("fdatasync", errno.EIO),
                                            ("fdatasync", errno.ENOSPC)])  # fmt: skip
def test_after_a_broken_disk_the_log_takes_nothing_more(reopen, tmp_path, name, code):
    """A second fsync would succeed although the pages are gone, so it is not asked; what was there before is kept."""
    disk = FaultyDisk()
    log, _ = reopen(disk=disk, durability="synced")
    log.append(whole([b"before"]))
    disk._before = failing(name, code)
    with pytest.raises(DiskBroken, match=os.strerror(code)):
        log.append(whole([b"lost"]))
    disk._before = lambda number, called: None
    disk.calls.clear()
    for call in (lambda: log.append(whole([b"x"])), lambda: log.roll(b"")):
        with pytest.raises(DiskBroken, match="takes nothing more"):
            call()
    log.close()
    assert disk.calls == []
    assert reopen()[1][0][1] == b"before"


@pytest.mark.parametrize("name", ["open", "pwritev", "rename"])
def test_a_roll_without_room_leaves_the_old_segment_going(reopen, tmp_path, name):
    """Nothing of the new one remains, and the next roll succeeds."""
    disk = FaultyDisk()
    log, _ = reopen(disk=disk)
    log.append(whole([b"before"]))
    files = sorted(path.name for path in (tmp_path / "log").iterdir())
    disk._before = failing(name, errno.ENOSPC)
    with pytest.raises(DiskFull):
        log.roll(b"snapshot")
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == files
    log.append(whole([b"between"]))
    log.roll(b"snapshot")
    log.append(whole([b"after"]))
    assert [payload for _, payload in reopen()[1]] == [b"before", b"between", b"after"]


@pytest.mark.parametrize("call", ["fdatasync", "sync_folder", "rename"])
def test_a_roll_on_a_broken_disk_is_the_end(reopen, call):
    """With EIO nobody knows what is there."""
    disk = FaultyDisk()
    log, _ = reopen(disk=disk)
    disk._before = failing(call, errno.EIO)
    with pytest.raises(DiskBroken):
        log.roll(b"snapshot")
    with pytest.raises(DiskBroken, match="takes nothing more"):
        log.append(whole([b"x"]))


@pytest.mark.parametrize("call", ["rename", "unlink", "sync_folder"])
def test_a_release_on_a_broken_disk_is_the_end(reopen, call):
    """As for every other change."""
    disk = FaultyDisk()
    log, _ = reopen(disk=disk)
    log.roll(b"")
    log.roll(b"")
    disk._before = failing(call, errno.EIO)
    with pytest.raises(DiskBroken):
        log.release(log.end_offset)
    with pytest.raises(DiskBroken, match="takes nothing more"):
        log.roll(b"")


def test_the_limit_holds_for_all_segments_together_and_keeps_a_reserve(reopen):
    """The last segment's worth is for entries that move, so that a full log can be emptied again."""
    log, _ = reopen(max_bytes=5000)
    with pytest.raises(DiskFull, match="of at most 4000 bytes"):
        log.append(whole([bytes(4000)]))
    while log.size_bytes + 500 + HEAD_BYTES <= 4000:
        log.append(whole([bytes(500)]))
        if log.wants_roll:
            log.roll(b"")
    size = log.size_bytes
    with pytest.raises(DiskFull):
        log.append(whole([bytes(500)]))
    assert log.size_bytes == size
    log.append(whole([bytes(500)]), into_reserve=True)
    with pytest.raises(DiskFull, match="of at most 5000 bytes"):
        log.append(whole([bytes(1000)]), into_reserve=True)
    with pytest.raises(DiskFull, match="of at most 5000 bytes"):
        log.roll(bytes(1000))
    log.roll(b"")
    assert log.size_bytes <= 5000
    log.release(log.second_offset)
    log.append(whole([bytes(500)]))


def test_the_calls_come_in_the_order_that_a_power_cut_asks_for(reopen):
    """Content before it counts; the old segment before the new one has its name; the name before its first entry."""
    disk = FaultyDisk()
    log, _ = reopen(disk=disk, durability="synced")
    old = log._segments[-1].path.name
    disk.calls.clear()
    log.append(whole([b"a", b"b" * 99]))
    assert disk.calls == [("pwritev", old), ("fdatasync", old)]
    disk.calls.clear()
    log.roll(b"snapshot")
    new = log._segments[-1].path.name
    temporary = "segment.new"
    assert disk.calls == [
        ("fdatasync", old),
        ("open", temporary), ("pwritev", temporary), ("fdatasync", temporary), ("rename", temporary),
        ("sync_folder", "log"),
    ]  # fmt: skip
    disk.calls.clear()
    log.append(whole([b"c"]))
    log.release(log.second_offset)
    assert disk.calls == [("pwritev", new), ("fdatasync", new), ("rename", old), ("sync_folder", "log")]
    disk.calls.clear()
    log.roll(b"")  # over the old file, whose old name is gone from the disk by now
    last = log._segments[-1].path.name
    log.append(whole([b"d"]))
    log.roll(b"")
    assert disk.calls == [
        ("fdatasync", new),
        ("open", temporary), ("pwritev", temporary), ("fdatasync", temporary), ("rename", temporary),
        ("sync_folder", "log"),
        ("pwritev", last), ("fdatasync", last),
        ("ftruncate", last), ("fdatasync", last),  # what is left of the old file goes before a segment follows
        ("open", temporary), ("pwritev", temporary), ("fdatasync", temporary), ("rename", temporary),
        ("sync_folder", "log"),
    ]  # fmt: skip
    assert log.num_syncs >= 4
    assert 0 < log.last_sync_s < log.sync_s


def test_written_waits_for_the_disk_only_at_a_roll(reopen):
    """Of an append the kernel's word is enough."""
    disk = FaultyDisk()
    log, _ = reopen(disk=disk, durability="written")
    disk.calls.clear()
    log.append(whole([b"a"]))
    assert [name for name, _ in disk.calls] == ["pwritev"]
    log.roll(b"")
    assert disk.calls[1][0] == "fdatasync"


def test_closing_flushes_once(reopen):
    """Of a log that was only written as well."""
    disk = FaultyDisk()
    log, _ = reopen(disk=disk)
    log.append(whole([b"a"]))
    disk.calls.clear()
    log.close()
    log.close()
    assert [name for name, _ in disk.calls] == ["fdatasync"]


def test_what_a_killed_daemon_left_unsynced_is_synced_before_it_counts(reopen, tmp_path):
    """The replay flushes, forgets what the cache claims, and only then reads; at the end the names are synced too."""
    log, _ = reopen()
    log.append(whole([b"a"]))
    log.close()
    order = []

    class Ordered(FaultyDisk):
        def forget_cached(self, file):
            order.append("forget_cached")

        def pread(self, file, length, position):
            order.append("pread")
            return super().pread(file, length, position)

        def _call(self, name, *args):
            order.append(name)
            return super()._call(name, *args)

    log = open_log(tmp_path / "log", disk=Ordered())
    order.clear()
    entries = log.replay()
    assert next(entries)[1] == b"a"
    assert order == ["open", "fdatasync", "forget_cached", "pread"]
    assert list(entries) == []
    assert order[4:6] == ["sync_folder", "open"]
    log.close()


def exercise(log, acknowledged, released):
    """A life of appends, rolls and releases; fills in what was promised by the time it ends."""

    def append(*payloads):
        acknowledged.extend(zip(log.append(whole(payloads)), payloads, strict=True))

    append(b"a" * 30, b"b")
    log.roll(b"s1")
    append(b"c" * 70)
    append(b"d", b"e" * 50, b"f")
    log.roll(b"s2")
    append(b"g")
    released.append(log.second_offset)
    log.release(released[-1])
    append(b"h" * 40)
    log.roll(b"s3")
    append(b"i")
    released.append(log.second_offset)
    log.release(released[-1])
    append(b"j" * 10)


def crash_at(number, *, after):
    """Ends the process before or after the call of this number."""

    def fault(seen, name):
        if seen == number:
            raise Crash

    return {"after" if after else "before": fault}


def num_calls(tmp_path) -> int:
    """How many calls a whole life makes."""
    disk = FaultyDisk()
    log = open_log(tmp_path / "whole", disk=disk, durability="synced")
    assert list(log.replay()) == []
    exercise(log, [], [])
    log.close()
    return len(disk.calls)


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power-cut"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_crash_at_any_call_loses_nothing_and_doubles_nothing(tmp_path, power, after):
    """Every single call of a life is the last one once; with the power gone, only what was synced is left."""
    for number in range(1, num_calls(tmp_path) + 1):
        folder = tmp_path / "log"
        folder.mkdir()
        disk = ForgetfulDisk(folder, **crash_at(number, after=after))
        acknowledged, released = [], [0]
        log = open_log(folder, disk=disk, durability="synced")
        with contextlib.suppress(Crash):
            assert list(log.replay()) == []
            exercise(log, acknowledged, released)
        kill(log)
        if power:
            disk.lose_power()
        check_survivors(folder, acknowledged, released[-1])
        shutil.rmtree(folder)


def check_survivors(folder, acknowledged, released):
    """What was acknowledged and not released is there at its offset, with at most one unacknowledged group behind."""
    log = open_log(folder, durability="synced")
    entries = list(log.replay())
    offsets = [offset for offset, _ in entries]
    assert offsets == sorted(set(offsets))
    kept = [entry for entry in acknowledged if entry[0] >= log.first_offset]
    assert entries[: len(kept)] == kept
    assert len(entries) - len(kept) <= 3
    assert log.first_offset <= released
    assert log.damaged == 0
    assert (log.snapshot == b"") == (log.first_offset == 0)
    behind = (log.append(whole([b"behind"]))[0], b"behind")
    log.close()
    log = open_log(folder)
    assert list(log.replay()) == [*entries, behind]
    assert not list(folder.glob("*.new"))
    log.close()


def test_a_crash_in_the_middle_of_a_write_leaves_a_torn_end_only(tmp_path):
    """After each number of bytes of a group of three."""
    group, size = [b"x" * 20, b"y" * 3, b"z" * 9], 32 + 3 * HEAD_BYTES

    for left in range(size + 1):
        folder, disk = tmp_path / f"{left}", Torn()
        log = open_log(folder, disk=disk)
        list(log.replay())
        before = log.append(whole([b"before"]))[0]
        disk.left = left
        try:
            log.append(whole(group))
            assert left == size
        except Crash:
            assert left < size
        kill(log)
        log = open_log(folder)
        entries = list(log.replay())
        assert entries[0] == (before, b"before")
        kept = [payload for _, payload in entries[1:]]
        assert kept == group[: len(kept)]
        assert log.cut_bytes == left - sum(HEAD_BYTES + len(payload) for payload in kept)
        assert log.damaged == 0
        entries.append((log.append(whole([b"x"]))[0], b"x"))
        log.close()
        log = open_log(folder)
        assert list(log.replay()) == entries
        assert log.cut_bytes == 0
        log.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_error_at_any_call_loses_nothing_and_doubles_nothing(tmp_path, code):
    """A full disk is tried again until the life is over; a broken one is left to the next daemon."""
    for number in range(1, num_calls(tmp_path) + 1):
        folder = tmp_path / "log"

        def fault(seen, name, number=number):
            if seen == number and name != "open":
                raise OSError(code, os.strerror(code))

        acknowledged, released = [], [0]
        log = open_log(folder, disk=FaultyDisk(before=fault), durability="synced")
        with contextlib.suppress(DiskBroken, RunFolderError):
            assert list(log.replay()) == []
            exercise(Insistent(log), acknowledged, released)
        with contextlib.suppress(DiskBroken):
            log.close()
        check_survivors(folder, acknowledged, released[-1])
        shutil.rmtree(folder)


class Insistent:
    """A log whose calls are tried once more when the disk was full."""

    def __init__(self, log):
        self._log = log

    def __getattr__(self, name):
        found = getattr(self._log, name)

        def call(*args):
            try:
                return found(*args)
            except DiskFull:
                return found(*args)

        return call if callable(found) else found


class LogModel(RuleBasedStateMachine):
    """The log against a list, with restarts, kills, torn ends and full disks in between; old files are written over."""

    def __init__(self):
        super().__init__()
        self.folder = Path("/nonexistent")
        self.disk = Half()
        self.entries: list[tuple[int, bytes]] = []
        self.begins: list[tuple[int, bytes]] = []

    @initialize()
    def begin(self):
        self.folder = Path(tempfile.mkdtemp(prefix="log-model-"))
        self._open()
        self.begins = [(0, b"")]

    def _open(self):
        self.log = open_log(self.folder, disk=self.disk, max_bytes=20_000)
        assert self.log.snapshot == (self.begins[0][1] if self.begins else b"")
        assert list(self.log.replay()) == self.entries

    @rule(payloads=st.lists(st.binary(max_size=300), min_size=1, max_size=4), full=st.booleans())
    def append(self, payloads, full):
        end = self.log.end_offset
        self.disk.code = errno.ENOSPC if full else 0
        try:
            offsets = self.log.append(whole(payloads))
        except DiskFull:
            assert full or self.log.size_bytes > 17_000
            assert self.log.end_offset == end
            return
        finally:
            self.disk.code = 0
        self.entries += zip(offsets, payloads, strict=True)

    @rule(snapshot=st.binary(max_size=200))
    def roll(self, snapshot):
        end = self.log.end_offset
        try:
            self.log.roll(snapshot)
        except DiskFull:
            assert self.log.size_bytes > 19_000
            return
        self.begins.append((end, snapshot))

    @rule(share=st.floats(0, 1.2))
    def release(self, share):
        before = int(self.log.first_offset + share * (self.log.end_offset - self.log.first_offset))
        self.log.release(before)
        while len(self.begins) > 1 and self.begins[1][0] <= before:
            self.begins.pop(0)
        self.entries = [entry for entry in self.entries if entry[0] >= self.begins[0][0]]

    @rule(torn=st.binary(max_size=40), killed=st.booleans())
    def restart(self, torn, killed):
        last = self.log._segments[-1]
        kill(self.log) if killed else self.log.close()
        with last.path.open("r+b") as file:
            file.seek(last.size_bytes)
            file.write(torn)
        cut_bytes = last.path.stat().st_size - last.size_bytes
        self._open()
        assert self.log.cut_bytes == (cut_bytes if torn else 0)

    @precondition(lambda self: self.begins)
    @invariant()
    def borders_agree(self):
        assert self.log.first_offset == self.begins[0][0]
        assert self.log.second_offset == self.begins[:2][-1][0]
        assert self.log.size_bytes == self.log.end_offset - self.log.first_offset
        assert self.log.size_bytes + self.log._old_bytes == on_disk(self.folder) <= 20_000

    def teardown(self):
        if self.begins:
            self.log.close()
            shutil.rmtree(self.folder)


TestLogModel = LogModel.TestCase
TestLogModel.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
