"""Answers of a server in segments: a segment is one call, sampled by one version; a new version begins a new segment.

While weights change a gate is closed: calls in flight are given up with the tokens that they have, and made again
behind these tokens once the gate is open; scores are asked for again. So version spans are exact on every server,
whatever it does to requests in flight or to requests that come meanwhile, and no cached state of old weights meets new
ones.
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog

from mrl.alignment.aligned_batch import GrowingArray
from mrl.engines.engine import (
    NOTHING,
    FinishedAnswer,
    Generation,
    GenerationRequest,
    PartialAnswer,
    Sampling,
    StopStringMatcher,
    TokenScore,
)
from mrl.engines.http import Http, HttpFailure
from mrl.engines.server_backend import HalfUpdated, Paused, Segment, ServerBackend
from mrl.errors import EngineError, EngineLost, PeerLost, WeightsError
from mrl.models.tensor_broadcast import IncomingTensors
from mrl.records.chosen_experts import GrowingExperts
from mrl.records.finish import FinishReason
from mrl.records.rollouts import are_logprobs
from mrl.records.version import Version, VersionSpan, append_span

ABORT_AGAIN_S = 0.1
TOKENS_BETWEEN_STOPS = 128
"""Tokens that one call samples at most where there are stop strings: tokens behind a stop string are sampled in vain.

Servers are given ids and have no tokenizer, so they cannot look for text themselves.
"""
PASSING = (408, 409, 425, 429)
"""HTTP statuses of refusals that may pass: the server is slow, busy, or begins something else."""
REFUSALS = (400, 413, 422)
"""HTTP statuses with which a server refuses a request for good."""
PATIENCE = 4
"""A call counts as forgotten once PATIENCE times as many tokens have come as all calls have together at their longest.

