"""The writer thread: what waits together is written together, in order, and reported only when it is on the disk."""

import errno
import os
import random
import select
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
from log_payloads import whole

from mrl.errors import DiskBroken
from mrl.exchange.log.disk import Disk
from mrl.exchange.log.frames import HEAD_BYTES, MAX_PAYLOAD_BYTES
from mrl.exchange.log.segments import SegmentLog
from mrl.exchange.log.writer import Finished, LogWriter

PATIENCE_S = 20.0


class GatedDisk(Disk):
    """Once closed, waits at the next fdatasync until it is opened; may be given an error to have instead."""

    def __init__(self):
        self.gate, self.waits = threading.Event(), threading.Event()
        self.gate.set()
        self.error = 0
        self.syncs = 0
        self.writes: list[int] = []

    def shut(self):
        self.waits.clear()
        self.gate.clear()

    def fdatasync(self, file):
        self.waits.set()
        assert self.gate.wait(PATIENCE_S)
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        super().fdatasync(file)
        self.syncs += 1

    def pwritev(self, file, buffers, position):
        self.writes.append(sum(map(len, buffers)))
        return super().pwritev(file, buffers, position)


@pytest.fixture
def disk():
    """Open."""
    return GatedDisk()


@pytest.fixture
def start(tmp_path, disk):
    """Starts a writer over a replayed log; both are closed at the end."""
    started = []

    def start_writer(*, max_bytes=1 << 30, **options):
        log = SegmentLog(tmp_path / "log", max_bytes=max_bytes, segment_bytes=1000, durability="synced", disk=disk)
        list(log.replay())
        disk.writes.clear()
        started.append((LogWriter(log, **options), log))
        return started[-1]

    yield start_writer
    disk.gate.set()
    for writer, log in started:
        assert writer.close(PATIENCE_S)
        log.close()


def wakes(writer, *, within_s=PATIENCE_S) -> bool:
    """Whether the loop would be woken."""
    return bool(select.select([writer.wake_fd], [], [], within_s)[0])


def wait_for(writer, number) -> list[Finished]:
    """The next `number` reports."""
    done = []
    while len(done) < number:
        assert wakes(writer)
        done += writer.finished()
    return done


def hold(writer, disk):
    """Let one entry reach the disk and stay there, so that whatever is posted now has to wait together."""
    disk.shut()
    writer.post(-1, whole([b"first"]))
    assert disk.waits.wait(PATIENCE_S)


def replayed(tmp_path) -> list[bytes]:
    """What a next daemon finds."""
    log = SegmentLog(tmp_path / "log", max_bytes=1 << 30, durability="synced")
    payloads = [payload for _, payload in log.replay()]
    log.close()
    return payloads


def test_posts_are_reported_in_order_with_their_offsets(start, tmp_path):
    """Each with those of its own entries; a post without any has none."""
    writer, log = start()
    begin = log.end_offset
    writer.post(7, whole([b"a", b"bb"]))
    writer.post(8, whole([]))
    writer.post(9, whole([b"c"]))
    second, third = begin + HEAD_BYTES + 1, begin + 2 * HEAD_BYTES + 3
    assert wait_for(writer, 3) == [Finished(7, [begin, second], ""), Finished(8, [], ""), Finished(9, [third], "")]
    assert writer.finished() == []
    assert not wakes(writer, within_s=0)
    writer.close(PATIENCE_S)
    log.close()
    assert replayed(tmp_path) == [b"a", b"bb", b"c"]


def test_nothing_is_reported_before_it_is_on_the_disk(start, disk):
    """Written and waiting for the sync is not enough."""
    writer, _ = start()
    hold(writer, disk)
    assert disk.writes
    assert not wakes(writer, within_s=0)
    assert writer.finished() == []
    assert writer.queued_bytes == 5
    syncs = disk.syncs
    disk.gate.set()
    assert [done.ticket for done in wait_for(writer, 1)] == [-1]
    assert disk.syncs == syncs + 1
    assert writer.queued_bytes == 0


def test_what_waits_together_is_one_append(start, disk):
    """One write and one sync for all posts that came while the disk was busy."""
    writer, _ = start()
    hold(writer, disk)
    for ticket in range(50):
        writer.post(ticket, whole([b"x" * 10]))
    assert writer.queued_bytes == 505
    syncs = disk.syncs
    disk.gate.set()
    assert [done.ticket for done in wait_for(writer, 51)] == list(range(-1, 50))
    assert disk.syncs == syncs + 2
    assert disk.writes == [5 + HEAD_BYTES, 50 * (10 + HEAD_BYTES)]
    assert (writer.num_groups, writer.num_entries, writer.queued_bytes) == (2, 51, 0)


