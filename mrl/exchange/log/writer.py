"""The thread that writes the log, so that the daemon's loop never waits for the disk.

Group commit: whatever was posted while the disk was busy is one append, with one wait for the disk for all of it.
"""

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from mrl.errors import DiskBroken, DiskFull
from mrl.exchange.log.segments import Payload, SegmentLog

MAX_GROUP_BYTES = 8 * 1024 * 1024
MAX_GROUP_ENTRIES = 4096


class Finished(NamedTuple):
    """What became of one post."""

    ticket: int
    offsets: list[int]
    """Where its entries stand; empty when it failed."""
    failure: str
    """"" or "disk_full": nothing of it is in the log, and it may be posted again."""


@dataclass(frozen=True, slots=True)
class _Post:
    ticket: int
    payloads: Sequence[Payload]
    into_reserve: bool
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Roll:
    snapshot: bytes


@dataclass(frozen=True, slots=True)
class _Release:
    before_offset: int


class LogWriter:
    """Owns a replayed log between start and `close`. Every method is for one thread, that of the loop."""

    def __init__(
        self,
        log: SegmentLog,
        *,
        max_group_bytes: int = MAX_GROUP_BYTES,
        max_group_entries: int = MAX_GROUP_ENTRIES,
    ) -> None:
        """A group holds at most so many bytes and entries, and at least one post."""
        self.num_groups = 0
        """Appends so far; with `num_entries` the mean length of a group."""
        self.num_entries = 0
        """Entries of these appends."""
        self.refused_rolls = 0
        """Rolls for which there was no room; the old segment went on."""
        self.failure = ""
        """Why the thread has ended though nobody closed it. What was not reported as finished is in doubt then."""
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when `finished` has something to tell, or `failure` is set."""
        self._log, self._max_group_bytes, self._max_group_entries = log, max_group_bytes, max_group_entries
        self._changed = threading.Condition()
        self._queue: deque[_Post | _Roll | _Release] = deque()
        self._finished: deque[Finished] = deque()
        self._queued_bytes = 0
        self._num_rolls = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="log writer", daemon=True)
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        """Length of the payloads that were posted and are not yet in the log."""
        return self._queued_bytes

    @property
    def is_rolling(self) -> bool:
        """Whether a roll was asked for and is not done yet."""
        return self._num_rolls > 0

    def post(self, ticket: int, payloads: Sequence[Payload], *, into_reserve: bool = False) -> None:
        """Queue entries, each in parts, that are written together or not at all; `finished` tells how that ended.

        Raises DiskBroken when the thread has ended.
        """
        post = _Post(ticket, payloads, into_reserve, sum(len(part) for payload in payloads for part in payload))
        with self._changed:
            self._enqueue(post)
            self._queued_bytes += post.num_bytes

    def roll(self, snapshot: bytes) -> None:
        """Begin a new segment between what was posted before and what is posted after. Raises DiskBroken as `post`."""
        with self._changed:
            self._enqueue(_Roll(snapshot))
            self._num_rolls += 1

    def release(self, before_offset: int) -> None:
        """Delete old segments after what was posted before is written. Raises DiskBroken as `post`."""
        with self._changed:
            self._enqueue(_Release(before_offset))

    def finished(self) -> list[Finished]:
        """What has finished since the last call, in the order of posting."""
        if self.wake_fd >= 0:
            try:
                os.eventfd_read(self.wake_fd)
            except BlockingIOError:
                return []
        with self._changed:
            done = list(self._finished)
            self._finished.clear()
        return done

    def close(self, timeout_s: float) -> bool:
        """Write what is queued and end the thread; False when that took longer, and the log must not be closed then.

        What finished meanwhile can still be asked for.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if self.wake_fd >= 0:
            os.close(self.wake_fd)
            self.wake_fd = -1
        return True

    def _enqueue(self, item: _Post | _Roll | _Release) -> None:
        if self.failure or self._is_closing:
            raise DiskBroken(self.failure or "the log is closed")
        self._queue.append(item)
        self._changed.notify()

    def _run(self) -> None:
        failure = "the log's thread ended on an error of its own"
        try:
            while task := self._next_task():
                self._carry_out(task)
            failure = ""
        except DiskBroken as error:
            failure = f"the disk failed: {error}"
        finally:
            with self._changed:
                self.failure = failure
            os.eventfd_write(self.wake_fd, 1)

    def _next_task(self) -> list[_Post] | _Roll | _Release | None:
        """What comes next in the queue, several posts as one; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closing)
            if not self._queue:
                return None
            first = self._queue.popleft()
            return [first, *self._taken_with(first)] if isinstance(first, _Post) else first

    def _taken_with(self, first: _Post) -> Iterator[_Post]:
        num_bytes, num_entries = first.num_bytes, len(first.payloads)
        while self._queue and isinstance(post := self._queue[0], _Post) and post.into_reserve == first.into_reserve:
            num_bytes, num_entries = num_bytes + post.num_bytes, num_entries + len(post.payloads)
            if num_bytes > self._max_group_bytes or num_entries > self._max_group_entries:
                return
            self._queue.popleft()
            yield post

    def _carry_out(self, task: list[_Post] | _Roll | _Release) -> None:
        match task:
            case _Roll():
                self._roll(task.snapshot)
            case _Release():
                self._log.release(task.before_offset)
            case _:
                self._append(task)

    def _roll(self, snapshot: bytes) -> None:
        try:
            self._log.roll(snapshot)
        except DiskFull:
            self.refused_rolls += 1
        with self._changed:
            self._num_rolls -= 1
        os.eventfd_write(self.wake_fd, 1)

    def _append(self, group: list[_Post]) -> None:
        payloads = [payload for post in group for payload in post.payloads]
        try:
            offsets = self._log.append(payloads, into_reserve=group[0].into_reserve)
        except DiskFull:
            self._append_less(group)
            return
        self.num_groups += 1
        self.num_entries += len(payloads)
        rest = iter(offsets)
        self._report([Finished(post.ticket, list(islice(rest, len(post.payloads))), "") for post in group], group)

    def _append_less(self, group: list[_Post]) -> None:
        """What does not fit together may fit in part, so that nobody is refused for what others posted."""
        if len(group) == 1:
            self._report([Finished(group[0].ticket, [], "disk_full")], group)
            return
        middle = len(group) // 2
        self._append(group[:middle])
        self._append(group[middle:])

    def _report(self, finished: list[Finished], group: list[_Post]) -> None:
        with self._changed:
            self._queued_bytes -= sum(post.num_bytes for post in group)
            self._finished += finished
        os.eventfd_write(self.wake_fd, 1)
