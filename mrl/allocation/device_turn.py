"""Turns on devices that processes of one host share: a queue, whose first member for a device has it alone.

A place in the queue is a file that its owner keeps locked. The kernel drops the lock when the process ends, however it
ends, and the next process that looks removes the file. So a turn is a lease without an expiry: nobody has to renew it,
and a process that is only slow never loses it. A process that comes later has a higher number. Numbers are given under
a lock of the queue, so that all members see one order, of several devices too: no two of them wait for each other.
"""

import fcntl
import os
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from mrl.config.locks import try_lock

MAX_PLACE_BYTES = 1 << 20
"""Bytes that are read of a place's file at most."""
DIGITS = 18
"""Digits of every number in the folder, so that names sort as numbers do."""
QUEUE = "queue"
"""File with the last number, whose lock gives the next one. No number comes twice: a process that removes the place of
a dead process would else remove that of a living one."""
ARRIVING = ".arriving-"
"""Beginning of a place's file name before the place has its number."""
TELL_S = 1.0
"""Seconds between two signs of life in `getting_on`."""


class Ahead(NamedTuple):
    """A process that has a device, or is before this process in its queue."""

    holder: str
    """Name of that process's role; empty while another process is entering the queue."""
    progress: int
    """Number that changes whenever that process gets on."""


class DeviceTurn:
    """The turns of one process on its `devices`. Not thread-safe, but for `note_progress`."""

    def __init__(self, folder: Path, role: str, devices: Collection[str]) -> None:
        """All processes that share a device name the same `folder`, which lies on this host."""
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder, self._role, self._devices = folder, role, frozenset(devices)
        self._place: Path | None = None
        self._file = -1
        self._progress = 0
        self._telling = threading.Lock()
        self.is_held = False
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def ask(self) -> Ahead | None:
        """Enter the queue, if not done yet. Return the process ahead, or None when it is this process's turn.

        Never waits.
        """
        if self._place is None and not self._enter():
            return Ahead("", 0)
        before = None if self.is_held else next(self._others(before=True), None)
        self.is_held = before is None
        return before

    def is_awaited(self) -> bool:
        """Whether a process waits behind this one."""
        return self._place is not None and next(self._others(before=False), None) is not None

    def note_progress(self) -> None:
        """Show to waiting processes that this one does not stand still. May be called from any thread."""
        with self._telling:  # a descriptor that is given back meanwhile may be another file's by then
            self._progress += 1
            if self._file >= 0:
                os.pwrite(self._file, _number(self._progress), 0)

    @contextmanager
    def getting_on(self) -> Iterator[None]:
        """Call `note_progress` all the time, during work that shows nothing before its end and has its own bound."""
        ended = threading.Event()

        def tell() -> None:
            while not ended.wait(TELL_S):
                self.note_progress()

        telling = threading.Thread(target=tell, name="getting on", daemon=True)
        telling.start()
        try:
            yield
        finally:
            ended.set()
            telling.join()

    def give_back(self) -> None:
        """Leave the queue, with or without the turn."""
        if self._place is None:
            return
        with self._telling:
            file, self._file, self.is_held = self._file, -1, False
            self._place.unlink(missing_ok=True)
            self._place = None
            os.close(file)

    def _leave_to_parent(self) -> None:
        """Close the place's file in a fork, which would else keep the lock beyond the death of its parent."""
        self._telling = threading.Lock()  # the old lock may be held by a thread that is not in the fork
        file, self._file, self._place, self.is_held = self._file, -1, None, False
        if file >= 0:
            os.close(file)

    def _enter(self) -> bool:
        """Take a place with the next number; False while another process takes one."""
        queue = os.open(self._folder / QUEUE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not try_lock(queue, self._folder):
                return False
            arriving = self._folder / f"{ARRIVING}{os.getpid()}-{id(self)}"
            file = os.open(arriving, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            fcntl.flock(file, fcntl.LOCK_EX)  # nobody else knows its name
            words = [_number(self._progress).decode(), self._role, *sorted(self._devices)]
            os.pwrite(file, "\n".join(words).encode(), 0)
            number = _number(int(os.pread(queue, DIGITS, 0) or 0) + 1)
            os.pwrite(queue, number, 0)
            place = self._folder / number.decode()
            arriving.rename(place)
            self._place, self._file = place, file
            return True
        finally:
            os.close(queue)

    def _others(self, *, before: bool) -> Iterator[Ahead]:
        """Yield the processes before this one, or behind it, for any of its devices; remove places of dead ones."""
        assert self._place is not None
        own = self._place.name
        for name in sorted(filter(str.isdigit, os.listdir(self._folder))):
            if (name < own) if before else (name > own):
                with suppress(FileNotFoundError), (self._folder / name).open("rb") as place:
                    if try_lock(place.fileno(), self._folder, is_shared=True):
                        (self._folder / name).unlink()
                        continue
                    progress, role, *devices = place.read(MAX_PLACE_BYTES).decode().split("\n")
                    if self._devices.intersection(devices):
                        yield Ahead(role, int(progress))


def _number(value: int) -> bytes:
    return f"{value:0{DIGITS}}".encode()
