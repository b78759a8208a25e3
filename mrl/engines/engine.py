"""What every engine offers to a rollout worker: answers are handed in at any time and come out as they end.

One thread submits and collects. Weights may be loaded, sequences scored and usage read from another one meanwhile.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mrl.models.tensor_broadcast import IncomingTensors, Seats
from mrl.records.chosen_experts import Experts
from mrl.records.finish import FinishReason
from mrl.records.version import Version, VersionSpan


@dataclass(frozen=True, slots=True)
class Decoding:
    """How an answer is sampled that is not trained on. What its log-probabilities are of is up to the engine."""

    temperature: float
    """0 takes the likeliest token (greedy)."""
    top_p: float = 1.0
    """The likeliest tokens that have this probability together are sampled from (nucleus, arXiv 1904.09751); above 0
    and at most 1, which takes all."""
    max_new_tokens: int | None = None
    """None, or more than the policy's own limit: that limit."""
    stop: "StopStrings | None" = None
    """None: the policy's own."""


@dataclass(frozen=True, slots=True)
class StopStrings:
    """Texts that end an answer, looked for in the bytes of its tokens; the tokens stay as they were sampled.

    They may begin in one token and end within another.
    """

    texts: tuple[bytes, ...]
    """None of them empty."""
    first_bytes: Callable[[Sequence[int]], bytes]
    """Ids that begin an answer -> bytes; a text's first token may lose a space."""
    further_bytes: Callable[[Sequence[int]], bytes]
    """Ids behind others -> bytes."""


class StopWatch:
    """Looks for stop strings in one answer as it grows."""

    def __init__(self, stop: StopStrings | None) -> None:
        """Without any it never finds one."""
        self._stop, self._tail, self._is_begun = stop, b"", False
        self._kept_bytes = max(map(len, stop.texts), default=0) - 1 if stop else 0

    @property
    def looks(self) -> bool:
        """Whether there is anything to find."""
        return self._stop is not None

    def ends_at(self, token_ids: Sequence[int]) -> int | None:
        """How many of the next tokens are the answer's: up to the one that completes a stop string; None for all.

        After an end nothing more is asked.
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
        """Whether none of these tokens, looked at together, completes a stop string; then they are behind it."""
        assert self._stop is not None
        text = self._tail + self._stop.further_bytes(token_ids)
        if any(one in text for one in self._stop.texts):
            return False
        self._keep(text)
        return True

    def _keep(self, text: bytes) -> None:
        self._tail = text[max(0, len(text) - self._kept_bytes) :]


def before_stop(completion: bytes, texts: Sequence[bytes]) -> bytes:
    """The completion up to the first of the stop strings in it; all of it without one."""
    return completion[: min((place for text in texts if (place := completion.find(text)) >= 0), default=None)]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a policy samples; the same for all its answers but those that say otherwise.

    Log-probabilities are those of this distribution: softmax(logits / temperature) over the whole vocabulary.
    """

    temperature: float
    max_new_tokens: int
    eos_ids: tuple[int, ...]
    """Any of them ends an answer and is its last token."""
    stop: StopStrings | None = None
    """What ends one beside them."""
    top_p: float = 1.0
    """As that of `Decoding`."""
    tells_experts: bool = False
    """Whether answers say which experts their tokens went to; those with a decoding of their own never do."""

    def decoded(self, decoding: Decoding | None) -> "Sampling":
        """The same with a decoding of its own, if there is one."""
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
    """Sample `seeds.size` answers to one prompt."""

    request_id: str
    """Unique among the requests in flight, and not that of one that was aborted."""
    prompt_token_ids: npt.NDArray[np.int32]
    seeds: npt.NDArray[np.uint64]
    """[G] one seed per answer."""
    may_be_refused: bool = False
    """Whether an engine that does not take it gives answers without a token in place of EngineError."""
    decoding: Decoding | None = None
    """None: as the engine samples."""
    streams: bool = False
    """Whether `grown` tells how far its answers have come."""
    tells_prompt: bool = False
    """Whether the first of its answers, where it says experts, says those of the prompt, too."""
    conversations: tuple[str, ...] = ()
    """[G] names: a later request may go on from what is computed for an answer, under its name. () where none does."""

    def num_told_before(self, index: int) -> int:
        """Rows of the prompt that an answer with experts has before those of its tokens: of all places but the last."""
        return self.prompt_token_ids.size - 1 if self.tells_prompt and index == 0 else 0


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled answer of T tokens."""

    token_ids: npt.NDArray[np.int32]
    """[T], of a `finished` one up to its EOS, or to the token that completes a stop string."""
    logprobs: npt.NDArray[np.float32]
    """[T] of the sampling distribution, in nats."""
    versions: list[VersionSpan]
    """Which version sampled which tokens; one span unless weights were loaded in mid-answer."""
    finish_reason: FinishReason
    experts: Experts | None = field(default=None, kw_only=True)
    """[R, X] (`mrl.records.chosen_experts`): the last T rows are those of the tokens, what stands before is
    of the prompt. None where nobody asked, or those of some token are not known."""

    @property
    def finished(self) -> bool:
        """Whether the policy ended the answer itself."""
        return self.finish_reason is FinishReason.STOP


NOTHING = Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), [], FinishReason.ABORT)
"""No token."""


@dataclass(frozen=True, slots=True)
class Finished:
    """One answer of a request has ended."""

    request_id: str
    index: int
    """Which of the request's answers: the place of its seed."""
    generation: Generation


