"""Time, hosts and processes. One event at a time; the order of events follows from the seed alone."""

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
    """The process ends itself."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Violated(Exception):
    """Something is that must not be."""


@dataclass
class Host:
    """A machine: its clocks agree with nobody's."""

    name: str
    offset_s: float
    """Of its monotonic clock."""
    step_s: float = 0.0
    """What was put on its wall clock since."""


class Process:
    """A process on a host. What is due while it is stopped runs when it goes on; nothing runs after its end."""

    def __init__(self, world: "World", name: str, host: Host, unit: str = "") -> None:
        self.world, self.name, self.host, self.unit = world, name, host, unit
        self.code: int | None = None
        """Exit code, None while it lives."""
        self.is_stopped = False
        self.went_on_s = -math.inf
        """When it was stopped last, it went on then; in the world's time."""
        self.on_end: list[Callable[[bool], object]] = []
        """Called at its end, with whether the host was gone with it: nobody is told then."""
        self._backlog: list[Call] = []
        self.number = next(world.numbers)
        """Its process id."""
        world.processes.append(self)

    def now_s(self) -> float:
        """The host's monotonic clock."""
        return self.world.now_s + self.host.offset_s

    def at(self, delay_s: float, call: Call) -> None:
        """Do this later, if it lives by then."""
        self.world.push(delay_s, self, call)

    def every(self, period_s: float, call: Call) -> None:
        """Do this again and again."""

        def again() -> None:
            self.at(period_s * self.world.rng.uniform(0.9, 1.1), again)
            call()

        self.at(period_s * self.world.rng.random(), again)

    def do(self, call: Call) -> None:
        """Run what is due in it; an error ends it, as a role's outer edge does."""
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
        """It is no more; with its host, so that nobody hears of it."""
        if self.code is None:
            self.code = code
            self.world.note(f"{self.name} ends ({code})")
            self.world.processes.remove(self)
            for call in self.on_end:
                call(with_host)

    def stop(self, for_s: float) -> None:
        """Stand still: a signal, a starved host, a debugger."""
        self.is_stopped, self.went_on_s = True, self.world.now_s + for_s
        self.world.push(for_s, None, self.go_on)

    def go_on(self) -> None:
        """Go on with old beliefs."""
        self.is_stopped = False
        backlog, self._backlog = self._backlog, []
        for call in backlog:
            self.at(0.0, call)


class World:
    """What is due, and when."""

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
        """Of everything that was noted: equal where two runs of a seed were the same."""
        return self._digest.hexdigest()[:12]

    def push(self, delay_s: float, process: Process | None, call: Call) -> None:
        """Do this later, in a process or outside of all."""
        heapq.heappush(self._due, (self.now_s + delay_s, next(self.numbers), process, call))

    def note(self, text: str) -> None:
        """A line of the story."""
        line = f"{self.now_s:9.3f} {text}"
        self._digest.update(line.encode())
        if self._trace is not None:
            self._trace(line)

    def run(self, is_over: Callable[[], bool], within_s: float) -> bool:
        """Go on until it is over; False when it is not by then."""
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

    # The module `time` of the code that runs in a process.

    def monotonic(self) -> float:
        """Of the host on which something runs now."""
        return self.now_s + (self.current.host.offset_s if self.current else 0.0)

    def time(self) -> float:
        """The wall clock there, which may be put on or back."""
        return FIRST_UNIX_S + self.now_s + (self.current.host.step_s if self.current else 0.0)

    def sleep(self, _for_s: float) -> None:
        """Nothing may wait here."""
        raise Violated("a process waits without an event")