In a queue that is served in order, twice as many come at most: those of calls ahead of it, and those of calls beside
it. PATIENCE may be too low only where `server.options` let other calls overtake a call many times: speculation, prompts
in many parts, other policies.
"""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class AbortedRequest:
    """End of a request that was aborted; `num_answers` of its answers never come."""

    request_id: str
    num_answers: int


class Segments:
    """The calls in flight on one server, and the weights that it serves. Lives in one event loop."""

    def __init__(self, backend: ServerBackend, http: Http, sampling: Sampling, *, drain_s: float) -> None:
        """`drain_s` bounds the wait for calls that were given up, in seconds."""
        self._backend, self._http, self._sampling, self._drain_s = backend, http, sampling, drain_s
        self._gate = asyncio.Event()
        self._gate.set()
        self._calls: dict[str, int] = {}
        """Name of each call in flight, the oldest first -> tokens that had come from all calls before it."""
        self._most_calls = self._num_scores = 0
        self._no_calls = asyncio.Event()
        self._no_calls.set()
        self._version: Version | None = None
        self._reported = ""
        self._updating = asyncio.Lock()
        self._sleeps = False
        self._is_whole = True
        """Whether the server holds the weights of one version."""
        self.generated_tokens = 0

    @property
    def is_updating(self) -> bool:
        """Whether weights are being changed or hashed now, or the server sleeps."""
        return self._updating.locked() or self._sleeps

    @property
    def version(self) -> Version | None:
        """Version that the server samples and scores with; None while it holds no whole version."""
        return self._version if self._is_whole else None

    def label(self, version: Version, reported: str) -> None:
        """Label tokens with `version` from now on; `reported` is the label that the server itself gives for it."""
        self._version, self._reported = version, reported

    async def answer(
        self, request: GenerationRequest, index: int, tell: Callable[[PartialAnswer], None] = lambda grown: None
    ) -> FinishedAnswer:
        """Sample one answer to its end, over as many versions as come; `tell` takes its progress, if it streams."""
        prompt = request.prompt_token_ids.tolist()
        answer = _Answer(self._sampling.decoded(request.decoding), request.num_told_before(index))
        seed = int(request.seeds[index])
        while answer.finish_reason is FinishReason.ABORT:
            await self._gate.wait()
            version = self._version
            assert version is not None, "no request is accepted before weights are loaded"
            name = f"{request.request_id}/{index}/{answer.num_segments}"
            before, wanted = prompt + answer.token_ids.tolist(), answer.tokens_wanted
            sampling = answer.next_sampling()
            asked = {"max_new_tokens": wanted, "seed": _seed_of(seed, answer.num_segments), "request_id": name}
            if sampling.tells_experts:
                asked["experts_from"] = len(before) - 1 - answer.experts.num_untold
            parts = self._parts(before, sampling, streams=request.streams, **asked)
            answer.num_segments, num_sampled = answer.num_segments + 1, 0
            with self._refusals(len(before), wanted), self._in_flight(name):
                async with aclosing(parts):
                    async for part in parts:
                        self._check(part, version)
                        num_sampled += len(part.token_ids)
                        if part.finish_reason is FinishReason.LENGTH and num_sampled < wanted:
                            raise _too_long(len(before), wanted)
                        answer.add(part, version)
                        self.generated_tokens += len(part.token_ids)
                        if answer.finish_reason is FinishReason.ABORT:
                            if request.streams and part.token_ids:
                                tell(PartialAnswer(request.request_id, index, answer.generation()))
                        elif part.finish_reason is FinishReason.ABORT:
                            break  # at a stop string, which the server does not know
            self._check_remembered()
        return FinishedAnswer(request.request_id, index, answer.generation())

    async def score(
        self, rows: Sequence[Sequence[int]], temperature: float, num_likeliest: int
    ) -> list[list[TokenScore] | None]:
        """Score every token after the first of each row, each row by one version. The caller bounds the wait.

        None for a row that the server refuses: no other server would take it.
        """
        return list(await asyncio.gather(*(self._score(row, temperature, num_likeliest) for row in rows)))

    async def _score(self, token_ids: Sequence[int], temperature: float, num_likeliest: int) -> list[TokenScore] | None:
        scored: list[TokenScore] | None = None
        while scored is None:
            await self._gate.wait()
            self._num_scores += 1
            with self._in_flight(f"score/{self._num_scores}"):
                try:
                    scored = await self._backend.score(self._http, token_ids, temperature, num_likeliest)
                except Paused:
                    if self._gate.is_set():
                        raise
                except HttpFailure as failure:
                    if failure.status not in REFUSALS:
                        raise
                    log.warning("text not scored: the server refused the request", reason=str(failure))
                    return None
        return scored

    async def load(self, folder: Path, version: Version) -> None:
        """Load new weights. Raises WeightsError, EngineLost; the gate is open again unless the engine is lost."""
        await self._change(lambda: self._backend.load(self._http, folder, str(version)), version)

    async def load_adapters(self, folder: Path, version: Version) -> None:
        """Load new adapters, on the weights that the server started with; else as `load`."""
        await self._change(lambda: self._backend.load_adapters(self._http, folder, str(version)), version)

    async def receive(self, incoming: IncomingTensors, version: Version) -> None:
        """Take new weights by a broadcast. Raises PeerLost; after HalfUpdated the gate opens with the next load."""
        await self._backend.prepare_broadcast(self._http, incoming)
        await self._change(lambda: self._backend.receive(self._http, incoming, str(version)), version)

    async def checksums(self) -> dict[str, str] | None:
        """Return the server's digests of its weights; `is_updating` meanwhile, since the server may not answer."""
        async with self._updating:
            return await self._backend.checksums(self._http)

    async def sleep(self) -> None:
        """Give up all calls, and free the server's memory; the gate opens again with the next weights."""
        async with self._updating:
            self._gate.clear()
            await self._drain()
            self._sleeps, self._is_whole = True, False
            await self._backend.sleep(self._http)

    async def wake(self) -> None:
        """Let the server take its memory again."""
        await self._backend.wake(self._http)
        self._sleeps = False

    async def _change(self, change: Callable[[], Awaitable[None]], version: Version) -> None:
        async with self._updating:
            self._gate.clear()
            await self._drain()
            try:
                await change()
            except (WeightsError, PeerLost, EngineError) as error:
                await self._go_on(is_whole=self._is_whole and not isinstance(error, HalfUpdated))
                raise
            self.label(version, str(version))
            await self._go_on(is_whole=True)

    async def _go_on(self, *, is_whole: bool) -> None:
        """Resume the server after a change of weights, or one that it refused. After other failures it is lost."""
        self._is_whole = is_whole
        await self._backend.resume(self._http)
        if is_whole:
            self._gate.set()

    async def _drain(self) -> None:
        """Give up all calls, again and again: a call may still be under way to the server. Raises EngineLost."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._drain_s
        await self._backend.abort_all(self._http)
        while not self._no_calls.is_set():
            try:
                await asyncio.wait_for(self._no_calls.wait(), ABORT_AGAIN_S)
            except TimeoutError:
                if loop.time() > deadline_s:
                    raise EngineLost(
                        f"{len(self._calls)} answers were not aborted by the server within {self._drain_s:g} s"
                    ) from None
                await self._backend.abort_all(self._http)

    async def _parts(
        self, token_ids: list[int], sampling: Sampling, *, streams: bool, **asked: Any
    ) -> AsyncGenerator[Segment, None]:
        """Sample one call, and yield its tokens: in parts as they come, if it streams, else in one part."""
        if not streams:
            yield await self._backend.generate(self._http, token_ids, sampling, **asked)
            return
        async with aclosing(self._backend.stream(self._http, token_ids, sampling, **asked)) as parts:
            async for part in parts:
                yield part

    @contextmanager
    def _refusals(self, num_tokens: int, max_new_tokens: int) -> Iterator[None]:
        """Turn a refusal of the server into EngineError; a pause for an update ends the call without further tokens."""
        try:
            yield
        except Paused:
            if self._gate.is_set():  # it opens after every call that our update has met: not our pause
                raise
        except HttpFailure as failure:
            if 400 <= failure.status < 500 and failure.status not in PASSING:
                raise self._refused(failure, num_tokens, max_new_tokens) from failure
            raise

    @contextmanager
    def _in_flight(self, name: str) -> Iterator[None]:
        """Count a call as in flight, so that an update waits for its end."""
        self._calls[name] = self.generated_tokens
        self._most_calls = max(self._most_calls, len(self._calls))
        self._no_calls.clear()
        try:
            yield
        finally:
            del self._calls[name]
            if not self._calls:
                self._no_calls.set()

    def _refused(self, failure: HttpFailure, num_tokens: int, max_new_tokens: int) -> EngineError:
        """Return EngineError, not EngineLost: a server that was started anew would refuse the same request."""
        return EngineError(
            "the server refused to sample an answer",
            where=f"{self._backend.name} at {self._http.base_url}",
            got=str(failure),
            wanted=f"an answer of {max_new_tokens} tokens after {num_tokens} tokens",
            cure="if the length is the reason, raise server.context_tokens, or lower max_new_tokens or "
            "tasks.X.max_prompt_chars; otherwise follow the server's message",
        )

    def _check_remembered(self) -> None:
        """Check that the oldest call is not forgotten while later calls end again and again. Raises EngineLost."""
        oldest, tokens_before = next(iter(self._calls.items()), ("", self.generated_tokens))
        tokens_since = self.generated_tokens - tokens_before
        if tokens_since > PATIENCE * self._most_calls * self._sampling.max_new_tokens:
            raise EngineLost(
                f"the server no longer answers request {oldest}: it sent {tokens_since} tokens of later requests"
            )

    def _check(self, segment: Segment, version: Version) -> None:
        if any(label != self._reported for label in segment.labels):
            raise EngineLost(
                f"the server reports weights {segment.labels}, wanted {self._reported!r} (version {version})"
            )
        if len(segment.token_ids) != len(segment.logprobs):
            raise EngineLost(
                f"the server sent {len(segment.token_ids)} tokens with {len(segment.logprobs)} log-probabilities"
            )
        if not are_logprobs(segment.logprobs):
            raise EngineLost("the server sent an invalid log-probability for a sampled token")


class _Answer:
    """One answer that is being sampled; `finish_reason` is ABORT until it has ended."""

    def __init__(self, sampling: Sampling, num_told_before: int = 0) -> None:
        self._sampling, self._watch = sampling, StopStringMatcher(sampling.stop)
        self.experts = GrowingExperts(num_told_before)
        self._token_ids, self._logprobs = GrowingArray(NOTHING.token_ids, 1), GrowingArray(NOTHING.logprobs, 1)
        """Growing arrays, of which views are told after every token of a stream: what was told stays as it is."""
        self.finish_reason = FinishReason.ABORT
        self.num_segments = 0
        """Segments that were begun."""
        self._versions: list[VersionSpan] = []

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """[T] token ids so far."""
        return self._token_ids.written()

    @property
    def tokens_left(self) -> int:
        return self._sampling.max_new_tokens - len(self.token_ids)

    @property
    def tokens_wanted(self) -> int:
        """Token limit of the next segment."""
        return self.tokens_left if self._sampling.stop is None else min(self.tokens_left, TOKENS_BETWEEN_STOPS)

    def next_sampling(self) -> Sampling:
        """Sampling of the next segment. Once experts of earlier tokens are missing, no more are asked for: new weights
        would tell other experts for those tokens.
        """
        if self.token_ids.size and self.experts.num_untold:
            self._sampling = replace(self._sampling, tells_experts=False)
        return self._sampling

    def add(self, segment: Segment, version: Version) -> None:
        end = self._watch.ends_at(segment.token_ids)
        self._token_ids.append(np.array(segment.token_ids[:end], dtype=np.int32), 0)
        self._logprobs.append(np.array(segment.logprobs[:end], dtype=np.float32), 0)
        if self._sampling.tells_experts:  # a server may tell experts unasked, and then for other places
            self.experts.add(len(segment.token_ids[:end]), segment.experts)
        self._versions = append_span(self._versions, len(segment.token_ids[:end]), version)
        self.finish_reason = self._reason(segment.finish_reason) if end is None else FinishReason.STOP

    def _reason(self, reason: FinishReason) -> FinishReason:
        """Reason of the answer, from that of a segment. An answer that is aborted right after its EOS has ended; the
        limit of a segment does not end an answer."""
        if reason is FinishReason.ABORT and self.token_ids.size and self.token_ids[-1] in self._sampling.eos_ids:
            return FinishReason.STOP
        if reason is not FinishReason.STOP:
            return FinishReason.ABORT if self.tokens_left > 0 else FinishReason.LENGTH
        return reason

    def generation(self) -> Generation:
        return Generation(
            self.token_ids,
            self._logprobs.written(),
            self._versions,
            self.finish_reason,
            experts=self.experts.joined(),
        )


def _too_long(num_tokens: int, max_new_tokens: int) -> EngineError:
    got = f"{num_tokens} tokens before the answer, {max_new_tokens} to sample"
    return EngineError("an answer exceeds the server's context", got=got, cure="raise server.context_tokens")


def _seed_of(seed: int, segment: int) -> int:
    """Seed (31 bits) of a segment: with the seed of the answer, each segment would draw the same numbers."""
    digest = hashlib.blake2b(f"{seed}|{segment}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
