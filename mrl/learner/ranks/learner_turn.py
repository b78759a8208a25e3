"""Turns of a learner on devices that other processes use, too: its ranks have memory there for one step at a time.

The first rank asks for the turn once a batch is there. All ranks move to the device, train, publish, save and leave;
when all have left the turn is given back. Tensors that lie in main memory between two turns come back bit for bit.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from mrl.allocation.device_turn import Ahead, DeviceTurn
from mrl.errors import PeerLost
from mrl.learner.ranks.world import World
from mrl.metrics.telemetry import Telemetry

LOOK_S = 0.02
READY, WAITING, STOPPED = b"turn", b"wait", b""
SAY_SO_S = 60.0


class HeldOnDevice(Protocol):
    """Tensors that a rank has on its device."""

    def leave_device(self) -> None:
        """Move the tensors to main memory."""

    def come_to_device(self) -> None:
        """Move the tensors back to the device."""


class LearnerTurn:
    """Turn of one rank on its device; without `shares` the device is its own. Only the first rank has the `lease`."""

    def __init__(
        self,
        world: World,
        telemetry: Telemetry,
        lease: DeviceTurn | None = None,
        *,
        shares: bool = False,
        bound_s: float = 0.0,
    ) -> None:
        """A process that has the turn may stand still for `bound_s`."""
        self._world, self._telemetry, self._lease = world, telemetry, lease
        self.shares, self._bound_s = shares, bound_s
        self._held: HeldOnDevice | None = None
        self._waits_on: Callable[[], None] | None = None
        self._ahead: Ahead | None = None
        self._waited_s = self._moved_s = self._saw_move_s = 0.0

    def begin(self, stopping: Callable[[], bool]) -> bool:
        """Wait for the turn, all ranks together; False when told to stop."""
        if not self.shares:
            return True
        said, told_s = WAITING, time.monotonic()
        while said == WAITING:
            if self._lease is not None:

                def is_time(since_s: float = told_s) -> bool:
                    return stopping() or time.monotonic() - since_s > SAY_SO_S

                is_here = self.take(is_time)
                told_s = time.monotonic()
                said = READY if is_here else STOPPED if stopping() else WAITING
            said = self._world.broadcast_bytes(said if self._lease is not None else None)
        return said == READY

    def has(self, held: HeldOnDevice, waits_on: Callable[[], None] | None) -> None:
        """Set the tensors that come and leave from now on; they are on the device now.

        `waits_on` is called, while the turn is awaited, whenever the process ahead has got on.
        """
        self._held, self._waits_on = held, waits_on

    def take(self, stopping: Callable[[], bool]) -> bool:
        """Wait until it is this learner's turn; False when told to stop, and its place in the queue stays.

        Only the first rank waits. Raises PeerLost when the process that has the turn stands still for too long.
        """
        if self._lease is None:
            return True
        began_s = time.monotonic()
        self._waited_s = 0.0
        while (ahead := self._lease.ask()) is not None:
            if ahead != self._ahead:
                self._ahead, self._saw_move_s = ahead, time.monotonic()
                self._lease.note_progress()  # processes behind see this one alone
                if self._waits_on is not None:
                    self._waits_on()
            if time.monotonic() - self._saw_move_s > self._bound_s:
                raise PeerLost(
                    f"{ahead.holder or 'another process'} holds the device that this learner shares with it, "
                    f"and made no progress for {self._bound_s:g} s"
                )
            if stopping():
                return False
            with self._telemetry.awaiting("device turn", whom=ahead.holder, bound_s=self._bound_s, since_s=began_s):
                time.sleep(LOOK_S)
        self._waited_s = time.monotonic() - began_s
        self._ahead = None
        return True

    def take_times(self) -> dict[str, float]:
        """Return seconds of the wait for the last turn, and of the moves in it; nothing for a device of its own."""
        if not self.shares:
            return {}
        return {"time/wait_for_turn_s": self._waited_s, "time/move_s": self._moved_s}

    def come(self) -> None:
        """Move to the device; all ranks call it, after the first rank's `take`."""
        if self.shares and self._held is not None:
            self._world.note("moving to the device")
            began_s = time.monotonic()
            with self.getting_on():
                self._held.come_to_device()
            self._moved_s = time.monotonic() - began_s

    def leave(self) -> None:
        """Move off the device, all ranks; then give the turn back."""
        if not self.shares or self._held is None:
            return
        self._world.note("moving off the device")
        self._telemetry.doing("moving off the device")
        began_s = time.monotonic()
        with self.getting_on():
            self._held.leave_device()
            self._world.any(False)  # all have left
            self._moved_s += time.monotonic() - began_s
        if self._lease is not None:
            self._lease.give_back()

    def note_progress(self) -> None:
        """Show the processes that wait for the turn that this learner gets on."""
        if self._lease is not None:
            self._lease.note_progress()

    def getting_on(self) -> AbstractContextManager[None]:
        """See DeviceTurn."""
        return nullcontext() if self._lease is None else self._lease.getting_on()
