"""An inference server as an engine: started as a child from its own environment, or found at a URL.

A thread of its own runs the event loop of all calls. A watchdog checks once a second that the server lives, answers,
and samples tokens; when it does not, every method raises EngineLost until `restart`.
"""

import asyncio
import contextlib
import queue
import secrets
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import structlog

from mrl.engines.engine import (
    NOTHING,
    EngineUsage,
    FinishedAnswer,
    GenerationRequest,
    PartialAnswer,
    Sampling,
    ScoredAnswer,
    ScoringRequest,
    TokenScore,
)
from mrl.engines.http import Http, HttpFailure
from mrl.engines.segments import AbortedRequest, Segments
from mrl.engines.server_backend import Launch, ServerBackend
from mrl.engines.server_process import ServerProcess, free_port
from mrl.engines.server_start import PortTaken, await_ready, check_answers, soon, why_ended
from mrl.engines.server_timeouts import USUAL, ServerTimeouts
from mrl.engines.temporary_folder import TemporaryFolder
from mrl.errors import EngineError, EngineLost, PeerLost, WeightsError
from mrl.models.tensor_broadcast import BroadcastRanks, IncomingTensors
from mrl.models.tensor_file import read_folder
from mrl.records.version import Version

T = TypeVar("T")
WATCH_S = 1.0
MAX_STARTS = 3
KEY_BYTES = 32
ASKED_S = 600.0
"""Seconds that scores, or checksums, may take; the watchdog looks meanwhile."""

log = structlog.get_logger()


