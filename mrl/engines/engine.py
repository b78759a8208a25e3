"""Contract of every engine with a rollout worker: requests are handed in at any time, answers come out as they end.

One thread submits and collects. Another thread may load weights, score sequences and read usage meanwhile.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mrl.models.tensor_broadcast import BroadcastRanks, IncomingTensors
from mrl.records.chosen_experts import Experts
from mrl.records.finish import FinishReason
from mrl.records.version import Version, VersionSpan


@dataclass(frozen=True, slots=True)
class Decoding:
    """Sampling settings of an answer that is not trained on. The engine decides of which distribution its
    log-probabilities are."""

    temperature: float
    """0 takes the likeliest token (greedy)."""
    top_p: float = 1.0
    """Probability of the nucleus, the likeliest tokens from which a token is sampled (arXiv 1904.09751); above 0 and at
    most 1, which takes all tokens."""
    max_new_tokens: int | None = None
    """Tokens of the answer, at most. None, or more than the policy's own limit: that limit."""
    stop: "StopStrings | None" = None
    """None: the stop strings of the policy."""


@dataclass(frozen=True, slots=True)
class StopStrings:
    """Texts that end an answer, looked for in the bytes of its tokens; the tokens stay as they were sampled.

    A stop string may begin in one token and end within another.
    """

    texts: tuple[bytes, ...]
    """The stop strings as UTF-8, none of them empty."""
    first_bytes: Callable[[Sequence[int]], bytes]
    """Token ids at the beginning of an answer -> bytes; the first token of a text may lose a space."""
    further_bytes: Callable[[Sequence[int]], bytes]
    """Token ids that follow others -> bytes."""


class StopStringMatcher:
    """Looks for stop strings in one answer as it grows."""

    def __init__(self, stop: StopStrings | None) -> None:
        """Without `stop` no stop string is ever found."""
        self._stop, self._tail, self._is_begun = stop, b"", False
        self._kept_bytes = max(map(len, stop.texts), default=0) - 1 if stop else 0

    @property
    def looks(self) -> bool:
        """Whether there are stop strings to look for."""
        return self._stop is not None

    def ends_at(self, token_ids: Sequence[int]) -> int | None:
        """Return how many of the next tokens belong to the answer, up to the token that completes a stop string.

        None: all of them. After an end it is not called again.
        """
        if self._stop is None or (self._is_begun and self._passes(token_ids)):
            return None
        for count, token_id in enumerate(token_ids, start=1):
            spelled = self._stop.further_bytes([token_id])
            if spelled and not self._is_begun:
                self._is_begun, spelled = True, self._stop.first_bytes([token_id])
            text = self._tail + spelled
            if any(one in text for one in self._stop.texts):
                return count
            self._keep(text)
        return None

    def _passes(self, token_ids: Sequence[int]) -> bool:
        """Whether none of these tokens, looked at together, completes a stop string; if so, note them as passed."""
        assert self._stop is not None
        text = self._tail + self._stop.further_bytes(token_ids)
        if any(one in text for one in self._stop.texts):
            return False
        self._keep(text)
        return True

    def _keep(self, text: bytes) -> None:
        self._tail = text[max(0, len(text) - self._kept_bytes) :]


