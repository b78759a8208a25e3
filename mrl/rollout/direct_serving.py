"""Requests outside of episodes, answered by a worker's engine beside its groups: a bounded share, never trained on.

Requests wait here for places that groups leave free. An answer is sent once the versions that sampled it are proved; a
streamed answer is sent in pieces, each under the same condition.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from mrl.engines.engine import Engine, FinishedAnswer, Generation, GenerationRequest, TokenScore
from mrl.errors import RecordError
from mrl.records.direct_requests import (
    LOST,
    DirectAnswer,
    DirectChunk,
    DirectRefusal,
    DirectRequest,
    FromGateway,
    FromWorker,
    TokenLogprob,
    WithdrawnRequest,
    WorkerRoom,
)
from mrl.records.episodes import ToolCall
from mrl.records.finish import FinishReason
from mrl.records.version import Version
from mrl.rollout.direct_codec import DirectRequestCodec
from mrl.rollout.held_out_answers import HeldOutShare, InFlight

SCORING_S = 0.05
"""Seconds of scoring after which sampling goes on, whatever is still to be scored."""

Int32s = npt.NDArray[np.int32]


class DirectChannel(Protocol):
    """Methods of a worker's line to the gateway that are used here."""

    def take(self) -> list[FromGateway]:
        """Return messages since the last call; never waits. A withdrawal without an id is of all requests."""

    def send(self, message: FromWorker) -> None:
        """Send a message; never waits."""


@dataclass(eq=False)
class _Asked:
    request: DirectRequest
    prompt: Int32s
    given: tuple[TokenLogprob, ...] = ()
    num_told_tokens: int = 0
    num_told_chars: int = 0
    """Tokens and characters of the answer that were sent in pieces."""