@pytest.mark.parametrize(("options", "groups"), [
    ({"max_group_entries": 4}, [4, 4, 2]),
    ({"max_group_bytes": 35}, [3, 3, 3, 1]),
    ({"max_group_bytes": 5}, [1] * 10),
])  # fmt: skip
def test_a_group_keeps_its_limits(start, disk, options, groups):
    """Of bytes and entries; a post that exceeds them goes alone."""
    writer, _ = start(**options)
    hold(writer, disk)
    for ticket in range(10):
        writer.post(ticket, whole([b"x" * 10]))
    disk.gate.set()
    wait_for(writer, 11)
    assert disk.writes[1:] == [number * (10 + HEAD_BYTES) for number in groups]


def test_rolls_and_releases_keep_their_place_among_the_posts(start, disk, tmp_path):
    """What was posted before a roll is in the old segment, what came after it in the new one."""
    writer, log = start()
    hold(writer, disk)
    writer.post(1, whole([b"old"]))
    writer.roll(b"snapshot")
    writer.post(2, whole([b"new"]))
    assert writer.is_rolling
    disk.gate.set()
    _, old, new = wait_for(writer, 3)
    assert not writer.is_rolling
    assert old.offsets[0] < log.second_offset < new.offsets[0]
    border = log.second_offset
    hold(writer, disk)
    writer.release(border)
    writer.post(3, whole([b"last"]))
    assert log.first_offset == 0
    disk.gate.set()
    wait_for(writer, 2)
    assert log.first_offset == border
    writer.close(PATIENCE_S)
    log.close()
    assert replayed(tmp_path) == [b"new", b"first", b"last"]


def test_a_roll_wakes_the_loop(start):
    """So that it may release what is old now."""
    writer, log = start()
    writer.roll(b"")
    assert wakes(writer)
    assert writer.finished() == []
    assert not writer.is_rolling
    assert log.second_offset > 0


def test_a_full_disk_is_reported_and_the_next_post_goes_on(start, tmp_path):
    """Nothing of the refused posts remains; a roll without room is counted."""
    writer, log = start(max_bytes=3000)
    writer.post(1, whole([b"fits", bytes(3000)]))
    assert wait_for(writer, 1) == [Finished(1, [], "disk_full")]
    assert writer.queued_bytes == 0
    writer.roll(bytes(3000))
    assert wakes(writer)
    assert (writer.is_rolling, writer.refused_rolls, log.second_offset) == (False, 1, 0)
    writer.post(3, whole([b"fits too"]))
    (done,) = wait_for(writer, 1)
    assert (done.ticket, done.failure) == (3, "")
    assert writer.failure == ""


def test_the_reserve_is_open_to_those_who_ask_for_it(start, disk):
    """Even when they wait side by side with others."""
    writer, _ = start(max_bytes=3000)
    hold(writer, disk)
    writer.post(1, whole([bytes(1900)]))
    writer.post(2, whole([bytes(500)]))
    writer.post(3, whole([bytes(500)]), into_reserve=True)
    writer.post(4, whole([bytes(10)]))
    disk.gate.set()
    failures = {done.ticket: done.failure for done in wait_for(writer, 5)}
    assert failures == {-1: "", 1: "", 2: "disk_full", 3: "", 4: "disk_full"}


def test_nobody_is_refused_for_what_others_posted(start, disk):
    """Of a group that does not fit as a whole everything is taken that fits, in order."""
    writer, _ = start(max_bytes=3000)
    hold(writer, disk)
    sizes = [100, 5000, 200, 300, 1000, 900, 5]
    for ticket, size in enumerate(sizes):
        writer.post(ticket, whole([bytes(size)]))
    disk.gate.set()
    done = wait_for(writer, 8)[1:]
    assert [one.ticket for one in done] == list(range(7))
    assert [sizes[one.ticket] for one in done if one.failure] == [5000, 900]
    assert writer.queued_bytes == 0


