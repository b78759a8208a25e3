"""Scoring for peers: log-probabilities of peers' answers under this policy.

A request holds texts, or episodes as turns. They are expressed in this policy's tokens, scored behind the prompt as
this policy renders it, and sent back as byte lengths and log-probabilities, which mean the same under every tokenizer;
those of an episode turn by turn. A text that these tokens cannot express byte for byte gets no score. Every request is
one call of the engine, so that no score depends on other requests.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import structlog
from msgspec import UNSET

from mrl.alignment.next_units import encode_units
from mrl.alignment.peer_answer import MIN_LOGPROB_NATS
from mrl.alignment.receiver import Receiver
from mrl.engines.engine import ScoredAnswer, ScoringRequest
from mrl.errors import EngineLost, TaskError
from mrl.records.codec import pack_array
from mrl.records.episodes import Opening
from mrl.records.experience import (
    ExperienceRecord,
    LikeliestUnits,
    Received,
    ScoreRecord,
    ScoreRequestRecord,
    TokenTrace,
)
from mrl.records.version import Version
from mrl.rollout.foreign_answers import ForeignAnswer, ForeignText, foreign_answers, foreign_episode
from mrl.rollout.sampling import Sampler
from mrl.sharing.peer_episodes import EpisodeRenderer

MAX_WAITING = 4096
SERVE_S = 0.5
"""Seconds of scoring after which sampling goes on, whatever requests still wait."""

Int32s = npt.NDArray[np.int32]

log = structlog.get_logger()


class ScoreLink(Protocol):
    """Methods of the exchange client that the scorer uses."""

    def take(self) -> list[Received]:
        """Return the records that came since the last call."""

    def publish(self, records: Sequence[ExperienceRecord]) -> None:
        """Hand records to the exchange."""

    def losses(self) -> Mapping[str, float]:
        """Return metrics of published records that go to no peer."""


@dataclass
class ScoringTotals:
    """Counters of one scorer since the worker started."""

    requests: int = 0
    tokens: int = 0
    refused: int = 0
    """Answers or turns without a score: own tokens cannot express them, or the engine does not take them."""
    dropped: int = 0
    """Requests dropped because too many waited, about a prompt that does not exist, or with which the engine was lost
    twice."""
    busy_s: float = 0.0
    newest_step: int = 0


class Scorer:
    """Answers score requests of peers with the engine of one worker, between its other work."""

    def __init__(
        self,
        sampler: Sampler,
        receiver: Receiver,
        exchange: ScoreLink,
        *,
        max_answer_tokens: int,
        keeps_step: bool,
        renderer: EpisodeRenderer | None = None,
        row_tokens: int = sys.maxsize,
    ) -> None:
        """With `keeps_step` a request waits until the engine serves the version of its step. `renderer` expresses
        episodes; without it they get no score. Neither does an episode longer than `row_tokens`, opening included.
        """
        self._sampler, self._receiver, self._exchange, self._renderer = sampler, receiver, exchange, renderer
        self._max_answer_tokens, self._keeps_step, self._row_tokens = max_answer_tokens, keeps_step, row_tokens
        self._waiting: deque[ScoreRequestRecord] = deque()
        self._suspect: ScoreRequestRecord | None = None
        """The request with which the engine was lost last."""
        self.totals = ScoringTotals()

    def serve(self, is_proved: Callable[[Version], bool] = lambda _: True) -> int:
        """Answer waiting requests, oldest first, for about `SERVE_S` at most; return how many were answered.

        `is_proved` tells whether the engine has proved that it serves a version; under others nothing is scored.
        """
        self._take_requests()
        if not self._waiting:
            return 0
        engine, began_s, num_done = self._sampler.engine, time.monotonic(), 0
        later: deque[ScoreRequestRecord] = deque()
        try:
            while self._waiting and time.monotonic() - began_s < SERVE_S:
                version = engine.version  # new weights may come between two requests, and in the middle of one
                if version is None or not is_proved(version):
                    break
                if self._keeps_step and self._waiting[0].newest.step > version.step:
                    later.append(self._waiting.popleft())
                elif self._answer(self._waiting[0], version):
                    self._waiting.popleft()
                    num_done += 1
        except EngineLost:  # the same request is answered when the engine is back
            self._suspect_first()
            raise
        finally:
            self._waiting.extendleft(reversed(later))
            self.totals.busy_s += time.monotonic() - began_s
        return num_done

    def values(self) -> dict[str, float]:
        """Return the counters as metrics."""
        totals = self.totals
        return {
            "scoring/requests": totals.requests,
            "scoring/tokens": totals.tokens,
            "scoring/refused_answers": totals.refused,
            "scoring/dropped_requests": totals.dropped,
            "scoring/busy_s": totals.busy_s,
            **self._exchange.losses(),
        }

    def _suspect_first(self) -> None:
        """Note that the engine was lost with the first request, and drop it the second time: scores of a long text may
        want more memory than a server has, and the next engine would be lost as well.
        """
        if self._waiting[0] is not self._suspect:
            self._suspect = self._waiting[0]
            return
        self.totals.dropped += 1
        log.warning(
            "score request dropped: the engine was lost with it twice", prompt=self._waiting.popleft().prompt_id
        )

    def _take_requests(self) -> None:
        for item in self._exchange.take():
            if isinstance(item.record, ScoreRequestRecord) and item.record.scorer == self._sampler.policy:
                self._waiting.append(item.record)
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
            self.totals.dropped += 1

    def _answer(self, request: ScoreRequestRecord, version: Version) -> bool:
        """Answer a request, or drop it; False when the engine loaded another version meanwhile: then try again."""
        try:
            scores, units = self._score(request)
        except TaskError:
            self.totals.dropped += 1
            return True
        if self._sampler.engine.version != version:
            return False
        self._exchange.publish([self._record(request, version, scores, units)])
        totals = self.totals
        totals.requests += 1
        totals.tokens += sum(len(trace.special) for trace in scores if trace)
        num_told = sum(one.num_scores for one in request.answers if one.turns or one.completion)
        totals.refused += num_told - sum(trace is not None for trace in scores)
        totals.newest_step = max(totals.newest_step, request.newest.step)
        return True

    def _score(self, request: ScoreRequestRecord) -> tuple[list[TokenTrace | None], list[LikeliestUnits | None]]:
        """Return the scores of all answers, and the likeliest units in their places if the request asks for any.

        Raises TaskError for a prompt that does not exist.
        """
        prompt_token_ids, answers = self._said(request)
        given = [answer for answer in answers if answer is not None]
        num_units = 0 if request.num_units is UNSET else request.num_units
        scoring = ScoringRequest(prompt_token_ids, [answer.token_ids for answer in given], num_units)
        scored = iter(self._sampler.engine.score_answers(scoring) if given else ())
        traces, units = list[TokenTrace | None](), list[LikeliestUnits | None]()
        for asked, answer in zip(request.answers, answers, strict=True):
            score = None if answer is None else next(scored)
            if answer is None or score is None:
                traces += [None] * asked.num_scores
                units += [None] * asked.num_scores
                continue
            ends = np.cumsum([text.token_ids.size for text in answer.texts])[:-1]
            parts = zip(*(np.split(values[answer.is_scored], ends) for values in score), strict=True)
            for text, part in zip(answer.texts, map(ScoredAnswer._make, parts), strict=True):
                traces.append(self._trace(text, part.logprobs))
                units.append(encode_units(part.likeliest_ids, part.likeliest_logprobs, self._receiver))
        return traces, units if num_units else []

    def _said(self, request: ScoreRequestRecord) -> tuple[Int32s, Sequence[ForeignAnswer | None]]:
        """Return the prompt, [P], and the answers in own tokens; None for an answer that these cannot express."""
        nothing = [None] * len(request.answers)
        if not isinstance(request.opening, Opening):
            prompt = self._sampler.prompt_token_ids(self._sampler.pool.prompt(request.prompt_id).content)
            return prompt, foreign_answers(request.answers, self._receiver, max_tokens=self._max_answer_tokens)
        renderer = self._renderer
        opening = "no_spelling" if renderer is None else renderer.opening(request.opening)
        if renderer is None or isinstance(opening, str):
            return np.zeros(0, np.int32), nothing
        room = self._row_tokens - opening.size
        found = (
            [foreign_episode(answer, self._receiver, renderer) for answer in request.answers] if room > 0 else nothing
        )
        return opening, [None if answer is None or answer.token_ids.size > room else answer for answer in found]

    def _trace(self, text: ForeignText, logprobs: npt.NDArray[np.float32]) -> TokenTrace:
        """Return scores as a record holds them, clipped to the log-probabilities that a receiver accepts."""
        return TokenTrace(
            byte_lengths=pack_array(text.byte_lengths, "i4"),
            logprobs=pack_array(np.clip(logprobs, MIN_LOGPROB_NATS, 0.0), "f4"),
            special=pack_array(self._receiver.table.is_special(text.token_ids), "u1"),
            written=text.written,
        )

    def _record(
        self,
        request: ScoreRequestRecord,
        version: Version,
        scores: list[TokenTrace | None],
        units: list[LikeliestUnits | None],
    ) -> ScoreRecord:
        policy = self._sampler.policy
        return ScoreRecord(
            record_id=f"{policy}>{request.record_id}",
            source=policy,
            oldest=version,
            newest=version,
            fingerprint=self._receiver.fingerprint,
            prompt_id=request.prompt_id,
            task=request.task,
            created_unix_s=time.time(),
            request_id=request.record_id,
            receiver=request.source,
            scores=scores,
            units=units or UNSET,
        )