class ServerEngine:
    """An inference server of one backend as an Engine."""

    def __init__(
        self,
        backend: ServerBackend,
        sampling: Sampling,
        *,
        launch: Launch | None,
        log: Path | None = None,
        url: str = "",
        bounds: ServerTimeouts = USUAL,
    ) -> None:
        """With a `launch` the server is a child that writes to `log`; without `launch` it is somebody else's, at `url`.

        Raises EngineError, with the last lines of the server's log, when the server does not come up.
        """
        assert (launch is None) == bool(url), "either `launch` or `url` is given"
        self._backend, self._sampling, self._launch, self._log = backend, sampling, launch, log
        self._url, self._bounds = url, bounds
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"{backend.name}-calls", daemon=True)
        self._thread.start()
        self._process: ServerProcess | None = None
        self._http: Http | None = None
        self._segments: Segments | None = None
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> Version | None:
        """See Engine."""
        return None if self._segments is None else self._segments.version

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See Engine."""
        self._check()
        if self.version is None:
            raise WeightsError("the engine has no weights to sample with")
        self._loop.call_soon_threadsafe(self._hand_in, list(requests))
        self._in_flight += sum(request.seeds.size for request in requests)

    def collect(self, timeout_s: float) -> list[FinishedAnswer]:
        """See Engine."""
        found: list[FinishedAnswer] = []
        with contextlib.suppress(queue.Empty):
            if self._in_flight:
                self._keep(self._finished.get(timeout=timeout_s), found)
            while True:
                self._keep(self._finished.get_nowait(), found)
        self._check()
        return found

    def grown(self) -> list[PartialAnswer]:
        """See Engine."""
        return [self._grown.pop(at) for at in list(self._grown)]

    def nudge(self) -> None:
        """See Engine."""
        self._finished.put(AbortedRequest("", 0))

    def abort(self, request_ids: Iterable[str]) -> None:
        """See Engine."""
        names = set(request_ids)
        self._forgotten |= names
        self._loop.call_soon_threadsafe(self._cancel, names)

    def load(self, folder: Path, version: Version, digests: Mapping[str, str] | None = None) -> None:
        """See Engine."""
        if digests is not None:
            self._run(self._backend.prepare_load(self._link(), folder, digests), self._bounds.load_s)
        self._run(self._current().load(folder, version), self._bounds.load_s)

    def load_adapters(self, folder: Path, version: Version, digests: Mapping[str, str] | None = None) -> None:
        """See Engine."""
        if digests is not None:
            read_folder(folder, wanted=digests)
        self._run(self._current().load_adapters(folder, version), self._bounds.load_s)

    def broadcast_seats(self) -> BroadcastRanks:
        """See Engine."""
        return self._run(self._backend.broadcast_seats(self._link()), self._bounds.silence_s)

    def receive(self, incoming: IncomingTensors, version: Version) -> None:
        """See Engine."""
        self._run(self._current().receive(incoming, version), self._bounds.load_s)

    def label(self, version: Version) -> None:
        """See Engine."""
        self._current().label(version, "")

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """See Engine."""
        return [[one.logprob for one in row or ()] for row in self._run_scores(token_ids)]

    def score_answers(self, request: ScoringRequest) -> Sequence[ScoredAnswer | None]:
        """See Engine. Raises EngineError for a temperature that the server does not score at."""
        if self.version is None:
            raise WeightsError("the engine has no weights to score with")
        prompt = request.prompt_token_ids.tolist()
        rows = [prompt + answer.tolist() for answer in request.answers]
        scored = self._run_scores(rows, self._sampling.temperature, request.num_likeliest)
        return [
            None if row is None else ScoredAnswer.of(row[len(prompt) - 1 :], request.num_likeliest) for row in scored
        ]

    def score_given(self, token_ids: Sequence[int]) -> list[TokenScore] | None:
        """See Engine."""
        return self._run_scores([token_ids], num_likeliest=1)[0]

    def checksums(self) -> dict[str, str] | None:
        """See Engine."""
        return self._run(self._current().checksums(), ASKED_S)

    def usage(self) -> EngineUsage:
        """See Engine."""
        return replace(self._usage, generated_tokens=self._current().generated_tokens)

    def sleep(self) -> None:
        """See Engine."""
        self._run(self._current().sleep(), self._bounds.silence_s)

    def wake(self) -> None:
        """See Engine."""
        self._run(self._current().wake(), self._bounds.load_s)

    def restart(self) -> None:
        """See Engine. A server that has served before and does not come up raises EngineLost: the cause may pass."""
        self._end()
        try:
            self._begin()
        except EngineError as error:
            raise EngineLost(str(error)) from error

    def close(self) -> None:
        """See Engine."""
        self._end()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    # Life of the server; called from the thread that made the engine.

    def _begin(self) -> None:
        for attempt in range(1, MAX_STARTS + 1):
            self._forget()
            try:
                self._start()
                return
            except PortTaken:
                self._end()
                if attempt == MAX_STARTS:
                    raise
            except BaseException:
                self._end()
                raise

    def _forget(self) -> None:
        self._lost: EngineLost | EngineError | None = None
        self._in_flight = 0
        self._forgotten: set[str] = set()
        self._finished: queue.SimpleQueue[FinishedAnswer | AbortedRequest] = queue.SimpleQueue()
        self._grown: dict[tuple[str, int], PartialAnswer] = {}
        self._tasks: dict[str, set[asyncio.Task[None]]] = {}
        self._usage = EngineUsage(0, 0, 0.0, 0)
        self._awaited: set[Future[Any]] = set()

    def _start(self) -> None:
        launch = self._begin_process() if self._launch is not None else None
        self._run(self._connect(launch), self._bounds.silence_s)
        start_s, port = self._bounds.start_s, launch.port if launch else 0
        ready = await_ready(self._backend, self._link(), self._process, port, start_s=start_s)
        self._run(ready, start_s + self._bounds.silence_s)
        self._run(check_answers(self._backend, self._link(), self._sampling), start_s)  # first tokens may compile
        self._loop.call_soon_threadsafe(self._spawn, self._watchdog())

    def _begin_process(self) -> Launch:
        assert self._launch is not None
        assert self._log is not None
        temporary = TemporaryFolder()
        try:
            port = free_port(self._launch.host) if self._backend.has_port else 0
            launch = replace(self._launch, port=port, private=temporary.path, key=secrets.token_hex(KEY_BYTES))
            words, variables = self._backend.command(launch), self._backend.environment(launch)
        except BaseException:
            temporary.remove()
            raise
        self._process = ServerProcess(words, variables, self._log, temporary=temporary)
        return launch

    async def _connect(self, launch: Launch | None) -> None:
        self._http = self._backend.reach(launch) if launch else Http(self._url)
        self._segments = Segments(self._backend, self._http, self._sampling, drain_s=self._bounds.silence_s)

    def _end(self) -> None:
        if self._http is not None:
            self._lost = self._lost or EngineLost("the engine is closed")
            asyncio.run_coroutine_threadsafe(self._disconnect(), self._loop).result()
            self._http = self._segments = None
        if self._process is not None:
            self._process.end()
            self._process = None

    async def _disconnect(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert self._http is not None
        await self._http.close()

    # In the event loop.

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin a task in the loop; an exception of the task ends the engine."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda done: None if done.cancelled() else self._lose_by(done.exception()))
        return task

    def _hand_in(self, requests: Sequence[GenerationRequest]) -> None:
        for one in requests:
            self._tasks[one.request_id] = {self._spawn(self._answer(one, index)) for index in range(one.seeds.size)}

    async def _answer(self, request: GenerationRequest, index: int) -> None:
        self._finished.put(await self._finish(request, index))
        tasks = self._tasks[request.request_id]
        tasks.remove(asyncio.current_task())  # type: ignore[arg-type]
        if not tasks:
            del self._tasks[request.request_id]

    async def _finish(self, request: GenerationRequest, index: int) -> FinishedAnswer:
        try:
            return await self._current().answer(request, index, self._grow)
        except EngineError as error:
            if not request.may_be_refused:
                raise
            log.warning("the server refused a request", reason=str(error))
            return FinishedAnswer(request.request_id, index, NOTHING)

    def _grow(self, grown: PartialAnswer) -> None:
        """Keep the newest progress of an answer, and wake `collect` unless its queue does so already."""
        self._grown[grown.request_id, grown.index] = grown
        if self._finished.empty():
            self.nudge()

    def _cancel(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            tasks = self._tasks.pop(request_id, set())
            for task in tasks:
                task.cancel()
            self._finished.put(AbortedRequest(request_id, len(tasks)))

    async def _watchdog(self) -> None:
        clock = self._loop.time
        heard_s = moved_s = clock()
        tokens, patience_s = -1, max(WATCH_S, self._bounds.silence_s / 4)
        while self._lost is None:
            await asyncio.sleep(WATCH_S)
            if self._process is not None and (code := self._process.exit_code()) is not None:
                self._lose(EngineLost(str(why_ended(self._backend, self._process, code))))
            updating = self._current().is_updating  # a server need not answer while it loads, which has its own limit
            lives = updating or await soon(self._backend.alive(self._link()), patience_s)
            self._usage = await soon(self._backend.usage(self._link()), patience_s) or self._usage
            updating |= self._current().is_updating  # an update, or sleep, may have begun since the server was asked
            if lives or updating:
                heard_s = clock()
            if clock() - heard_s > self._bounds.silence_s:
                self._lose(f"the server has been silent for {self._bounds.silence_s:g} s")
            if updating or not self._tasks or self._usage.generated_tokens != tokens:
                tokens, moved_s = self._usage.generated_tokens, clock()
            if clock() - moved_s > self._bounds.stall_s:
                self._lose(f"no token came for {self._bounds.stall_s:g} s while answers are in flight")

    def _lose_by(self, error: BaseException | None) -> None:
        if error is not None:
            known = isinstance(error, HttpFailure | EngineLost | EngineError)
            self._lose(error if known else f"{type(error).__name__}: {error}")

    def _lose(self, why: object) -> None:
        """Mark the engine as lost: from now on every call raises, and calls that wait are woken."""
        if self._lost is None:
            # An EngineError, which a person has to cure, stays as it is: another start would end in the same way.
            self._lost = (
                why if isinstance(why, EngineError | EngineLost) else EngineLost(f"{self._backend.name}: {why}")
            )
            self._finished.put(AbortedRequest("", 0))
            for future in tuple(self._awaited):
                future.cancel()

    # From any thread.

    def _run(self, work: Coroutine[Any, Any, T], within_s: float) -> T:
        """Run a coroutine in the loop and return its result. Raises EngineLost when it fails, or lasts too long."""
        if self._lost is not None:
            work.close()
            raise self._lost
        future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, within_s), self._loop)
        self._awaited.add(future)
        try:
            return future.result()
        except PeerLost:  # a member of a broadcast is lost; the server knows that, and goes on
            raise
        except TimeoutError as error:
            self._lose(f"no answer within {within_s:g} s")
            raise EngineLost(f"{self._backend.name}: no answer within {within_s:g} s") from error
        except CancelledError as error:
            raise self._lost or EngineLost(f"{self._backend.name}: the engine is closed") from error
        except (HttpFailure, EngineLost) as error:
            self._lose(error)
            raise EngineLost(f"{self._backend.name}: {error}") from error
        finally:
            self._awaited.discard(future)

    def _run_scores(
        self, rows: Sequence[Sequence[int]], temperature: float = 1.0, num_likeliest: int = 0
    ) -> list[list[TokenScore] | None]:
        """Score rows; the limit allows for one update of weights meanwhile."""
        return self._run(self._current().score(rows, temperature, num_likeliest), ASKED_S + self._bounds.load_s)

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _current(self) -> Segments:
        if self._segments is None:
            raise self._lost or EngineLost(f"{self._backend.name}: the engine is closed")
        return self._segments

    def _link(self) -> Http:
        if self._http is None:
            raise self._lost or EngineLost(f"{self._backend.name}: the engine is closed")
        return self._http

    def _keep(self, item: FinishedAnswer | AbortedRequest, found: list[FinishedAnswer]) -> None:
        if isinstance(item, AbortedRequest):
            for at in [at for at in list(self._grown) if at[0] == item.request_id]:
                del self._grown[at]
            self._in_flight -= item.num_answers
            self._forgotten.discard(item.request_id)
            return
        self._in_flight -= 1
        self._grown.pop((item.request_id, item.index), None)
        if item.request_id not in self._forgotten:
            found.append(item)
