"""An engine on a device that processes use in turns: it has memory on the device only while it has the turn.

A call waits until the engine has its turn, `collect` no longer than its timeout. A thread asks for the turn as soon as
there is work. It gives the turn back when another process waits, and no work is left or the turn was long enough.
Answers in flight then rest until the next turn: those of an embedded engine go on with the same bits, those of a server
behind the tokens that they have, as at an update of its weights. A server loses its weights with its turn. At the next
turn they are loaded and proved again before any call gets in; but where new weights wait, their load gets in first,
and alone.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from mrl.allocation.device_turn import Ahead, DeviceTurn
from mrl.engines.engine import Engine, EngineUsage, FinishedAnswer, GenerationRequest, ScoringRequest
from mrl.errors import EngineLost, WeightsError
from mrl.metrics.telemetry import Telemetry
from mrl.records.version import Version
from mrl.rollout.weight_updates import prove
from mrl.weights.manifest import MANIFEST, read_manifest
from mrl.weights.read_lock import read_lock

LOOK_S = 0.02
IDLE_S = 0.05
"""Seconds that an engine without work keeps its turn after its last call: the next call often follows at once."""
MIN_TURN_S, KEPT_PER_SWITCH = 1.0, 10.0
"""An engine with work keeps its turn for at least the first, in seconds, and the second times the time of a switch
(leave and come back): switches take a tenth of the time at most."""
UNKNOWN = Ahead("", 0)


class Movable(NamedTuple):
    """A started engine, and the calls that move its memory off its device and back."""

    engine: Engine
    leave: Callable[[], None]
    come_back: Callable[[], None]
    keeps_weights: bool = True
    """Whether the engine still has its weights when it is back."""


class Loaded(NamedTuple):
    """Arguments of an engine's last `load`."""

    folder: Path
    version: Version
    digests: Mapping[str, str] | None