@pytest.mark.parametrize("act", [
    lambda writer: writer.post(2, whole([b"x"])), lambda writer: writer.roll(b""), lambda writer: writer.release(0),
])  # fmt: skip
def test_a_broken_disk_ends_the_thread_and_reports_nothing_more(start, disk, act):
    """The loop is woken, reads why, and cannot go on by mistake."""
    writer, _ = start()
    hold(writer, disk)
    writer.post(1, whole([b"behind"]))
    disk.error = errno.EIO
    disk.gate.set()
    assert wakes(writer)
    assert writer.finished() == []
    assert writer.failure == "the disk failed: Input/output error"
    with pytest.raises(DiskBroken, match="Input/output error"):
        act(writer)
    assert writer.close(PATIENCE_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_the_program_does_not_end_the_thread_in_silence(start):
    """The traceback is printed, the loop is woken, and nothing is taken any more."""
    writer, _ = start()
    writer.post(1, whole([bytes(MAX_PAYLOAD_BYTES + 1)]))
    assert wakes(writer)
    assert writer.finished() == []
    assert writer.failure == "the log's thread ended on an error of its own"
    with pytest.raises(DiskBroken, match="error of its own"):
        writer.post(2, whole([b"x"]))


def test_closing_writes_what_is_queued(start, disk, tmp_path):
    """And what finished then can still be asked for; closing twice is closing once."""
    writer, log = start()
    hold(writer, disk)
    writer.post(1, whole([b"second"]))
    writer.roll(b"snapshot")
    disk.gate.set()
    assert writer.close(PATIENCE_S)
    assert writer.close(PATIENCE_S)
    assert [done.ticket for done in writer.finished()] == [-1, 1]
    assert writer.failure == ""
    with pytest.raises(DiskBroken, match="closed"):
        writer.post(2, whole([b"x"]))
    log.close()
    assert replayed(tmp_path) == [b"first", b"second"]


def test_closing_does_not_wait_for_ever(start, disk):
    """A disk that hangs is said to hang; when it is back, closing succeeds."""
    writer, _ = start()
    hold(writer, disk)
    assert not writer.close(0.01)
    disk.gate.set()
    assert writer.close(PATIENCE_S)


CHILD = textwrap.dedent("""
    import itertools, select, sys
    from pathlib import Path
    from mrl.exchange.log.segments import SegmentLog
    from mrl.exchange.log.writer import LogWriter

    folder, durability, next_ticket = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    log = SegmentLog(folder, max_bytes=1 << 30, segment_bytes=20_000, durability=durability)
    for _ in log.replay():
        pass
    writer = LogWriter(log, max_group_bytes=10_000)
    tickets = itertools.count(next_ticket)
    while True:
        while writer.queued_bytes < 30_000:
            ticket = next(tickets)
            payloads = [[b"%d.%d " % (ticket, part), bytes(ticket % 700)] for part in range(ticket % 3 + 1)]
            writer.post(ticket, payloads)
        select.select([writer.wake_fd], [], [], 10)
        done = writer.finished()
        sys.stdout.write("".join(f"{one.ticket}:{','.join(map(str, one.offsets))}\\n" for one in done))
        sys.stdout.flush()
        if log.wants_roll and not writer.is_rolling:
            writer.roll(b"snapshot")
            writer.release(log.end_offset - 200_000)
""")


@pytest.mark.system
@pytest.mark.parametrize("durability", ["synced", "written"])
def test_nothing_acknowledged_is_missing_after_a_kill(tmp_path, durability):
    """Ten times at random points of one log's life: every ticket that was printed is there once, at its offsets.

    But for those that were released; files are written over all the time.
    """
    draw = random.Random(durability)
    acknowledged: dict[int, list[int]] = {}
    next_ticket = 0
    for _ in range(10):
        arguments = [sys.executable, "-c", CHILD, str(tmp_path), durability, str(next_ticket)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as child:
            for _ in range(draw.randrange(1, 200)):
                note(acknowledged, child.stdout.readline())
            child.send_signal(signal.SIGKILL)
            for line in child.stdout:
                note(acknowledged, line)
        next_ticket = check_killed_log(tmp_path, acknowledged)
    assert len(acknowledged) > 200
    oldest = min(int(path.name[:20]) for path in tmp_path.glob("*.segment"))
    assert oldest > 200_000


def note(acknowledged, line):
    """One whole line of a child; the last one may be torn."""
    if line.endswith("\n"):
        ticket, _, offsets = line.partition(":")
        acknowledged[int(ticket)] = [int(offset) for offset in offsets.split(",")]


def check_killed_log(folder, acknowledged) -> int:
    """Compare; returns a ticket that no entry has."""
    log = SegmentLog(folder, max_bytes=1 << 30, durability="synced")
    entries = list(log.replay())
    first_offset = log.first_offset
    log.close()
    at = dict(entries)
    assert len(at) == len(entries) == len(set(at.values()))
    assert log.damaged == 0
    for ticket, offsets in acknowledged.items():
        expected = [b"%d.%d " % (ticket, part) + bytes(ticket % 700) for part in range(ticket % 3 + 1)]
        assert [at.get(offset) for offset in offsets] == expected or offsets[0] < first_offset
    return 1 + max((int(payload.split(b".")[0]) for _, payload in entries), default=0)
