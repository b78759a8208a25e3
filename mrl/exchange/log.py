"""The append log of the daemon: what it accepted, in order, so that a killed daemon finds it again.

One file, `<folder>/log`: a header, then frames of (length, crc32 of length and payload, payload). A frame counts as
written when `write` has returned, which survives the death of the process but not of the host. A torn tail is cut at
the next start. The folder belongs to one daemon at a time.
"""

import contextlib
import errno
import fcntl
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from mrl.errors import RunFolderError
from mrl.records.codec import MAX_MESSAGE_BYTES

HEADER = b"mrl exchange log 1\n"
MIN_COMPACT_BYTES = 1024 * 1024
READ_BYTES = 4 * 1024 * 1024

_LENGTH = struct.Struct("<I")
_FRAME = struct.Struct("<II")
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

WriteAt = Callable[[int, bytes, int], int]


class ExchangeLog:
    """The log file, opened for appending; `replay` must be read to its end before the first append."""

    def __init__(self, folder: Path, *, write_at: WriteAt = os.pwrite, compact_factor: float = 2.0) -> None:
        """Raises RunFolderError when the folder cannot be used or another daemon uses it."""
        self.cut_bytes = 0
        """Length of the torn tail that the replay cut off."""
        self.damaged = 0
        """Frames inside the log that failed their checksum and were skipped."""
        self._path, self._write_at, self._compact_factor = folder / "log", write_at, compact_factor
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(folder / "lock")
            self._file = self._open()
        except OSError as error:
            raise RunFolderError(f"cannot use the exchange's log ({error.strerror})", where=str(folder)) from error
        self._end = os.fstat(self._file).st_size

    @property
    def size_bytes(self) -> int:
        """Length of the log."""
        return self._end

    def replay(self) -> Iterator[bytes]:
        """The payloads in the order of writing; afterwards the file ends at its last good frame."""
        data = _Reader(self._file)
        position, size = len(HEADER), self._end
        while position < size:
            payload, next_position = data.frame_at(position)
            if payload is not None:
                yield payload
            elif next_position is not None and data.frame_at(next_position)[0] is not None:
                self.damaged += 1
            else:
                break
            position = next_position or size
        self.cut_bytes = size - position
        self._end = position
        os.ftruncate(self._file, position)

    def append(self, payloads: Sequence[bytes]) -> str:
        """Write all payloads or none; "" when done, otherwise "disk_full" or "disk_error"."""
        try:
            self._write(self._file, b"".join(map(_framed, payloads)), self._end)
        except OSError as error:
            self._cut_rest()
            return "disk_full" if error.errno in _NO_ROOM else "disk_error"
        self._end += sum(_FRAME.size + len(payload) for payload in payloads)
        return ""

    def is_wasteful(self, live_bytes: int) -> bool:
        """Whether the log has grown beyond about twice what is still alive in it."""
        return self._end > self._compact_factor * live_bytes + MIN_COMPACT_BYTES

    def compact(self, payloads: Iterable[bytes]) -> bool:
        """Replace the log by one that holds only these payloads; False when the disk does not let it."""
        temporary = self._path.with_name("log.new")
        try:
            file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                end = self._write_all(file, payloads)
                os.fsync(file)
                temporary.replace(self._path)
            except OSError:
                os.close(file)
                raise
        except OSError:
            temporary.unlink(missing_ok=True)
            return False
        os.close(self._file)
        self._file, self._end = file, end
        _sync_folder(self._path.parent)
        return True

    def close(self) -> None:
        """Flush to the disk and let another daemon have the folder."""
        os.fsync(self._file)
        os.close(self._file)
        os.close(self._lock)

    def _cut_rest(self) -> None:
        """Remove what a failed append left; if that fails too, the next append overwrites it."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, self._end)

    def _open(self) -> int:
        if not self._path.exists():
            temporary = self._path.with_name("log.new")
            temporary.write_bytes(HEADER)
            temporary.replace(self._path)
        file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        if os.pread(file, len(HEADER), 0) != HEADER:
            os.close(file)
            cure = "move the file away; the exchange starts empty then"
            raise RunFolderError("not a log of this version of the exchange", where=str(self._path), cure=cure)
        return file

    def _write_all(self, file: int, payloads: Iterable[bytes]) -> int:
        """Header and payloads into a fresh file; returns its length."""
        position, pending = 0, bytearray(HEADER)
        for payload in payloads:
            pending += _framed(payload)
            if len(pending) >= READ_BYTES:
                self._write(file, bytes(pending), position)
                position, pending = position + len(pending), bytearray()
        self._write(file, bytes(pending), position)
        return position + len(pending)

    def _write(self, file: int, data: bytes, position: int) -> None:
        written = 0
        while written < len(data):
            written += self._write_at(file, data[written:] if written else data, position + written)


class _Reader:
    """Frames of a file by position, through one block of it at a time."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._start, self._block = 0, b""

    def frame_at(self, position: int) -> tuple[bytes | None, int | None]:
        """(payload, position after it); no payload when the checksum fails, neither without a whole frame."""
        head = self._bytes(position, _FRAME.size)
        if len(head) < _FRAME.size:
            return None, None
        length, crc = _FRAME.unpack(head)
        after = position + _FRAME.size + length
        payload = self._bytes(position + _FRAME.size, length) if 0 < length <= MAX_MESSAGE_BYTES else b""
        if not payload or len(payload) < length:
            return None, None
        return (payload if _checksum(payload) == crc else None), after

    def _bytes(self, position: int, length: int) -> bytes:
        if not self._start <= position <= position + length <= self._start + len(self._block):
            self._start, self._block = position, os.pread(self._file, max(length, READ_BYTES), position)
        offset = position - self._start
        return self._block[offset : offset + length]


def _checksum(payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_LENGTH.pack(len(payload))))


def _framed(payload: bytes) -> bytes:
    return _FRAME.pack(len(payload), _checksum(payload)) + payload


def _lock(path: Path) -> int:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        cure = "end the other exchange daemon of this run first"
        raise RunFolderError("another exchange daemon uses this folder", where=str(path.parent), cure=cure) from error
    return lock


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