class TimeSharedEngine:
    """An engine that has its device in turns. What is not defined here is the inner engine's, and needs no turn."""

    def __init__(
        self,
        turn: DeviceTurn,
        make: Callable[[], Movable],
        *,
        telemetry: Telemetry,
        stopping: Callable[[], bool],
        waits: Callable[[int], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`make` starts the engine, in its first turn. Before that `waits` is told, again and again, `turns_seen`.

        Raises what `make` raises, and EngineLost when told to stop before.
        """
        self._turn, self._telemetry, self._stopping, self._clock = turn, telemetry, stopping, clock
        self._state = threading.Condition()
        self._is_here = self._is_bare = False
        """Whether all calls may enter; whether only a load may, since the engine came back without weights."""
        self._ahead = UNKNOWN
        self._waiting = self._busy = self._loads = 0
        """Callers that wait for the turn; callers inside the engine; those inside that load, prove or restart it."""
        self._in_flight: dict[str, int] = {}
        """Request id -> number of its answers that have not come."""
        self._gone: set[str] = set()
        """Requests that were aborted while the engine was away."""
        self._failure: BaseException | None = None
        """Why the engine could not leave or come back: every call raises it, and the turn is kept, until a restart."""
        self._loaded: Loaded | None = None
        self._left_with: Version | None = None
        self._loads_wanted = 0
        """Callers in `load`: while there are any, the old weights are not loaded again."""
        self._ending = threading.Event()
        self._tokens = -1
        self.turns_seen = 0
        """Count of changes seen ahead in the queue: the process ahead got on, or is another one now."""
        self._await_first(waits)
        try:
            with turn.getting_on():
                self._engine, self._leave, self._come_back, self._keeps_weights = make()
        except BaseException:
            turn.give_back()
            raise
        self._is_here, self._used_s, self._since_s, self._switch_s = True, clock(), clock(), 0.0
        self._thread = threading.Thread(target=self._take_turns, name="turns", daemon=True)
        self._thread.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_engine"], name)

    @property
    def is_away(self) -> bool:
        """Whether the engine is without its turn."""
        return not self._is_here

    @property
    def version(self) -> Version | None:
        """See Engine; while the engine is away, the version that it will have when it is back."""
        return self._engine.version if self._is_here else self._left_with

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See Engine; may wait for the turn."""
        with self._inside():
            self._engine.submit(requests)
        self._in_flight |= {one.request_id: one.seeds.size for one in requests if one.seeds.size}

    def collect(self, timeout_s: float) -> list[FinishedAnswer]:
        """See Engine."""
        if not self._in_flight:
            return []
        found: list[FinishedAnswer] = []
        with self._inside(timeout_s) as is_here:
            if is_here:
                self._forget()
                found = self._engine.collect(timeout_s)
        for one in found:
            left = self._in_flight.pop(one.request_id, 0) - 1
            if left > 0:
                self._in_flight[one.request_id] = left
        return found

    def abort(self, request_ids: Iterable[str]) -> None:
        """See Engine; an engine that is away forgets the requests at its next `abort` or `collect` within a turn."""
        names = set(request_ids)
        for name in names:
            self._in_flight.pop(name, None)
        self._gone |= names
        with self._inside(0.0) as is_here:
            if is_here:
                self._forget()

    def _forget(self) -> None:
        gone, self._gone = self._gone, set()
        if gone:
            self._engine.abort(gone)

    def load(self, folder: Path, version: Version, digests: Mapping[str, str] | None = None) -> None:
        """See Engine."""
        with self._state:
            self._loads_wanted += 1
        try:
            with self._loading(bare=True):
                self._engine.load(folder, version, digests)
                self._loaded = Loaded(folder, version, digests)
                self._open()
        finally:
            with self._state:
                self._loads_wanted -= 1

    def load_adapters(self, folder: Path, version: Version, digests: Mapping[str, str] | None = None) -> None:
        """See Engine."""
        with self._loading():
            self._engine.load_adapters(folder, version, digests)

    def usage(self) -> EngineUsage:
        """See Engine."""
        if self._failure is not None:
            raise self._failure
        return self._engine.usage()

    def label(self, version: Version) -> None:
        """See Engine."""
        with self._inside():
            self._engine.label(version)

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """See Engine."""
        with self._loading():
            return self._engine.score(token_ids)

    def score_answers(self, request: ScoringRequest) -> Any:
        """See Engine."""
        with self._inside():
            scores = self._engine.score_answers(request)
        self._turn.note_progress()
        return scores

    def score_given(self, token_ids: Sequence[int]) -> Any:
        """See Engine."""
        with self._inside():
            scores = self._engine.score_given(token_ids)
        self._turn.note_progress()
        return scores

    def checksums(self) -> dict[str, str] | None:
        """See Engine."""
        with self._loading():
            return self._engine.checksums()

    def restart(self) -> None:
        """See Engine. A worker that is told to stop starts nothing."""
        try:
            with self._loading(bare=True, anew=True):
                self._in_flight.clear()
                self._gone.clear()
                self._engine.restart()
                self._failure = self._loaded = None
                self._open()
        except EngineLost:
            if not self._stopping():
                raise

    def close(self) -> None:
        """See Engine. A turn that is held ends with this process, which has memory on the device until then."""
        self._ending.set()
        with self._state:
            self._state.notify_all()
        self._thread.join()
        self._engine.close()
        if not self._turn.is_held:
            self._turn.give_back()

    # Callers.

    @contextmanager
    def _inside(
        self, timeout_s: float | None = None, *, loads: bool = False, bare: bool = False, anew: bool = False
    ) -> Iterator[bool]:
        """Wait for the engine's turn and keep it within the context; yields False where the timeout ran out.

        The engine has its weights then, except for a caller that enters `bare`.
        """
        began_s = self._clock()
        with self._state:
            self._waiting += 1
            try:
                while not (is_here := self._is_here or (bare and self._is_bare)):
                    if self._is_late(began_s, timeout_s):
                        break
                    self._await_change(began_s, timeout_s)
            finally:
                self._waiting -= 1
            if is_here and self._failure is not None and not anew:
                raise self._failure
            self._busy += is_here
            self._loads += is_here and loads
        try:
            yield is_here
        finally:
            with self._state:
                self._busy -= is_here
                self._loads -= is_here and loads
                self._used_s = self._clock()
                self._state.notify_all()

    @contextmanager
    def _loading(self, *, bare: bool = False, anew: bool = False) -> Iterator[None]:
        """Enter to load, prove or restart the engine: the length of its turn counts from the end of that."""
        with self._inside(loads=True, bare=bare, anew=anew):
            try:
                yield
            finally:
                self._since_s = self._clock()

    def _is_late(self, began_s: float, timeout_s: float | None) -> bool:
        if timeout_s is None and (self._stopping() or self._ending.is_set()):
            told = "closed" if self._ending.is_set() else "told to stop"
            raise EngineLost(f"the engine was {told} while it waited for its turn on the device")
        return timeout_s is not None and self._clock() - began_s >= timeout_s

    def _await_change(self, began_s: float, timeout_s: float | None) -> None:
        """Wait a slice of time for a change of the state, which is locked."""
        slice_s = 1.0 if timeout_s is None else max(0.0, timeout_s - (self._clock() - began_s))
        with self._telemetry.awaiting("device turn", whom=self._ahead.holder, since_s=began_s):
            self._state.wait(slice_s)

    # The thread that takes and gives back turns.

    def _await_first(self, waits: Callable[[int], None]) -> None:
        began_s = self._clock()
        while (ahead := self._turn.ask()) is not None:
            self._look_at(ahead)
            waits(self.turns_seen)
            if self._stopping():
                self._turn.give_back()
                raise EngineLost("the engine was told to stop while it waited for its first turn on the device")
            with self._telemetry.awaiting("device turn", whom=ahead.holder, since_s=began_s):
                time.sleep(LOOK_S)

    def _take_turns(self) -> None:
        while not self._ending.wait(LOOK_S):
            if self._loads:
                self._turn.note_progress()
            if self._failure is not None:
                continue
            try:
                if self._is_here:
                    self._look_around()
                elif self._is_bare:
                    self._load_again_unless_new_come()
                elif self._waiting or self._in_flight:
                    self._enter()
                else:
                    self._turn.give_back()  # or its place in the queue
            except BaseException as error:  # noqa: BLE001 - it is raised by whoever calls the engine
                with self._state:
                    self._failure, self._is_here = error, True
                    self._state.notify_all()

    def _look_around(self) -> None:
        """Show progress to the processes that wait for the turn, and leave when it is time."""
        tokens = self._engine.usage().generated_tokens if self._busy and not self._loads else self._tokens
        if tokens != self._tokens:
            self._tokens = tokens
            self._turn.note_progress()
        if self._turn.is_awaited():
            self._leave_if_it_may()

    def _enter(self) -> None:
        ahead = self._turn.ask()
        if ahead is not None:
            self._look_at(ahead)
            return
        began_s = self._clock()
        with self._turn.getting_on():
            self._come_back()
        self._since_s = self._clock()
        self._switch_s += self._since_s - began_s
        with self._state:
            self._is_bare = not self._keeps_weights and self._loaded is not None
            self._state.notify_all()
        if self._is_bare:
            self._load_again_unless_new_come()
        else:
            self._open()

    def _load_again_unless_new_come(self) -> None:
        with self._state:
            if self._loads_wanted or not self._is_bare or self._loaded is None:
                return
            self._is_bare = False
            loaded, began_s = self._loaded, self._clock()
        with self._turn.getting_on():
            self._load_again(loaded)
        self._switch_s += self._clock() - began_s
        self._open()

    def _open(self) -> None:
        """Let the waiting callers in."""
        with self._state:
            self._is_here, self._is_bare = True, False
            self._used_s = self._since_s = self._clock()
            self._state.notify_all()

    def _load_again(self, loaded: Loaded) -> None:
        """Load and prove the old weights. Raises EngineLost where they are gone, or not proved."""
        try:
            with read_lock(loaded.folder):
                self._engine.load(*loaded)
                prove(self._engine, read_manifest(loaded.folder / MANIFEST))
        except WeightsError as error:
            raise EngineLost(
                f"version {loaded.version} could not be reloaded after another process's turn: {error}"
            ) from error

    def _may_leave(self) -> bool:
        now_s = self._clock()
        if not self._in_flight and not self._busy and now_s - self._used_s > IDLE_S:
            return True
        return not self._loads and now_s - self._since_s > max(MIN_TURN_S, KEPT_PER_SWITCH * self._switch_s)

    def _leave_if_it_may(self) -> None:
        with self._state:
            if not self._may_leave():
                return
            self._left_with = self._engine.version
            self._is_here = False  # no caller enters any more, and those inside come out
            while self._busy:
                self._engine.nudge()
                self._state.wait(LOOK_S)
        began_s = self._clock()
        with self._turn.getting_on():
            self._leave()
        self._switch_s = self._clock() - began_s
        self._turn.give_back()

    def _look_at(self, ahead: Ahead) -> None:
        if ahead != self._ahead:
            self._ahead = ahead
            self.turns_seen += 1
            self._turn.note_progress()  # processes behind see the progress of this one alone