def before_stop(completion: bytes, texts: Sequence[bytes]) -> bytes:
    """Return the completion up to its first stop string; all of it where there is none."""
    return completion[: min((place for text in texts if (place := completion.find(text)) >= 0), default=None)]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of a policy, for all its answers but those with a Decoding.

    Log-probabilities are those of the sampling distribution: softmax(logits / temperature) over the whole vocabulary.
    """

    temperature: float
    max_new_tokens: int
    eos_ids: tuple[int, ...]
    """Token ids of which any ends an answer, as its last token."""
    stop: StopStrings | None = None
    """Stop strings, which end an answer as well."""
    top_p: float = 1.0
    """See `Decoding.top_p`."""
    tells_experts: bool = False
    """Whether answers say which experts their tokens went to; answers with a Decoding never do."""

    def decoded(self, decoding: Decoding | None) -> "Sampling":
        """Return these settings, overridden by a Decoding if there is one."""
        if decoding is None:
            return self
        limit = self.max_new_tokens if decoding.max_new_tokens is None else decoding.max_new_tokens
        return replace(
            self,
            temperature=decoding.temperature,
            top_p=decoding.top_p,
            max_new_tokens=min(limit, self.max_new_tokens),
            stop=decoding.stop or self.stop,
            tells_experts=False,
        )


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Request to sample G answers to one prompt."""

    request_id: str
    """Unique among the requests in flight, and never that of an aborted request."""
    prompt_token_ids: npt.NDArray[np.int32]
    seeds: npt.NDArray[np.uint64]
    """[G] one seed per answer."""
    may_be_refused: bool = False
    """Whether an engine that does not take the request gives answers without a token in place of EngineError."""
    decoding: Decoding | None = None
    """None: the Sampling of the engine."""
    streams: bool = False
    """Whether `grown` tells how far the answers have come."""
    tells_prompt: bool = False
    """Whether the first answer, if it tells experts, tells those of the prompt, too."""
    conversations: tuple[str, ...] = ()
    """[G] names: by that of an answer, a later request may reuse the answer's keys and values. () where none does."""

    def num_told_before(self, index: int) -> int:
        """Rows of experts that answer `index` has for the prompt, P - 1 for P prompt tokens, or 0."""
        return self.prompt_token_ids.size - 1 if self.tells_prompt and index == 0 else 0


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled answer of T tokens."""

    token_ids: npt.NDArray[np.int32]
    """[T], up to and with the EOS, or the token that completes a stop string, if the answer is `finished`."""
    logprobs: npt.NDArray[np.float32]
    """[T] log-probabilities in the sampling distribution, in nats."""
    versions: list[VersionSpan]
    """Which version sampled which tokens; one span unless weights were loaded in mid-answer."""
    finish_reason: FinishReason
    experts: Experts | None = field(default=None, kw_only=True)
    """[R, X] (`mrl.records.chosen_experts`): the last T rows are those of the tokens, rows before them belong to the
    prompt. None where the answer's Sampling tells none, or those of some token are not known."""

    @property
    def finished(self) -> bool:
        """Whether the policy ended the answer itself."""
        return self.finish_reason is FinishReason.STOP


NOTHING = Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), [], FinishReason.ABORT)
"""An answer without a token."""


@dataclass(frozen=True, slots=True)
class FinishedAnswer:
    """One answer of a request, which has ended."""

    request_id: str
    index: int
    """Number of the answer within its request: the place of its seed."""
    generation: Generation


@dataclass(frozen=True, slots=True)
class PartialAnswer:
    """How far one answer of a request with `streams` has come: its tokens so far, which stay; more will follow."""

    request_id: str
    index: int
    generation: Generation
    """The answer so far; `finish_reason` is ABORT, in place of the reason that is not known yet."""


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """Request for the policy's log-probabilities of the tokens of given answers to one prompt."""

    prompt_token_ids: npt.NDArray[np.int32]
    answers: Sequence[npt.NDArray[np.int32]]
    """[T] token ids of each answer, none empty."""
    num_likeliest: int = 0
    """K, the number of likeliest tokens to tell in the place of each token; at most `MAX_LIKELIEST`."""


class ScoredAnswer(NamedTuple):
    """The policy's log-probabilities of an answer of T given tokens, in nats at the sampling temperature."""

    logprobs: npt.NDArray[np.float32]
    """[T] of the given tokens."""
    likeliest_ids: npt.NDArray[np.int32]
    """[T, K] the likeliest tokens in the place of each token, best first; -1 where fewer are known."""
    likeliest_logprobs: npt.NDArray[np.float32]
    """[T, K] of the likeliest tokens; -inf where fewer are known."""

    @classmethod
    def of(cls, scores: Sequence["TokenScore"], num_likeliest: int) -> "ScoredAnswer":
        """Return the scores of an answer's tokens as arrays."""
        ids = np.full((len(scores), num_likeliest), -1, dtype=np.int32)
        logprobs = np.full((len(scores), num_likeliest), -np.inf, dtype=np.float32)
        for place, score in enumerate(scores):
            for rank, (token_id, logprob) in enumerate(score.likeliest):
                ids[place, rank], logprobs[place, rank] = token_id, logprob
        return cls(np.array([score.logprob for score in scores], dtype=np.float32), ids, logprobs)


class TokenScore(NamedTuple):
    """The policy's log-probability of a given token, in nats."""

    logprob: float
    likeliest: Sequence[tuple[int, float]] = ()
    """The likeliest tokens in its place with their log-probabilities, best first."""


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """How full an engine is now."""

    running: int
    """Number of answers that are being sampled."""
    waiting: int
    """Number of answers that the engine holds and does not sample yet."""
    cache_share: float
    """Share of the key-value cache in use, 0 to 1; 0 in an engine where a begun answer never lacks room."""
    generated_tokens: int
    """Tokens sampled since the engine started; stands still in an engine that hangs."""
    prompt_tokens: int = 0
    """Tokens of prompts since the engine started."""
    reused_prompt_tokens: int = 0
    """Tokens of prompts whose keys and values were kept from earlier computations."""


