"""Board of a learner's ranks on several hosts: they tell their activities over the first rank's store, every second.

Clocks of hosts differ, so that a rank tells how long it has been at an activity, and others count on from then. A
thread speaks to the store and may hang there, when a network is cut; what it heard last is read without it.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
import torch.distributed as dist

from mrl.learner.ranks.rank_place import RankPlace
from mrl.learner.ranks.watchdog import RankActivity

BEAT_S = 1.0
CLOSE_S = 2.0
PART_S = 10.0
"""Seconds that the first rank waits at its end for the others to have read `END`."""
LOOK_S = 0.1
OVER, END = "over", "end"
"""Keys of the store: why this life of the learner is over; that the first rank, the last to be done, is done."""


class _Said(msgspec.Struct, frozen=True, array_like=True):
    """Activity of one rank, as it is sent."""

    number: int
    count: int
    lasted_s: float
    pid: int
    what: str


class HostBoard:
    """Activities of all ranks, by rank. It speaks to the store through a client of its own, until `close`."""

    def __init__(self, open_store: Callable[[], dist.Store], place: RankPlace, *, lost_s: float) -> None:
        """A rank that is not heard of for `lost_s` is lost."""
        self._place, self._lost_s, self._open = place, lost_s, open_store
        self._count, self._what, self._since_s = 0, "", time.monotonic()
        self._lock = threading.Lock()
        self._heard: dict[int, tuple[_Said, float]] = {}
        self._born_s = time.monotonic()
        self._over = self._broken = ""
        self._ended, self._closed = threading.Event(), threading.Event()
        self._parted = threading.Event()
        """Set at the first rank once all others know that it has ended."""
        self.note("starting")
        self._thread = threading.Thread(target=self._speak, name="host-board", daemon=True)
        self._thread.start()

    def note(self, what: str) -> None:
        """See Board."""
        with self._lock:
            self._count, self._what, self._since_s = self._count + 1, what, time.monotonic()

    def live(self) -> None:
        """See Board; does nothing, since the board's own thread tells it."""

    def places(self) -> list[RankActivity]:
        """See Board. Only a process of this host has a pid that means anything here."""
        with self._lock:
            heard = {**self._heard, self._place.rank: (self._own(0), time.monotonic())}
        return [self._seen(rank, *heard[rank]) if rank in heard else _NOWHERE for rank in range(self._place.size)]

    def lost(self, now_s: float, forgiven_s: float = 0.0) -> str:
        """Return why this life is over, though no rank is late at anything; empty as long as it is not.

        Silence before `forgiven_s` does not count.
        """
        if self._over:
            return self._over
        if self._broken:
            return f"{self._place.told(0)} is gone: {self._broken}"
        with self._lock:
            last_s = {rank: heard_s for rank, (_, heard_s) in self._heard.items()}
        for rank in range(self._place.size):
            silent_s = now_s - max(last_s.get(rank, self._born_s), forgiven_s)
            if rank != self._place.rank and silent_s > self._lost_s:
                return f"{self._place.told(rank)} sent no message for {silent_s:.0f} s"
        return ""

    def end_together(self, stopping: Callable[[], bool]) -> str:
        """Wait for the common end, once all is done here; return why it came to nothing, else "".

        The first rank is the last to be done, and the others wait for it: were it lost before, they would be needed
        again.
        """
        if self._place.rank == 0:
            self._ended.set()
            self._parted.wait(PART_S)
            return ""
        while not self._ended.wait(LOOK_S) and not stopping():
            if reason := self.lost(time.monotonic()):
                return reason
        return ""

    def close(self) -> None:
        """Stop telling and hearing."""
        self._closed.set()
        self._thread.join(CLOSE_S)

    def _own(self, number: int) -> _Said:
        return _Said(number, self._count, time.monotonic() - self._since_s, os.getpid(), self._what)

    def _seen(self, rank: int, said: _Said, heard_s: float) -> RankActivity:
        is_here = self._place.host_of(rank) == self._place.host_of(self._place.rank)
        host = self._place.host_of(rank)
        return RankActivity(said.count, heard_s - said.lasted_s, said.pid if is_here else 0, said.what, heard_s, host)

    def _speak(self) -> None:
        number = 0
        try:
            store = self._open()
            while not self._closed.wait(0 if number == 0 else BEAT_S):
                number += 1
                self._turn(store, number)
        except RuntimeError as error:  # torch's own for a store that is gone
            self._broken = " ".join(str(error).split())[:200]

    def _turn(self, store: dist.Store, number: int) -> None:
        with self._lock:
            own = self._own(number)
        store.set(_at(self._place.rank), msgspec.json.encode(own).decode())
        others = range(1, self._place.size)
        if self._place.rank == 0 and self._ended.is_set():
            store.set(END, "1")
            if store.check([_left(rank) for rank in others]):
                self._parted.set()
        elif store.check([END]):
            store.set(_left(self._place.rank), "1")
            self._ended.set()
        if store.check([OVER]):
            self._over = store.get(OVER).decode(errors="replace")[:500]
        for rank in range(self._place.size):
            if rank != self._place.rank and store.check([_at(rank)]):
                self._hear(rank, store.get(_at(rank)))

    def _hear(self, rank: int, body: bytes) -> None:
        with suppress(msgspec.MsgspecError):
            said = msgspec.json.decode(body, type=_Said)
            with self._lock:
                if rank not in self._heard or self._heard[rank][0].number != said.number:
                    self._heard[rank] = said, time.monotonic()


_NOWHERE = RankActivity(0, 0.0, 0, "", 0.0)


def _at(rank: int) -> str:
    return f"at/{rank}"


def _left(rank: int) -> str:
    return f"left/{rank}"
