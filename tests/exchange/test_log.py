"""The append log: what was written is there again, whatever happened to the end of the file."""

import errno
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.errors import RunFolderError
from mrl.exchange.log import HEADER, MIN_COMPACT_BYTES, ExchangeLog

PAYLOADS = [b"one", b"two" * 1000, b"\0", b"four"]


@pytest.fixture
def reopen(tmp_path):
    """Opens the log of one folder and replays it; what was open before is closed."""
    opened = []

    def open_again(**options):
        close(opened)
        log = ExchangeLog(tmp_path / "exchange", **options)
        opened.append(log)
        return log, list(log.replay())

    yield open_again
    close(opened)


def close(opened):
    """Close and forget."""
    while opened:
        opened.pop().close()


def test_what_was_written_is_replayed_in_order(reopen):
    """Also what a second daemon appended."""
    log, payloads = reopen()
    assert payloads == []
    assert log.append(PAYLOADS) == ""
    log, payloads = reopen()
    assert payloads == PAYLOADS
    assert log.append([b"five"]) == ""
    assert reopen()[1] == [*PAYLOADS, b"five"]


def test_a_torn_tail_is_cut_at_every_length(reopen, tmp_path):
    """Wherever the last write was interrupted, all frames before it are there, and appending goes on."""
    file = tmp_path / "exchange/log"
    log, _ = reopen()
    log.append(PAYLOADS[:2])
    good = log.size_bytes
    log.append([b"interrupted"])
    whole = file.read_bytes()
    for end in range(good, len(whole)):
        file.write_bytes(whole[:end])
        log, payloads = reopen()
        assert (payloads, log.cut_bytes, log.size_bytes) == (PAYLOADS[:2], end - good, good)
        assert file.stat().st_size == good
        assert log.append([b"after"]) == ""
        assert reopen()[1] == [*PAYLOADS[:2], b"after"]


@pytest.mark.parametrize("tail", [bytes(1000), b"\xff" * 1000, os.urandom(1000)])
def test_a_tail_of_garbage_is_cut(reopen, tmp_path, tail):
    """Zeros, as some file systems leave them, are no frames either."""
    log, _ = reopen()
    log.append(PAYLOADS)
    with (tmp_path / "exchange/log").open("ab") as file:
        file.write(tail)
    log, payloads = reopen()
    assert (payloads, log.cut_bytes) == (PAYLOADS, 1000)


def test_a_damaged_frame_in_the_middle_is_skipped_and_counted(reopen, tmp_path):
    """A flipped bit costs one entry, not everything behind it."""
    log, _ = reopen()
    log.append(PAYLOADS)
    file = tmp_path / "exchange/log"
    content = bytearray(file.read_bytes())
    content[content.index(b"twotwo")] ^= 1
    file.write_bytes(content)
    log, payloads = reopen()
    assert (payloads, log.damaged, log.cut_bytes) == ([b"one", b"\0", b"four"], 1, 0)


@settings(max_examples=50, deadline=None)
@given(payloads=st.lists(st.binary(min_size=1, max_size=100), max_size=8), at=st.integers(0), bit=st.integers(0, 7))
def test_a_flipped_bit_never_invents_an_entry(tmp_path_factory, payloads, at, bit):
    """What is replayed is a part of what was written, in order."""
    folder = tmp_path_factory.mktemp("log")
    log = ExchangeLog(folder)
    list(log.replay())
    log.append(payloads)
    log.close()
    content = bytearray((folder / "log").read_bytes())
    if len(content) > len(HEADER):
        content[len(HEADER) + at % (len(content) - len(HEADER))] ^= 1 << bit
    (folder / "log").write_bytes(content)
    log = ExchangeLog(folder)
    rest = iter(payloads)
    assert all(payload in rest for payload in log.replay())
    log.close()


def test_entries_across_block_borders_are_replayed(reopen):
    """The reader's block is 4 MiB; frames that straddle its end come out whole."""
    log, _ = reopen()
    payloads = [bytes([number]) * 1_500_000 for number in range(1, 8)]
    log.append(payloads)
    assert reopen()[1] == payloads


@pytest.mark.parametrize(
    ("code", "reason"), [(errno.ENOSPC, "disk_full"), (errno.EDQUOT, "disk_full"), (errno.EIO, "disk_error")]
)
def test_a_failed_write_is_refused_and_leaves_no_trace(reopen, tmp_path, code, reason):
    """Half a batch on a full disk is taken back; when there is room again, the log goes on."""
    log, _ = reopen()
    log.append([b"before"])
    is_full = [True]

    def write_at(file, data, position):
        if not is_full[0]:
            return os.pwrite(file, data, position)
        if len(data) < 40:
            raise OSError(code, os.strerror(code))
        return os.pwrite(file, data[: len(data) - 20], position)

    log, _ = reopen(write_at=write_at)
    size = log.size_bytes
    assert log.append([b"x" * 30, b"y" * 30]) == reason
    assert (tmp_path / "exchange/log").stat().st_size == log.size_bytes == size
    is_full[0] = False
    assert log.append([b"after"]) == ""
    assert reopen()[1] == [b"before", b"after"]


def test_short_writes_are_completed(reopen):
    """The kernel may take a batch in pieces."""
    log, _ = reopen(write_at=lambda file, data, position: os.pwrite(file, data[:7], position))
    assert log.append(PAYLOADS) == ""
    assert reopen()[1] == PAYLOADS


def test_compaction_keeps_exactly_the_live_entries(reopen, tmp_path):
    """The log shrinks to what it is given, and goes on from there."""
    log, _ = reopen()
    log.append([bytes(1000)] * 3000)
    assert log.is_wasteful(900_000)
    assert not log.is_wasteful(1_500_000)
    assert log.compact(iter([b"alive", b"and well"]))
    assert log.append([b"new"]) == ""
    log, payloads = reopen()
    assert payloads == [b"alive", b"and well", b"new"]
    assert log.size_bytes == (tmp_path / "exchange/log").stat().st_size < 100
    assert sorted(path.name for path in (tmp_path / "exchange").iterdir()) == ["lock", "log"]


def test_a_small_log_is_never_wasteful(reopen):
    """Below a mebibyte compaction is not worth it."""
    log, _ = reopen()
    log.append([bytes(1000)] * (MIN_COMPACT_BYTES // 1100))
    assert not log.is_wasteful(0)


def test_a_failed_compaction_changes_nothing(reopen, tmp_path):
    """A full disk leaves the old log in place, and no half-written file."""
    log, _ = reopen()
    log.append(PAYLOADS)

    def write_at(file, data, position):
        raise OSError(errno.ENOSPC, "full")

    log, _ = reopen(write_at=write_at)
    assert log.compact([b"alive"]) is False
    assert sorted(path.name for path in (tmp_path / "exchange").iterdir()) == ["lock", "log"]
    assert reopen()[1] == PAYLOADS


def test_two_daemons_cannot_share_a_folder(reopen, tmp_path):
    """The second is told in one line."""
    reopen()
    with pytest.raises(RunFolderError, match="another exchange daemon"):
        ExchangeLog(tmp_path / "exchange")


def test_a_foreign_file_is_left_alone(tmp_path):
    """A log of another format is neither read nor overwritten."""
    (tmp_path / "log").write_bytes(b"something else entirely")
    with pytest.raises(RunFolderError, match="not a log"):
        ExchangeLog(tmp_path)
    assert (tmp_path / "log").read_bytes() == b"something else entirely"