@dataclass(frozen=True, slots=True)
class Grown:
    """How far one answer of a request with `streams` has come: what is here stays, and more will follow."""

    request_id: str
    index: int
    generation: Generation
    """Its reason is ABORT, which it will not end by."""


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """Say what these answers to a prompt are worth to the policy."""

    prompt_token_ids: npt.NDArray[np.int32]
    answers: Sequence[npt.NDArray[np.int32]]
    """[T] token ids of each, none empty."""
    num_likeliest: int = 0
    """K, tokens that are told in the place of each token; at most `MAX_LIKELIEST`."""


class ScoredAnswer(NamedTuple):
    """What an answer of T given tokens is worth to the policy, in nats at the sampling temperature."""

    logprobs: npt.NDArray[np.float32]
    """[T]"""
    likeliest_ids: npt.NDArray[np.int32]
    """[T, K] the likeliest tokens in the place of each, best first; -1 where fewer are known."""
    likeliest_logprobs: npt.NDArray[np.float32]
    """[T, K]"""

    @classmethod
    def of(cls, scores: Sequence["TokenScore"], num_likeliest: int) -> "ScoredAnswer":
        """The same as arrays."""
        ids = np.full((len(scores), num_likeliest), -1, dtype=np.int32)
        logprobs = np.full((len(scores), num_likeliest), -np.inf, dtype=np.float32)
        for place, score in enumerate(scores):
            for rank, (token_id, logprob) in enumerate(score.likeliest):
                ids[place, rank], logprobs[place, rank] = token_id, logprob
        return cls(np.array([score.logprob for score in scores], dtype=np.float32), ids, logprobs)


class TokenScore(NamedTuple):
    """What a given token is worth to the policy, in nats."""

    logprob: float
    likeliest: Sequence[tuple[int, float]] = ()
    """The likeliest tokens in its place with their log-probabilities, best first."""


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """How full an engine is now."""

    running: int
    """Answers that are being sampled."""
    waiting: int
    """Answers that the engine holds and does not sample yet."""
    cache_share: float
    """Share of the key-value cache in use, 0 to 1; 0 where what is begun never lacks room."""
    generated_tokens: int
    """Tokens sampled since the engine started; stands still in an engine that hangs."""
    prompt_tokens: int = 0
    """Tokens of prompts since the engine started."""
    reused_prompt_tokens: int = 0
    """Those of them whose keys and values it had kept of what it computed before."""


