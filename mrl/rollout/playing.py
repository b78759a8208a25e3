"""Episodes between an engine and environments: one request of an environment's prompt plays G episodes to their ends.

    submit ──▶ environments are reset ──▶ turn in the engine ──▶ environment ──▶ turn in the engine ... ──▶ collect
                                              ▲ prompt, all sampled turns and bridges as they were │

What was sampled is never rendered again. An environment that takes its time delays its own episode alone: the engine
samples the turns of the others meanwhile. What an episode costs is bounded by its task in turns and tokens.
"""

import hashlib
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mrl.engines.engine import Engine, Finished, Generation, GenerationRequest
from mrl.engines.segments import append_span
from mrl.errors import ModelFolderError, RecordError
from mrl.models.turn_spelling import TurnSpelling
from mrl.records.episodes import EpisodeSegment, Message, shortened
from mrl.records.finish import FinishReason
from mrl.records.version import VersionSpan
from mrl.tasks.environments.contract import (
    CUT,
    DONE,
    MAX_TOKENS,
    MAX_TURNS,
    TOO_LONG,
    WRONG_TYPE,
    EnvironmentTurn,
    PolicyTurn,
)
from mrl.tasks.verify import Verdict

Int32s = npt.NDArray[np.int32]

ENVIRONMENT_SLICE_S = 0.01
"""How long the engine samples at most before environments that have answered are asked, while any is awaited."""
IN_STEP_SLICE_S = 0.5
NOTHING = Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), [], FinishReason.ABORT)


class PlayedSession(Protocol):
    """One episode at its environment. No call waits."""

    first: "Future[EnvironmentTurn]"
    """What the environment says first."""

    def step(self, turn: PolicyTurn) -> "Future[EnvironmentTurn]":
        """What it says to a turn of the policy."""
        ...

    def finish(self, reason: str, turn: PolicyTurn | None = None) -> "Future[EnvironmentTurn]":
        """The reward of an episode that ends for a reason of the policy's side; `turn` is the last, where it is new."""
        ...

    def close(self) -> None:
        """Forget the episode."""
        ...


@dataclass(frozen=True, slots=True)
class EpisodeRules:
    """How the episodes of one task are played."""

    max_turns: int
    """Turns of the policy."""
    max_tokens: int
    """Tokens behind the prompt, sampled and given."""
    failed_reward: float
    """Reward where the environment fails."""


@dataclass(frozen=True, slots=True)
class EpisodeRequest(GenerationRequest):
    """Play `seeds.size` episodes from one start state. Its prompt is empty: the environment says it."""

    prompt_id: str = ""


@dataclass(frozen=True, slots=True)
class PlayedEpisode(Generation):
    """One episode. Of its T tokens the policy sampled S, which `logprobs` [S] and `versions` are of."""

    prompt_token_ids: Int32s
    """[P]"""
    segments: list[EpisodeSegment]
    verdict: Verdict
    ending: str
    """A name of `ENDS` or `FAILURES` of the contract."""


