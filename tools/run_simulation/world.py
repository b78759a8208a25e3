"""Simulated time, hosts and processes. One event runs at a time; their order follows from the seed alone."""

import hashlib
import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from mrl.errors import MRLError, UserError

Call = Callable[[], object]
FIRST_UNIX_S = 1_700_000_000.0


class Ended(Exception):
    """Raised by a process that ends itself."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Violated(Exception):
    """A law that must hold is broken."""


@dataclass
class Host:
    """A machine, whose clocks agree with nobody's."""

    name: str
    offset_s: float
    """Offset of its monotonic clock."""
    step_s: float = 0.0
    """Seconds by which its wall clock was set forward."""


class Process:
    """A process on a host. Events due while it is stopped run when it goes on; none run after its end."""

    def __init__(self, world: "World", name: str, host: Host, unit: str = "") -> None:
        self.world, self.name, self.host, self.unit = world, name, host, unit
        self.code: int | None = None
        """Exit code; None while the process lives."""
        self.is_stopped = False
        self.went_on_s = -math.inf
        """World time at which the process goes on, or went on, after its last stop."""
        self.on_end: list[Callable[[bool], object]] = []
        """Called at the end of the process, with whether its host was gone with it: nobody is told then."""
        self._backlog: list[Call] = []
        self.number = next(world.numbers)
        """Process id."""
        world.processes.append(self)

    def now_s(self) -> float:
        """Time by the host's monotonic clock."""
        return self.world.now_s + self.host.offset_s

    def at(self, delay_s: float, call: Call) -> None:
        """Call something later, if the process lives by then."""
        self.world.push(delay_s, self, call)

    def every(self, period_s: float, call: Call) -> None:
        """Call something again and again, about every `period_s`."""

        def again() -> None:
            self.at(period_s * self.world.rng.uniform(0.9, 1.1), again)
            call()

        self.at(period_s * self.world.rng.random(), again)

    def do(self, call: Call) -> None:
        """Run a call that is due in the process; an error ends the process, as a role's outer edge does."""
        if self.code is not None:
            return
        if self.is_stopped:
            self._backlog.append(call)
            return
        self.world.current = self
        try:
            call()
        except Ended as end:
            self.end(end.code)
        except (MRLError, OSError) as error:
            self.world.note(f"{self.name}: {error}")
            self.end(2 if isinstance(error, UserError) else 1)
        finally:
            self.world.current = None

    def end(self, code: int, *, with_host: bool = False) -> None:
        """End the process. `with_host`: together with its host, so that nobody hears of it."""
        if self.code is None:
            self.code = code
            self.world.note(f"{self.name} ends ({code})")
            self.world.processes.remove(self)
            for call in self.on_end:
                call(with_host)

    def stop(self, for_s: float) -> None:
        """Stand still for some seconds: a signal, a starved host, a debugger."""
        self.is_stopped, self.went_on_s = True, self.world.now_s + for_s
        self.world.push(for_s, None, self.go_on)

    def go_on(self) -> None:
        """Go on, with the calls that came due meanwhile."""
        self.is_stopped = False
        backlog, self._backlog = self._backlog, []
        for call in backlog:
            self.at(0.0, call)


class World:
    """Simulated time, and the events that are due in it."""

    def __init__(self, seed: int, *, trace: Callable[[str], object] | None = None) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.current: Process | None = None
        self.processes: list[Process] = []
        self.num_events = 0
        self._digest = hashlib.sha256()
        self._trace = trace
        self._due: list[tuple[float, int, Process | None, Call]] = []
        self.numbers = itertools.count(1)

    @property
    def digest(self) -> str:
        """Digest of all notes: equal where two runs of a seed were the same."""
        return self._digest.hexdigest()[:12]

    def push(self, delay_s: float, process: Process | None, call: Call) -> None:
        """Call something later, in a process or outside of all."""
        heapq.heappush(self._due, (self.now_s + delay_s, next(self.numbers), process, call))

    def note(self, text: str) -> None:
        """Note a line of the run's story."""
        line = f"{self.now_s:9.3f} {text}"
        self._digest.update(line.encode())
        if self._trace is not None:
            self._trace(line)

    def run(self, is_over: Callable[[], bool], within_s: float) -> bool:
        """Run events until `is_over`; return False if it is not by the time `within_s`."""
        while self._due and not is_over():
            if self._due[0][0] > within_s:
                return False
            self.now_s, _, process, call = heapq.heappop(self._due)
            self.num_events += 1
            if process is None:
                call()
            else:
                process.do(call)
        return True

    # The world takes the place of the module `time` for the code that runs in a process.

    def monotonic(self) -> float:
        """Monotonic clock of the host of the running process."""
        return self.now_s + (self.current.host.offset_s if self.current else 0.0)

    def time(self) -> float:
        """Wall clock of that host, which may be set forward or back."""
        return FIRST_UNIX_S + self.now_s + (self.current.host.step_s if self.current else 0.0)

    def sleep(self, _for_s: float) -> None:
        """Raise Violated: nothing may wait in simulated code."""
        raise Violated("a process waits without an event")