class Engine(Protocol):
    """Samples answers and scores sequences, and labels every token with the version that sampled it.

    Every method raises EngineLost when the engine died, hangs, or serves other weights than it says. Then `restart`
    makes it anew, without weights to serve and without the requests that were handed in.
    """

    @property
    def version(self) -> Version | None:
        """The version that tokens are labelled with from now on; None when there are no weights to serve."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Hand in requests; never waits. Raises WeightsError when there are no weights to serve."""

    def collect(self, timeout_s: float) -> list[FinishedAnswer]:
        """Return the answers that ended since the last call, in the order in which they ended.

        Waits for the first answer, at most `timeout_s`, and not at all when nothing is in flight. New tokens of a
        request with `streams` end the wait, too.
        """

    def grown(self) -> list[PartialAnswer]:
        """Return the answers of requests with `streams` that had new tokens by the last `collect`, and have not ended.

        Call it from the thread that collects.
        """

    def nudge(self) -> None:
        """Have a waiting `collect` return as soon as it can, so that its thread can do other work. From any thread."""

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests: none of their answers is collected any more."""

    def load(self, folder: Path, version: Version, digests: Mapping[str, str] | None = None) -> None:
        """Serve the weights of a Hugging Face folder as `version`; answers in flight go on under them.

        `digests` gives, for every tensor, `mrl.models.tensor_file.digest` of what was published.
        Raises WeightsError when the weights do not fit or are not what was published; the old weights are served on.
        """

    def load_adapters(self, folder: Path, version: Version, digests: Mapping[str, str] | None = None) -> None:
        """Serve adapters in peft's format, on the weights that the engine started with, as `version`; else as `load`.

        Raises EngineError where the engine cannot.
        """

    def broadcast_seats(self) -> BroadcastRanks:
        """Ranks of a broadcast that the engine takes. Raises EngineError where it takes weights from files alone."""

    def receive(self, incoming: IncomingTensors, version: Version) -> None:
        """Serve weights that come by a broadcast as `version`; else as `load`.

        Raises PeerLost when the members of the broadcast do not meet, or it comes apart. Then the old weights are
        served on, or none where the engine has to write over them.
        """

    def label(self, version: Version) -> None:
        """Declare that the weights which the engine started with are `version`."""

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities in nats of every token after the first under the loaded weights, at temperature 1."""

    def score_answers(self, request: ScoringRequest) -> Sequence[ScoredAnswer | None]:
        """Score the tokens of each answer of a request.

        None for an answer that the engine does not take, such as an answer that is too long.
        Raises WeightsError when there are no weights to serve.
        """

    def score_given(self, token_ids: Sequence[int]) -> list[TokenScore] | None:
        """Score every token after the first at temperature 1, each beside the likeliest token in its place.

        None for a text that the engine does not take.

        Raises WeightsError when there are no weights to serve.
        """

    def checksums(self) -> dict[str, str] | None:
        """Name -> digest of the bytes of every tensor as the engine holds it; None where an engine cannot tell.

        Digests are of the same kind as those of the weights' manifest.
        """

    def usage(self) -> EngineUsage:
        """Return how full the engine is; may be a second old."""

    def sleep(self) -> None:
        """Forget everything in flight and free the cache and the accelerator; there are no weights to serve then.

        Raises EngineError where the engine cannot.
        """

    def wake(self) -> None:
        """Take memory again after `sleep`, so that weights can be loaded."""

    def restart(self) -> None:
        """Start anew, bounded in time; call it from the thread that made the engine. Raises EngineLost, UserError."""

    def close(self) -> None:
        """End the engine with all its processes. May be called twice."""


def generate_all(engine: Engine, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:
    """Return all answers of all requests, in their order, from an engine that has nothing else in flight."""
    engine.submit(requests)
    found: dict[str, dict[int, Generation]] = {request.request_id: {} for request in requests}
    missing = sum(request.seeds.size for request in requests)
    while missing:
        for finished in engine.collect(1.0):
            found[finished.request_id][finished.index] = finished.generation
            missing -= 1
    return [[found[request.request_id][index] for index in range(request.seeds.size)] for request in requests]