@dataclass(slots=True, eq=False)
class _Episode:
    request: EpisodeRequest
    index: int
    session: PlayedSession
    rules: EpisodeRules
    awaited: "Future[EnvironmentTurn] | None"
    """What the environment is to say; None while the policy has its turn."""
    prompt_token_ids: Int32s | None = None
    token_ids: list[Int32s] = field(default_factory=list)
    logprobs: list[npt.NDArray[np.float32]] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    segments: list[EpisodeSegment] = field(default_factory=list)
    num_turns: int = 0
    has_tools: bool = False
    last_turn: PolicyTurn | None = None

    @property
    def num_tokens(self) -> int:
        return sum(ids.size for ids in self.token_ids)

    @property
    def past(self) -> Int32s:
        assert self.prompt_token_ids is not None, "it has begun"
        return np.concatenate([self.prompt_token_ids, *self.token_ids])

    @property
    def seed(self) -> int:
        """Of its next turn; the first has the episode's own, so that a single turn is sampled as an answer would be."""
        own = int(self.request.seeds[self.index])
        if not self.num_turns:
            return own
        digest = hashlib.blake2b(f"{own}|turn {self.num_turns}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    @property
    def last_words(self) -> str:
        """What the policy said last; "" before its first turn."""
        return next((one.messages[0].content for one in reversed(self.segments) if one.is_sampled), "")

    def sampled(self, generation: Generation, message: Message) -> None:
        self.num_turns += 1
        self._put(generation.token_ids, message, is_sampled=True)
        self.logprobs.append(generation.logprobs)
        for span in generation.versions:
            self.versions = append_span(self.versions, span.num_tokens, span.version)

    def told(self, token_ids: Int32s, messages: Sequence[Message]) -> None:
        self._put(token_ids, *messages, is_sampled=False)

    def _put(self, token_ids: Int32s, *messages: Message, is_sampled: bool) -> None:
        self.token_ids.append(token_ids)
        self.segments.append(EpisodeSegment(num_tokens=token_ids.size, is_sampled=is_sampled, messages=messages))

    def played(self, verdict: Verdict, ending: str) -> PlayedEpisode:
        """Its row ends with what the policy sampled last; what the environment says behind it takes no tokens."""
        while self.segments and not self.segments[-1].is_sampled and self.segments[-1].num_tokens:
            self.segments[-1] = EpisodeSegment(num_tokens=0, is_sampled=False, messages=self.segments[-1].messages)
            self.token_ids.pop()
        self.segments = [one if one.num_tokens else shortened(one) for one in self.segments]
        return PlayedEpisode(
            token_ids=np.concatenate([NOTHING.token_ids, *self.token_ids]),
            logprobs=np.concatenate([NOTHING.logprobs, *self.logprobs]),
            versions=self.versions,
            finish_reason=FinishReason.STOP if ending == DONE else FinishReason.LENGTH,
            prompt_token_ids=NOTHING.token_ids if self.prompt_token_ids is None else self.prompt_token_ids,
            segments=self.segments,
            verdict=verdict,
            ending=ending,
        )


@dataclass(frozen=True)
class Stage:
    """What episodes of one policy are played with."""

    open: Callable[[str], PlayedSession]
    """Prompt id -> an environment that is being reset."""
    rules: Callable[[str], EpisodeRules]
    """Prompt id -> those of its task."""
    spelling: TurnSpelling
    read: Callable[[str, bool, bool], tuple[PolicyTurn, Message]]
    """Text of a turn, whether it was cut at the limit, and whether there are tools to call -> what the environment
    gets, and what is kept of it."""
    can_call: bool
    """Whether the policy's template shows a way to call tools that `read` knows."""
    max_turn_tokens: int
    row_tokens: int
    """Tokens that a prompt and its episode may have together."""
    in_step: bool = False
    """Whether all environments answer before any turn is sampled, as a synchronous run must: what is sampled together
    decides every bit."""


class EpisodeEngine:
    """An engine that plays episodes. All but the four calls of sampling go to the engine within."""

    def __init__(self, engine: Engine, stage: Stage) -> None:
        self._engine, self._stage = engine, stage
        self._numbers = itertools.count()
        self._waiting: list[_Episode] = []
        """Episodes whose environment is awaited."""
        self._turns: dict[tuple[str, int], _Episode] = {}
        """Name of a request to the engine, and place in it -> the episode whose turn it is."""
        self._prompts: dict[str, Int32s] = {}
        """Request -> the prompt of the first of its episodes that began."""
        self._ended: list[Finished] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """As of an engine; environments of the new episodes are reset meanwhile."""
        self._engine.submit([request for request in requests if not isinstance(request, EpisodeRequest)])
        for request in requests:
            if isinstance(request, EpisodeRequest):
                rules = self._stage.rules(request.prompt_id)
                for index in range(request.seeds.size):
                    session = self._stage.open(request.prompt_id)
                    self._waiting.append(_Episode(request, index, session, rules, session.first))

    def collect(self, timeout_s: float) -> list[Finished]:
        """As of an engine; an episode comes whole, as a `PlayedEpisode`."""
        until_s = time.monotonic() + timeout_s
        if not (self._stage.in_step and self._turns):
            self._hear()
        slice_s = min(timeout_s, ENVIRONMENT_SLICE_S) if self._waiting else timeout_s
        found = self._engine.collect(0.0 if self._ended else slice_s)
        others = [one for one in found if (one.request_id, one.index) not in self._turns]
        for one in found:
            episode = self._turns.pop((one.request_id, one.index), None)
            if episode is not None:
                self._said(episode, one.generation)
        if not (found or self._ended or self._turns):
            awaited = [episode.awaited for episode in self._waiting if episode.awaited is not None]
            wait(awaited, max(0.0, until_s - time.monotonic()), FIRST_COMPLETED)
        ended, self._ended = self._ended, []
        return others + ended

    def abort(self, request_ids: Iterable[str]) -> None:
        """As of an engine."""
        gone = set(request_ids)
        turns = {name for (name, _), episode in self._turns.items() if episode.request.request_id in gone}
        self._forget(gone)
        self._engine.abort(turns | gone)

    def restart(self) -> None:
        """As of an engine."""
        self._forget_all()
        self._engine.restart()

    def sleep(self) -> None:
        """As of an engine."""
        self._forget_all()
        self._engine.sleep()

    def close(self) -> None:
        """As of an engine."""
        self._forget_all()
        self._engine.close()

    def _forget_all(self) -> None:
        self._forget({episode.request.request_id for episode in (*self._waiting, *self._turns.values())})
        self._ended.clear()

    def _forget(self, gone: set[str]) -> None:
        """Close the episodes of these requests."""
        for episode in (*self._waiting, *self._turns.values()):
            if episode.request.request_id in gone:
                episode.session.close()
        self._waiting = [episode for episode in self._waiting if episode.request.request_id not in gone]
        self._turns = {at: one for at, one in self._turns.items() if one.request.request_id not in gone}
        self._prompts = {name: prompt for name, prompt in self._prompts.items() if name not in gone}
        self._ended = [one for one in self._ended if one.request_id not in gone]

    # The environment's side.

    def _hear(self) -> None:
        """Take in what environments have said, and hand in the turns that follow, while there are weights to serve."""
        if self._engine.version is None:
            return
        awaited = [episode.awaited for episode in self._waiting if episode.awaited is not None]
        if self._stage.in_step and wait(awaited, IN_STEP_SLICE_S).not_done:
            return
        answered = [episode for episode in self._waiting if episode.awaited is not None and episode.awaited.done()]
        gone = set(answered)
        self._waiting = [episode for episode in self._waiting if episode not in gone]
        ready = [episode for episode in answered if self._answered(episode)]
        if ready:
            self._engine.submit(self._requests(ready))

    def _answered(self, episode: _Episode) -> bool:
        """Whether it is the policy's turn now; else the episode has ended, or waits for its reward."""
        assert episode.awaited is not None, "the environment was awaited"
        said, episode.awaited = episode.awaited.result(), None
        try:
            if episode.prompt_token_ids is None:
                return self._begin(episode, said)
            if said.done:
                if said.messages:
                    episode.told(NOTHING.token_ids, said.messages)
                self._end(episode, said)
                return False
            assert episode.last_turn is not None, "the policy had its turn"
            bridge = self._stage.spelling.bridge(
                episode.token_ids[-1].tolist(), episode.last_turn.tool_calls, said.messages
            )
        except ModelFolderError as error:
            self._end(episode, EnvironmentTurn.failed(WRONG_TYPE, str(error)))
            return False
        episode.told(bridge, said.messages)
        return not self._has_ended(episode)

    def _begin(self, episode: _Episode, said: EnvironmentTurn) -> bool:
        if said.done:
            self._end(episode, said)
            return False
        if said.tools and not self._stage.can_call:
            words = "the environment has tools, and the policy's chat template shows no calls that can be read"
            self._end(episode, EnvironmentTurn.failed(WRONG_TYPE, words))
            return False
        prompt = self._stage.spelling.opening(said.messages, [tool.as_chat() for tool in said.tools])
        room = min(self._stage.row_tokens - prompt.size, episode.rules.max_tokens)
        if self._stage.max_turn_tokens > room:
            words = (
                f"its first message of {prompt.size} tokens leaves an episode room for {max(0, room)}: less than a turn"
            )
            self._end(episode, EnvironmentTurn.failed(TOO_LONG, words))
            return False
        if not np.array_equal(prompt, self._prompts.setdefault(episode.request.request_id, prompt)):
            words = "reset began two episodes of one seed with different messages"
            self._end(episode, EnvironmentTurn.failed(WRONG_TYPE, words))
            return False
        episode.prompt_token_ids, episode.has_tools = prompt, bool(said.tools)
        return True

    def _has_ended(self, episode: _Episode) -> bool:
        """Whether there is no further turn for the policy; then the reward is asked for."""
        reason, more = "", self._stage.max_turn_tokens
        if episode.num_turns >= episode.rules.max_turns:
            reason = MAX_TURNS
        elif episode.num_tokens + more > episode.rules.max_tokens or episode.past.size + more > self._stage.row_tokens:
            reason = MAX_TOKENS
        if reason:
            self._ask_reward(episode, reason)
        return bool(reason)

    def _ask_reward(self, episode: _Episode, reason: str, turn: PolicyTurn | None = None) -> None:
        episode.awaited = episode.session.finish(reason, turn)
        self._waiting.append(episode)

    def _end(self, episode: _Episode, said: EnvironmentTurn) -> None:
        episode.session.close()
        if said.has_failed or said.reward is None:
            reason, words = (said.reason, said.words) if said.has_failed else (WRONG_TYPE, "it gave no reward")
            verdict = Verdict(episode.rules.failed_reward, "", failure=reason, words=words)
        else:
            reason, verdict = said.reason, Verdict(said.reward, episode.last_words)
        played = episode.played(verdict, reason)
        self._ended.append(Finished(episode.request.request_id, episode.index, played))
        if not any(other.request is episode.request for other in (*self._waiting, *self._turns.values())):
            self._prompts.pop(episode.request.request_id, None)

    # The policy's side.

    def _requests(self, ready: Sequence[_Episode]) -> list[GenerationRequest]:
        """One request for the first turns of a group, which have one prompt, and one for every other turn."""
        together: defaultdict[tuple[str, int], list[_Episode]] = defaultdict(list)
        for episode in ready:
            place = -1 if not episode.num_turns else episode.index
            together[episode.request.request_id, place].append(episode)
        requests = []
        for (request_id, _), episodes in together.items():
            name = f"{request_id}/{next(self._numbers)}"
            seeds = np.array([episode.seed for episode in episodes], dtype=np.uint64)
            decoding = episodes[0].request.decoding
            requests.append(GenerationRequest(name, episodes[0].past, seeds, may_be_refused=True, decoding=decoding))
            self._turns |= {(name, index): episode for index, episode in enumerate(episodes)}
        return requests

    def _said(self, episode: _Episode, generation: Generation) -> None:
        """A turn of the policy goes to its environment. One that the engine does not take ends the episode."""
        if not generation.token_ids.size:
            self._ask_reward(episode, MAX_TOKENS)
            return
        text = self._stage.spelling.text(generation.token_ids.tolist())
        is_cut = generation.finish_reason is FinishReason.LENGTH
        try:
            episode.last_turn, message = self._stage.read(text, is_cut, episode.has_tools)
        except RecordError as error:  # more text than a turn may hold
            self._end(episode, EnvironmentTurn.failed(TOO_LONG, str(error)))
            return
        episode.sampled(generation, message)
        if is_cut:
            self._ask_reward(episode, CUT, episode.last_turn)
            return
        episode.awaited = episode.session.step(episode.last_turn)
        self._waiting.append(episode)
