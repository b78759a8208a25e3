"""Disks that fail, forget or write in part, and the log on them."""

import os
from pathlib import Path

from mrl.exchange.log.disk import Disk
from mrl.exchange.log.segments import SegmentLog


class Crash(BaseException):
    """The process is gone."""


class SwiftDisk(Disk):
    """Does not wait for the hardware: what a power cut would leave, `ForgetfulDisk` knows."""

    def fdatasync(self, file):
        pass

    def sync_folder(self, folder):
        pass


class FaultyDisk(SwiftDisk):
    """Counts its calls; `before` and `after` are told each one's number and name, and may raise."""

    def __init__(self, before=None, after=None):
        self.calls: list[tuple[str, str]] = []
        self._before, self._after = before or (lambda number, name: None), after or (lambda number, name: None)

    def _call(self, name, *args):
        self.calls.append((name, path_of(args[0])))
        self._before(len(self.calls), name)
        result = getattr(SwiftDisk, name)(self, *args)
        self._after(len(self.calls), name)
        return result

    def open(self, path, flags):
        return self._call("open", path, flags)

    def pwritev(self, file, buffers, position):
        return self._call("pwritev", file, buffers, position)

    def fdatasync(self, file):
        return self._call("fdatasync", file)

    def ftruncate(self, file, length):
        return self._call("ftruncate", file, length)

    def rename(self, source, target):
        return self._call("rename", source, target)

    def unlink(self, path):
        return self._call("unlink", path)

    def sync_folder(self, folder):
        return self._call("sync_folder", folder)


class ForgetfulDisk(FaultyDisk):
    """Remembers what a host that loses power would still have: synced content under synced names."""

    def __init__(self, folder, **faults):
        super().__init__(**faults)
        self._folder = folder
        self._content: dict[int, bytes] = {}
        self._names: dict[str, int] = {}

    def fdatasync(self, file):
        super().fdatasync(file)
        size = os.fstat(file).st_size
        self._content[os.fstat(file).st_ino] = os.pread(file, size, 0)

    def sync_folder(self, folder):
        super().sync_folder(folder)
        self._names = {path.name: path.stat().st_ino for path in folder.glob("*.segment")}

    def lose_power(self):
        """Leave in the folder what would be there."""
        for path in self._folder.glob("*segment*"):
            path.unlink()
        for name, inode in self._names.items():
            (self._folder / name).write_bytes(self._content.get(inode, b""))


def path_of(what) -> str:
    """The name behind a path or a descriptor."""
    return Path(os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else what).name


def open_log(folder, **options) -> SegmentLog:
    """A log with tiny segments, not yet replayed."""
    defaults = {"max_bytes": 1 << 20, "segment_bytes": 1000, "durability": "written", "disk": SwiftDisk()}
    return SegmentLog(folder, **{**defaults, **options})


class Torn(SwiftDisk):
    """Ends the process once `left` bytes of a write are there."""

    left = 1 << 60

    def pwritev(self, file, buffers, position):
        data = b"".join(buffers)
        os.pwrite(file, data[: self.left], position)
        if self.left < len(data):
            raise Crash
        return len(data)


def on_disk(folder) -> int:
    """Length of all files of a log."""
    return sum(path.stat().st_size for path in folder.glob("*segment*"))


def kill(log):
    """What the death of the process does: descriptors are closed, nothing is flushed."""
    for file in (log._file, log._lock):
        if file >= 0:
            os.close(file)
    log._file = log._lock = -1


def failing(name, code, *, at=1):
    """Fails the call of this name that is the `at`th since."""
    seen = [0]

    def before(number, called):
        if called == name:
            seen[0] += 1
            if seen[0] == at:
                raise OSError(code, os.strerror(code))

    return before


class Half(FaultyDisk):
    """Writes half of what it is given and then has the error `code`, for as long as there is one."""

    code = 0

    def pwritev(self, file, buffers, position):
        if not self.code:
            return super().pwritev(file, buffers, position)
        data = b"".join(buffers)
        if len(data) < 20:
            raise OSError(self.code, os.strerror(self.code))
        return os.pwrite(file, data[: len(data) // 2], position)
