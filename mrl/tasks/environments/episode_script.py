"""One episode as its pool knows it: its requests, and digests of the answers, so that it can be played again.

When a process is lost, its episodes are played again in another one, from the same seed with the same turns of the
policy: the environment must answer the same, or the episode ends as lost. A policy is never asked again.
"""

import hashlib
import time
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import msgspec

from mrl.tasks.environments.contract import EnvironmentTurn
from mrl.tasks.environments.wire import Asked

MAX_LOSSES = 3
"""Most processes that an episode may lose without fault; one more, and it ends as lost."""


@dataclass(slots=True)
class _Line:
    """One request with its answer: a future until then, a digest afterwards."""

    request: Asked
    future: Future[EnvironmentTurn]
    digest: bytes = b""


@dataclass(slots=True, eq=False)
class Script:
    """The requests of one episode. Belongs to the pool's thread."""

    number: int
    wall_s: float
    """Seconds that the environment may take in all, counted anew in every process."""
    lines: list[_Line] = field(default_factory=list)
    played: int = 0
    """Requests that the present process has answered."""
    asked_at_s: float | None = None
    """Time at which the request after these was sent; None while none is under way."""
    used_s: float = 0.0
    losses: int = 0
    is_alone: bool = False
    """Whether the episode gets a process of its own, because it may have taken down a shared one."""
    is_over: bool = False
    waits_for_agent: bool = False
    """Whether the first answer comes from an agent that takes the episode at some time. That wait is no time of its
    environment: it has a bound of its own, as long as `wall_s`."""

    def add(self, request: Asked, future: "Future[EnvironmentTurn]") -> None:
        """Add the next request."""
        self.lines.append(_Line(request, future))

    @property
    def next_request(self) -> Asked | None:
        """The request to send to the process now; None while the process answers, or when all are answered."""
        is_free = self.asked_at_s is None and not self.is_over
        return self.lines[self.played].request if is_free and self.played < len(self.lines) else None

    @property
    def has_begun(self) -> bool:
        """Whether the environment has given its first turn, in any process."""
        return bool(self.lines and self.lines[0].digest)

    @property
    def awaits(self) -> bool:
        """Whether an answer is awaited."""
        return bool(self.lines) and not self.is_over and not self.lines[-1].future.done()

    @property
    def deadline_s(self) -> float:
        """Time after which the answer is late; infinite while none is awaited."""
        return float("inf") if self.asked_at_s is None else self.asked_at_s + max(0.0, self.wall_s - self.used_s)

    def answer(self, turn: EnvironmentTurn) -> str:
        """Take the answer to the present request; return in words what is wrong with it, "" if nothing is."""
        line = self.lines[self.played]
        if self.played or not self.waits_for_agent:
            self.used_s += time.monotonic() - (self.asked_at_s or 0.0)
        said = replace(turn, stream="")  # another agent plays it again, in a session of its own
        self.asked_at_s, digest = None, hashlib.blake2b(msgspec.msgpack.encode(said), digest_size=16).digest()
        if line.digest and line.digest != digest:
            return f"replayed, the environment answered differently at turn {self.played}"
        self.played += 1
        if not line.digest:
            line.digest = digest
            self.is_over = self.is_over or turn.done
            line.future.set_result(turn)
        return ""

    def begin_again(self) -> None:
        """Play all requests again, since the process is gone."""
        self.played, self.asked_at_s, self.used_s = 0, None, 0.0
        self.losses += 1

    def end(self, turn: EnvironmentTurn) -> None:
        """End the episode with a failure, which all open futures get."""
        self.is_over, self.asked_at_s = True, None
        for line in self.lines:
            if not line.future.done():
                line.future.set_result(turn)