class DirectServing:
    """Requests outside of episodes that one worker holds. Only the worker's thread calls it."""

    def __init__(
        self,
        line: DirectChannel,
        codec: DirectRequestCodec,
        engine: Engine,
        *,
        share: float,
        group_size: int,
        is_kept: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`share` bounds the places for requests, of which there is at least one, and the time for scores while groups
        are sampled.

        `is_kept` says that the engine serves an earlier step, from its checkpoint.
        """
        self._line, self._codec, self._engine, self._is_kept = line, codec, engine, is_kept
        self._share, self._clock = share, clock
        self._places, self._numbers = HeldOutShare(share, group_size), itertools.count()
        self._to_score, self._ready = deque[_Asked](), deque[_Asked]()
        self._flying: dict[str, _Asked] = {}
        self._held: list[tuple[_Asked, Generation]] = []
        self._grown: dict[str, Generation] = {}
        """Request id -> streamed answer in flight, where its newest tokens are not proved and not sent."""
        self._score_due_s = clock()
        self._room: WorkerRoom | None = None
        self._newest: tuple[DirectRequest, Int32s | str] | None = None
        self._num_answers = self._num_tokens = self._num_scored = 0

    @property
    def in_flight(self) -> int:
        """Answers that the engine has been handed and that have not come."""
        return len(self._flying)

    @property
    def has_work(self) -> bool:
        """Whether any request is in flight, waits, or came just now."""
        self._hear()
        return bool(self._flying or self._ready or self._to_score or self._held)

    def serve(self, max_answers: int, in_flight: InFlight, is_good: Callable[[Version], bool]) -> None:
        """Send complete answers, then score and hand in requests that have room; nothing under unproved weights.

        `in_flight` counts all answers that the worker has in the engine.
        """
        self._hear()
        self._answer(is_good)
        self._tell_grown(is_good)
        version = self._engine.version
        if version is None or not is_good(version):
            return
        room = max(1, int(self._share * max_answers)) if max_answers else 0  # 0: the worker has no lease
        self._tell(WorkerRoom(self._codec.policy, room, version.step, self._is_kept))
        if not room:
            return
        self._score(version, beside=any(in_flight[:2]))
        others = InFlight(in_flight.of_groups + in_flight.held_out, self.in_flight)
        room = self._places.room(max_answers, others).beside
        requests = [self._depart(self._ready.popleft()) for _ in range(min(room, len(self._ready)))]
        if requests:
            self._places.departed(groups=False)
            self._engine.submit(requests)

    def departed(self) -> None:
        """Note that groups were handed in."""
        self._places.departed(groups=True)

    def arrive(self, finished: Iterable[FinishedAnswer], is_good: Callable[[Version], bool]) -> list[FinishedAnswer]:
        """Take in own answers, and send those whose weights are proved; return the other answers."""
        others = []
        for one in finished:
            asked = self._flying.pop(one.request_id, None)
            if asked is None:
                others.append(one)
            else:
                self._held.append((asked, one.generation))
        self._answer(is_good)
        return others

    def lose(self) -> list[str]:
        """Give all requests back to the gateway, for another worker; return the names of those in the engine."""
        self._tell(WorkerRoom(self._codec.policy, 0, None))  # first, or the gateway would send the same again
        asked = [*self._to_score, *self._ready, *self._flying.values(), *(one for one, _ in self._held)]
        for one in asked:
            self._refuse(one.request, LOST, "the worker lost its engine or its lease")
        flying = list(self._flying)
        self._to_score.clear()
        self._ready.clear()
        self._flying.clear()
        self._held.clear()
        self._grown.clear()
        return flying

    def values(self) -> dict[str, float]:
        """Return the counters as metrics."""
        return {
            "plain/answers": self._num_answers,
            "plain/tokens": self._num_tokens,
            "plain/scored_tokens": self._num_scored,
        }

    def _hear(self) -> None:
        for message in self._line.take():
            if isinstance(message, WithdrawnRequest):
                self._withdraw(message.request_id)
                continue
            prompt = self._prompt(message)
            if isinstance(prompt, str):
                self._refuse(message, "invalid_request", prompt)
                continue
            asked = _Asked(message, prompt)
            (self._to_score if message.scores_given else self._ready).append(asked)

    def _prompt(self, request: DirectRequest) -> Int32s | str:
        """Return the prompt, [P], or why there is none; tokenized once for several answers to one prompt."""
        alike = msgspec.structs.replace(request, request_id="", seed=0)
        if self._newest is None or self._newest[0] != alike:
            try:
                found: Int32s | str = self._codec.prompt(request)
            except (ValueError, RecordError) as error:
                found = str(error)
            self._newest = alike, found
        return self._newest[1]

    def _withdraw(self, request_id: str) -> None:
        def stays(asked: _Asked) -> bool:
            return bool(request_id) and asked.request.request_id != request_id

        gone = [name for name, asked in self._flying.items() if not stays(asked)]
        if gone:
            self._engine.abort(gone)
        for name in gone:
            del self._flying[name]
        self._to_score = deque(asked for asked in self._to_score if stays(asked))
        self._ready = deque(asked for asked in self._ready if stays(asked))
        self._held = [(asked, generation) for asked, generation in self._held if stays(asked)]

    def _tell(self, room: WorkerRoom) -> None:
        if room != self._room:
            self._room = room
            self._line.send(room)

    def _score(self, version: Version, *, beside: bool) -> None:
        """Score waiting texts for a slice of time; while answers are sampled `beside`, within the share of time."""
        began_s = now_s = self._clock()
        while self._to_score and now_s >= self._score_due_s and now_s - began_s < SCORING_S:
            asked = self._to_score[0]
            scores = self._engine.score_given(asked.prompt.tolist()) if asked.prompt.size > 1 else []
            before_s, now_s = now_s, self._clock()
            self._score_due_s = now_s + (now_s - before_s) * (1 / self._share - 1) * beside
            if self._engine.version != version:  # score again, by the newer weights
                return
            self._to_score.popleft()
            if scores is None:
                self._refuse(asked.request, "refused", "the engine refused the text; it may be too long")
                continue
            self._num_scored += len(scores)
            scored = _Asked(asked.request, asked.prompt, self._given(asked.prompt, scores))
            if self._codec.limit(asked.request):
                self._ready.append(scored)
            else:
                self._say(scored, version, None)

    def _given(self, prompt: Int32s, scores: Sequence[TokenScore]) -> tuple[TokenLogprob, ...]:
        codec, first = self._codec, int(prompt[0])
        found = [TokenLogprob(first, codec.spelled(first))]
        for token_id, score in zip(prompt[1:].tolist(), scores, strict=True):
            likeliest_id, likeliest_logprob = score.likeliest[0]
            spelled = codec.spelled(token_id), score.logprob, codec.spelled(likeliest_id)
            found.append(TokenLogprob(token_id, *spelled, likeliest_logprob))
        return tuple(found)

    def _depart(self, asked: _Asked) -> GenerationRequest:
        name = f"plain/{asked.request.request_id}#{next(self._numbers)}"
        self._flying[name] = asked
        seeds = np.array([asked.request.seed], dtype=np.uint64)
        decoding = self._codec.decoding(asked.request)
        streams = asked.request.streams
        return GenerationRequest(name, asked.prompt, seeds, may_be_refused=True, decoding=decoding, streams=streams)

    def _tell_grown(self, is_good: Callable[[Version], bool]) -> None:
        """Send new tokens of streamed answers, up to the first token whose version is not proved."""
        if any(asked.request.streams for asked in self._flying.values()):
            self._grown |= {one.request_id: one.generation for one in self._engine.grown()}
        grown, self._grown = self._grown, {}
        for name, generation in grown.items():
            asked = self._flying.get(name)
            if asked is None:  # it has ended, or is given up
                continue
            proved = list(itertools.takewhile(lambda span: is_good(span.version), generation.versions))
            if len(proved) < len(generation.versions):
                self._grown[name] = generation
            if (num_tokens := sum(span.num_tokens for span in proved)) > asked.num_told_tokens:
                self._tell_piece(asked, generation, num_tokens, proved[-1].version)

    def _tell_piece(self, asked: _Asked, generation: Generation, num_tokens: int, version: Version) -> None:
        text = self._codec.read_so_far(asked.request, generation.token_ids[:num_tokens])
        fresh = slice(asked.num_told_tokens, num_tokens)
        more, sampled = text[asked.num_told_chars :], self._sampled(generation, fresh)
        asked.num_told_tokens, asked.num_told_chars = num_tokens, max(asked.num_told_chars, len(text))
        piece = DirectChunk(request_id=asked.request.request_id, version=version.step, text=more, sampled=sampled)
        self._line.send(piece)

    def _sampled(self, generation: Generation, which: slice) -> tuple[TokenLogprob, ...]:
        pairs = zip(generation.token_ids[which].tolist(), generation.logprobs[which].tolist(), strict=True)
        return tuple(TokenLogprob(token_id, self._codec.spelled(token_id), logprob) for token_id, logprob in pairs)

    def _answer(self, is_good: Callable[[Version], bool]) -> None:
        held, self._held = self._held, []
        for asked, generation in held:
            if not generation.token_ids.size:
                self._refuse(asked.request, "refused", "the engine refused the request; it may be too long")
            elif all(is_good(span.version) for span in generation.versions):
                self._say(asked, generation.versions[-1].version, generation)
            else:
                self._held.append((asked, generation))

    def _say(self, asked: _Asked, version: Version, generation: Generation | None) -> None:
        request = asked.request
        text, calls, sampled, is_cut = "", tuple[ToolCall, ...](), tuple[TokenLogprob, ...](), True
        if generation is not None:
            is_cut = generation.finish_reason is FinishReason.LENGTH
            text, calls = self._codec.read(request, generation.token_ids, is_cut=is_cut)
            sampled = self._sampled(generation, slice(None))
        self._num_answers += 1
        self._num_tokens += len(sampled)
        self._line.send(
            DirectAnswer(
                request_id=request.request_id,
                version=version.step,
                given=asked.given,
                num_given_tokens=asked.prompt.size,
                text=text,
                tool_calls=calls,
                sampled=sampled,
                is_cut=is_cut,
            )
        )

    def _refuse(self, request: DirectRequest, code: str, words: str) -> None:
        self._line.send(DirectRefusal(request.request_id, code, words))
