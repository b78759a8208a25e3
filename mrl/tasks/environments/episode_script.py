"""One episode as its pool knows it: what was asked, and what came back, so that it can be played again.

Where a process is lost, episodes that it held are played again in another one, from the same seed with the same turns
of the policy: the environment has to say the same, or the episode ends as lost. A policy is never asked again.
"""

import hashlib
import time
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import msgspec

from mrl.tasks.environments.contract import EnvironmentTurn
from mrl.tasks.environments.wire import Asked

MAX_LOSSES = 3
"""Processes that an episode may lose without fault, before it ends as lost."""


@dataclass(slots=True)
class _Line:
    """One request, and what came back: a future until then, a digest afterwards."""

    request: Asked
    future: Future[EnvironmentTurn]
    digest: bytes = b""


@dataclass(slots=True, eq=False)
class Script:
    """The requests of one episode. All belongs to the pool's thread."""

    number: int
    wall_s: float
    """Time that its environment may take in all, from its first request in a process on."""
    lines: list[_Line] = field(default_factory=list)
    played: int = 0
    """Requests that its present process has answered."""
    asked_at_s: float | None = None
    """When the one after these was sent; None while none is."""
    used_s: float = 0.0
    losses: int = 0
    is_alone: bool = False
    """Whether it gets a process of its own, because it may have taken one with it."""
    is_over: bool = False

    def add(self, request: Asked, future: "Future[EnvironmentTurn]") -> None:
        """The next request."""
        self.lines.append(_Line(request, future))

    @property
    def next_request(self) -> Asked | None:
        """What its process is to be asked now; None while it answers, and when all is answered."""
        is_free = self.asked_at_s is None and not self.is_over
        return self.lines[self.played].request if is_free and self.played < len(self.lines) else None

    @property
    def awaits(self) -> bool:
        """Whether somebody awaits an answer."""
        return bool(self.lines) and not self.is_over and not self.lines[-1].future.done()

    @property
    def deadline_s(self) -> float:
        """When the answer is too late; infinite while none is awaited."""
        return float("inf") if self.asked_at_s is None else self.asked_at_s + max(0.0, self.wall_s - self.used_s)

    def answer(self, turn: EnvironmentTurn) -> str:
        """Take the answer to the present request; returns what is wrong with it in words, and "" if nothing is."""
        line = self.lines[self.played]
        self.used_s += time.monotonic() - (self.asked_at_s or 0.0)
        said = replace(turn, stream="")  # played again it is another agent's, in a session of its own
        self.asked_at_s, digest = None, hashlib.blake2b(msgspec.msgpack.encode(said), digest_size=16).digest()
        if line.digest and line.digest != digest:
            return f"played again, it said something else at turn {self.played}"
        self.played += 1
        if not line.digest:
            line.digest = digest
            self.is_over = self.is_over or turn.done
            line.future.set_result(turn)
        return ""

    def begin_again(self) -> None:
        """Its process is gone; nothing is played."""
        self.played, self.asked_at_s, self.used_s = 0, None, 0.0
        self.losses += 1

    def end(self, turn: EnvironmentTurn) -> None:
        """A failure, for whoever awaits it; nothing is asked any more."""
        self.is_over, self.asked_at_s = True, None
        for line in self.lines:
            if not line.future.done():
                line.future.set_result(turn)
