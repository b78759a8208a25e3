"""Watch of a learner's ranks: whether they still go on together, and which rank is awaited when they do not.

Every rank notes its activity in a file that all ranks map. All note the same activities in the same order, so that the
rank with the least count is the one that the others wait for. A thread of each rank reads the file. That costs no
collective and no message, and finds a rank that was stopped or killed, too. When a rank has been at one activity for
longer than its bound, all ranks are asked for their stacks (SIGUSR1), the reason is logged, and the rank ends; torchrun
then ends the others, and the supervisor starts the learner again from its checkpoint.
"""

import mmap
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

POLL_S = 1.0
STANDSTILL_S = 5.0
"""Seconds that a watch did not run after which it forgives all ranks: the whole learner, or its host, stood still."""
STACKS_S = 1.0
"""Seconds for all ranks to write their stacks."""
SLOW = frozenset({"starting", "forming a batch", "receiving the step", "publishing", "saving a checkpoint"})
"""Activities that may last as long as the first rank may wait for other roles, or takes to write a large model."""
_SLOT = struct.Struct("<QdI36s")
_ALIVE = struct.Struct("<d")
_BYTES = _SLOT.size + _ALIVE.size

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RankActivity:
    """Activity of one rank: its `count`-th, since a time of the monotonic clock. Count 0: it has yet to begin."""

    count: int
    since_s: float
    pid: int
    what: str
    alive_s: float
    """When the rank's watch last looked; long ago for a process that was stopped."""
    host: str = ""
    """Host of the rank, where the ranks live on several. The `pid` of a process of another host is 0 here."""


class ActivityBoard(Protocol):
    """Board on which the ranks of a learner show their activities."""

    def note(self, what: str) -> None:
        """Note that this rank begins its next activity."""

    def live(self) -> None:
        """Note that this rank's process runs, whatever its activity."""

    def places(self) -> list[RankActivity]:
        """Return the activities of all ranks, by rank."""

    def lost(self, now_s: float, forgiven_s: float = 0.0) -> str:
        """Return why the ranks cannot go on, though none is late; empty where no reason is known."""


class ProgressBoard:
    """One slot per rank in a file that all ranks of a host map. Raises OSError when it cannot be made."""

    def __init__(self, path: Path, rank: int, size: int) -> None:
        self._rank, self._size, self._count = rank, size, 0
        with path.open("a+b") as file:
            file.truncate(size * _BYTES)
            self._slots = mmap.mmap(file.fileno(), size * _BYTES)
        self.note("starting")
        self.live()

    def note(self, what: str) -> None:
        """See Board."""
        self._count += 1
        slot = (self._count, time.monotonic(), os.getpid(), what.encode()[:36])
        _SLOT.pack_into(self._slots, self._rank * _BYTES, *slot)

    def live(self) -> None:
        """See Board."""
        _ALIVE.pack_into(self._slots, self._rank * _BYTES + _SLOT.size, time.monotonic())

    def places(self) -> list[RankActivity]:
        """See Board."""
        return [self._place(rank * _BYTES) for rank in range(self._size)]

    def lost(self, now_s: float, forgiven_s: float = 0.0) -> str:
        """See Board; always empty, since torchrun ends all ranks of a host with the first that ends."""
        return ""

    def _place(self, at: int) -> RankActivity:
        count, since_s, pid, what = _SLOT.unpack_from(self._slots, at)
        (alive_s,) = _ALIVE.unpack_from(self._slots, at + _SLOT.size)
        return RankActivity(count, since_s, pid, what.rstrip(b"\0").decode(), alive_s)


def stall_of(
    places: Sequence[RankActivity], now_s: float, bound_s: float, slow_bound_s: float, forgiven_s: float = 0.0
) -> str:
    """Return which rank is awaited, at what, for how long, once a rank has exceeded a bound; empty before that.

    `bound_s` bounds an activity, `slow_bound_s` one in SLOW. Time before `forgiven_s` does not count.
    """

    def lasted_s(place: RankActivity) -> float:
        return now_s - max(place.since_s, forgiven_s)

    begun = [place for place in places if place.count]
    late = [place for place in begun if lasted_s(place) > (slow_bound_s if place.what in SLOW else bound_s)]
    if not late:
        return ""
    least, most = min(place.count for place in begun), max(place.count for place in begun)
    still = {rank for rank, place in enumerate(places) if place.count and now_s - place.alive_s > STANDSTILL_S}
    awaited = [rank for rank, place in enumerate(places) if place.count == least and (least < most or rank in still)]
    if not awaited:
        return f"all ranks have been in {begun[0].what!r} for {lasted_s(begun[0]):.0f} s"
    ahead, place = next(place for place in begun if place.count == most), places[awaited[0]]
    stopped = f"; its process has not run for {now_s - place.alive_s:.0f} s" if awaited[0] in still else ""
    return (
        f"other ranks have waited {lasted_s(ahead):.0f} s in {ahead.what!r} for {_names(places, awaited)} "
        f"(in {place.what!r} for {lasted_s(place):.0f} s{stopped})"
    )


def _names(places: Sequence[RankActivity], ranks: Sequence[int]) -> str:
    """Return names as "rank 1, 3", or where ranks live on several hosts "rank 2, 3 on host b"."""
    hosts = list(dict.fromkeys(places[rank].host for rank in ranks))
    of_host = {host: ", ".join(str(rank) for rank in ranks if places[rank].host == host) for host in hosts}
    return " and ".join(f"rank {named}" + f" on host {host}" * bool(host) for host, named in of_host.items())


class StallWatch:
    """A thread that reads the board and ends this process on a stall.

    With `ends` false it only logs a stall, once: NCCL's own watchdog ends the process, and writes its flight recorder
    before. A rank that is lost ends this process in any case.
    """

    def __init__(self, board: ActivityBoard, *, bound_s: float, slow_bound_s: float, ends: bool = True) -> None:
        self._board, self._bounds_s, self._ends = board, (bound_s, slow_bound_s), ends
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        forgiven_s = looked_s = time.monotonic()
        while not self._closed.wait(POLL_S):
            now_s = time.monotonic()
            if now_s - looked_s > STANDSTILL_S:
                forgiven_s = now_s
            looked_s = now_s
            self._board.live()
            places = self._board.places()
            told = stall_of(places, now_s, *self._bounds_s, forgiven_s=forgiven_s)
            lost = self._board.lost(now_s, forgiven_s)
            if lost or told:
                self._tell(lost or told, places, ends=self._ends or bool(lost))
                return

    def _tell(self, told: str, places: Sequence[RankActivity], *, ends: bool) -> None:
        ask_for_stacks(place.pid for place in places if place.pid)
        self._closed.wait(STACKS_S)
        log.error(
            "learner stalled; exiting" if ends else "learner stalled", reason=f"{told}; stacks are in crash/stacks"
        )
        sys.stderr.flush()
        sys.stdout.flush()
        if ends:
            os._exit(1)  # the main thread may be inside a collective that nothing else can end


def ask_for_stacks(pids: Iterable[int]) -> None:
    """Have processes write the stacks of all their threads to the file that they set at their start (faulthandler)."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGUSR1)
