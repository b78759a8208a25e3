"""Faults and their times: drawn from the seed, one after another or at once, and all over at a known time."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

from run_simulation.world import Process

if TYPE_CHECKING:
    from run_simulation.trial import Run

FIRST_S, LAST_S = 2.0, 26.0
MOST = 10


class Faults:
    """State of the exchange's disk, and plan of all other faults."""

    def __init__(self, run: "Run") -> None:
        self.disk: Literal["", "full", "torn", "unsure"] = ""
        """Fault of the exchange's disk: full; or its next commit fails, and was done by then ("unsure") or not
        ("torn")."""
        self.slow_disk = 1.0
        self.quiet_s = FIRST_S
        """World time after which no fault begins or lasts."""
        self._run, self._rng = run, run.world.rng
        kinds: list[Callable[[float], None]] = [
            self._kill, self._kill, self._stop, self._stop, self._cut, self._cut, self._reset, self._fill, self._fill,
            self._break, self._slow, self._lose_host, self._lose_host, self._lag, self._step_clock,
        ]  # fmt: skip
        for _ in range(self._rng.randint(1, MOST)):
            at_s, fault = self._rng.uniform(FIRST_S, LAST_S), self._rng.choice(kinds)
            for_s = self._rng.choice([0.5, 2.0, 5.0, 12.0, 20.0]) * self._rng.uniform(0.7, 1.3)
            self._run.world.push(at_s, None, partial(fault, for_s))
            self.quiet_s = max(self.quiet_s, at_s + for_s)

    def _victim(self) -> Process | None:
        there = [one for one in self._run.world.processes if not one.is_stopped]
        there += [one for one in there if one.name in ("exchange", "allocator")]
        return self._rng.choice(there) if there else None

    def _note(self, text: str) -> None:
        self._run.world.note(f"fault: {text}")

    def _kill(self, for_s: float) -> None:
        victim = self._victim()
        if victim is not None:
            self._note(f"{victim.name} is killed")
            victim.end(-9)

    def _stop(self, for_s: float) -> None:
        victim = self._victim()
        if victim is not None:
            self._note(f"{victim.name} stands still for {for_s:.1f} s")
            victim.stop(for_s)

    def _cut(self, for_s: float) -> None:
        ways = [("one", "two"), ("two", "one")]
        chosen = self._rng.choice([ways, ways[:1], ways[1:]])
        self._note(f"cut for {for_s:.1f} s: {chosen}")
        for way in chosen:
            self._run.network.cut(way, for_s)

    def _reset(self, for_s: float) -> None:
        self._note("connections break")
        self._run.network.reset()

    def _fill(self, for_s: float) -> None:
        self._note(f"the disk of the exchange is full for {for_s:.1f} s")
        self.disk = "full"
        self._run.world.push(for_s, None, self._mend)

    def _break(self, for_s: float) -> None:
        self.disk = self._rng.choice(["torn", "unsure"])
        self._note(f"the disk of the exchange fails: {self.disk}")
        self._run.world.push(min(for_s, 1.0), None, self._mend)

    def _slow(self, for_s: float) -> None:
        self._note(f"the disk of the exchange is slow for {for_s:.1f} s")
        self.slow_disk = 100.0
        self._run.world.push(for_s, None, self._mend)

    def _mend(self) -> None:
        self.disk, self.slow_disk = "", 1.0

    def _lose_host(self, for_s: float) -> None:
        name = self._rng.choice(["one", "two", "two"])
        self._note(f"host {name} is lost for {for_s:.1f} s")
        self._run.lose_host(name, for_s)

    def _step_clock(self, for_s: float) -> None:
        host = self._run.machines[self._rng.choice(sorted(self._run.machines))]
        host.step_s += self._rng.choice([-86_400.0, -30.0, 30.0, 86_400.0])
        self._note(f"the wall clock of {host.name} is put to {host.step_s:+.0f} s")

    def _lag(self, for_s: float) -> None:
        self._note(f"the network is slow for {for_s:.1f} s")
        usual, self._run.network.delay_s = self._run.network.delay_s, 0.3
        self._run.world.push(for_s, None, lambda: setattr(self._run.network, "delay_s", min(usual, 0.004)))
