"""What the watchdog of a server takes for its end, and what it does not: its server speaks in this process."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from mrl.engines.engine import EngineUsage, GenerationRequest, Sampling
from mrl.engines.http import Http, HttpFailure
from mrl.engines.server_backend import Segment
from mrl.engines.server_engine import ServerEngine
from mrl.engines.server_timeouts import ServerTimeouts
from mrl.errors import EngineLost
from mrl.records.finish import FinishReason
from mrl.records.version import Version

SHORT_S, LONG_S = 0.2, 60.0
"""The bound under test, and one that is never reached."""


class Moody:
    """A server that answers and gets on, or does not; an update lasts twice the short bound."""

    name = "moody"

    def __init__(self) -> None:
        self.is_deaf = self.stands_still = False
        self.moods_while_loading: tuple[bool, bool] = (False, False)
        self.hangs_in = ""
        self.was_asked = threading.Event()
        self.looks = threading.Semaphore(0)
        self._tokens = 0
        self._given_up = asyncio.Event()

    async def ready(self, http: Http) -> bool:
        return True

    async def probe(self, http: Http) -> None: ...

    async def alive(self, http: Http) -> bool:
        await self._maybe_hang("alive")
        if self.is_deaf:
            raise HttpFailure("/health", 0, "nothing comes")
        return True

    async def _maybe_hang(self, call: str) -> None:
        if self.hangs_in == call:
            self.was_asked.set()
            await asyncio.Event().wait()

    async def usage(self, http: Http) -> EngineUsage:
        await self._maybe_hang("usage")
        self.looks.release()
        self._tokens += not self.stands_still
        return EngineUsage(1, 0, 0.0, self._tokens)

    async def generate(
        self,
        http: Http,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        max_new_tokens: int,
        seed: int,
        request_id: str,
    ) -> Segment:
        """Until it is given up, which happens once."""
        await self._given_up.wait()
        was_begun_before = request_id.endswith("/0")
        return Segment([1], [-1.0], FinishReason.ABORT if was_begun_before else FinishReason.STOP)

    async def abort_all(self, http: Http) -> None:
        self._given_up.set()

    async def load(self, http: Http, folder: Path, label: str) -> None:
        self.is_deaf, self.stands_still = self.moods_while_loading
        await asyncio.sleep(2 * SHORT_S)
        self.is_deaf = self.stands_still = False

    async def resume(self, http: Http) -> None: ...

    async def sleep(self, http: Http) -> None: ...

    async def wake(self, http: Http) -> None: ...


@pytest.fixture
def make(monkeypatch) -> Iterator[Callable[[Moody, ServerTimeouts], ServerEngine]]:
    """An engine that is looked after every few milliseconds, with an answer in flight."""
    monkeypatch.setattr("mrl.engines.server_engine.WATCH_S", 0.005)
    made: list[ServerEngine] = []

    def start(server: Moody, bounds: ServerTimeouts) -> ServerEngine:
        sampling = Sampling(temperature=1.0, max_new_tokens=9, eos_ids=(0,))
        made.append(ServerEngine(server, sampling, launch=None, url="http://127.0.0.1:9", bounds=bounds))  # type: ignore[arg-type]
        made[-1].label(Version(0, 0))
        made[-1].submit([GenerationRequest("a", np.array([3], dtype=np.int32), np.array([1], dtype=np.uint64))])
        return made[-1]

    yield start
    for engine in made:
        engine.close()


SILENCE = ServerTimeouts(silence_s=SHORT_S, stall_s=LONG_S, load_s=LONG_S)
STALL = ServerTimeouts(silence_s=LONG_S, stall_s=SHORT_S, load_s=LONG_S)


@pytest.mark.parametrize(("bounds", "moods"), [(SILENCE, (True, False)), (STALL, (False, True))])
def test_an_update_is_neither_silence_nor_a_stall(make, bounds, moods):
    """A server may be deaf while it loads, and samples nothing then: loading has a bound of its own."""
    server = Moody()
    engine = make(server, bounds)
    server.moods_while_loading = moods

    engine.load(Path(), Version(0, 1))

    found = engine.collect(LONG_S)
    assert [span.version.step for span in found[0].generation.versions] == [0, 1]


@pytest.mark.parametrize(
    ("bounds", "mood", "reason"), [(SILENCE, "is_deaf", "has been silent"), (STALL, "stands_still", "no token came")]
)
def test_outside_of_an_update_it_is_the_end(make, bounds, mood, reason):
    """Within the bound, and not before."""
    server = Moody()
    engine = make(server, bounds)
    setattr(server, mood, True)
    began_s = time.monotonic()

    with pytest.raises(EngineLost, match=f"{reason}.* {SHORT_S:g} s"):
        engine.collect(LONG_S)

    assert time.monotonic() - began_s > SHORT_S / 2


def test_an_answer_that_takes_long_and_gets_on_is_no_stall(make):
    """However long it takes."""
    engine = make(Moody(), STALL)

    time.sleep(2 * SHORT_S)

    assert engine.collect(0.0) == []


def test_a_server_without_answers_in_flight_may_stand_still(make):
    """There is nothing that it could get on with."""
    server = Moody()
    engine = make(server, STALL)
    engine.load(Path(), Version(0, 1))
    engine.collect(LONG_S)
    server.stands_still = True

    time.sleep(2 * SHORT_S)

    assert engine.collect(0.0) == []


@pytest.mark.parametrize("call", ["alive", "usage"])
def test_what_was_stopped_in_its_sleep_has_not_been_silent(make, monkeypatch, call):
    """Worker and server stand still while the worker waits for an answer that it asked for before."""
    stood_still_s = [0.0]
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda _: time.monotonic() + stood_still_s[0])
    server = Moody()
    engine = make(server, ServerTimeouts(silence_s=LONG_S, stall_s=LONG_S, load_s=LONG_S))
    server.hangs_in = call
    assert server.was_asked.wait(LONG_S)
    engine.sleep()

    server.hangs_in = ""
    server.looks = threading.Semaphore(0)
    stood_still_s[0] = 10 * LONG_S
    engine._loop.call_soon_threadsafe(lambda: None)

    assert all(server.looks.acquire(timeout=120.0) for _ in range(2)), "the watchdog looks on"
    engine.wake()