class Engine(Protocol):
    """An engine labels every token with the version that sampled it.

    Every method raises EngineLost when the engine died, hangs, or serves other weights than it says. Then `restart`
    makes it anew, without weights to serve and without memory of what was handed in.
    """

    @property
    def version(self) -> Version | None:
        """The version that tokens are labelled with from now on; None when there are no weights to serve."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Hand in requests; never waits. Raises WeightsError when there are no weights to serve."""

    def collect(self, timeout_s: float) -> list[Finished]:
        """Answers that ended since the last call, in the order in which they ended.

        Waits for the first of them, at most `timeout_s`, and not at all when nothing is in flight. Returns for tokens
        of a request with `streams`, too.
        """

    def grown(self) -> list[Grown]:
        """Answers of requests with `streams` that had more tokens by the last `collect`, and have not ended.

        Call it from the thread that collects.
        """

    def nudge(self) -> None:
        """Have a `collect` that waits return as soon as it can, for something else to be handed in. From any thread."""

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests: none of their answers is collected any more."""

    def load(self, folder: Path, version: Version, digests: Mapping[str, str] | None = None) -> None:
        """Serve the weights of a Hugging Face folder as `version`; answers in flight go on under them.

        `digests` gives, for every tensor, `mrl.models.tensor_file.digest` of what was published.
        Raises WeightsError, serving what it served before, when they do not fit or are not what was published.
        """

    def load_adapters(self, folder: Path, version: Version, digests: Mapping[str, str] | None = None) -> None:
        """As `load`, of the adapters in peft's format that belong to the weights which the engine started with.

        Raises EngineError where it cannot.
        """

    def broadcast_seats(self) -> Seats:
        """The ranks of a broadcast that it takes. Raises EngineError where it takes weights from files alone."""

    def receive(self, incoming: IncomingTensors, version: Version) -> None:
        """As `load`, from a broadcast. Raises PeerLost when its members do not meet, or it comes apart.

        Afterwards it serves what it served before, or, where it has to write over that, nothing.
        """

    def label(self, version: Version) -> None:
        """The weights that the engine started with are `version`."""

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities in nats of every token after the first under the loaded weights, at temperature 1."""

    def score_answers(self, request: ScoringRequest) -> Sequence[ScoredAnswer | None]:
        """What the tokens of each answer are worth.

        None for an answer that the engine does not take, as one that is too long for it.
        Raises WeightsError when there are no weights to serve.
        """

    def score_given(self, token_ids: Sequence[int]) -> list[TokenScore] | None:
        """Every token after the first at temperature 1, each beside the one likeliest token in its place.

        None for a text that the engine does not take.

        Raises WeightsError when there are no weights to serve.
        """

    def checksums(self) -> dict[str, str] | None:
        """Name -> digest of the bytes of every tensor as the engine holds it; None where an engine cannot tell.

        Digests are those of the weights' manifest.
        """

    def usage(self) -> EngineUsage:
        """How full it is; may be a second old."""

    def sleep(self) -> None:
        """Forget everything in flight and free the cache and the accelerator; there are no weights to serve then.

        Raises EngineError where it cannot.
        """

    def wake(self) -> None:
        """Be ready to `load` again."""

    def restart(self) -> None:
        """Start anew, bounded in time; call it from the thread that made the engine. Raises EngineLost, UserError."""

    def close(self) -> None:
        """End it; no process of it is left. May be called twice."""


def generate_all(engine: Engine, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:
    """All answers of all requests, in their order, from an engine that has nothing else in flight."""
    engine.submit(requests)
    found: dict[str, dict[int, Generation]] = {request.request_id: {} for request in requests}
    missing = sum(request.seeds.size for request in requests)
    while missing:
        for finished in engine.collect(1.0):
            found[finished.request_id][finished.index] = finished.generation
            missing -= 1
    return [[found[request.request_id][index] for index in range(request.seeds.size)] for request in requests]
