"""Episodes between an engine and environments: one request of an environment's prompt plays G episodes to their ends.

    submit ──▶ environments are reset ──▶ turn in the engine ──▶ environment ──▶ turn in the engine ... ──▶ collect
                                              ▲ prompt, all sampled turns and bridges as they were │

What was sampled is rendered again only as context of a new row, where the policy is to see what its template renders.
Given turns of a peer are played first, and are part of the prompt of the turns that the policy samples. A slow
environment delays only its own episode: the engine samples turns of the others meanwhile. Its task bounds an episode
in turns and tokens.
"""

import itertools
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from mrl.engines.engine import NOTHING, Engine, FinishedAnswer, Generation, GenerationRequest, PartialAnswer
from mrl.errors import ModelFolderError, RecordError
from mrl.records.direct_requests import TurnChunk
from mrl.records.episodes import CUT, MAX_TOKENS, Opening
from mrl.records.finish import FinishReason
from mrl.rollout.direct_codec import MAX_TOKEN_BYTES
from mrl.rollout.episode import EpisodeInPlay, EpisodeRequest, EpisodeRules, Int32s, PlayedSession
from mrl.rollout.raw_prompts import given_row, whole
from mrl.rollout.turn_replay import TurnCodec, TurnReplay
from mrl.tasks.environments.contract import (
    GIVEN_UP,
    MAX_TURNS,
    TOO_LONG,
    UNEQUAL,
    WRONG_TYPE,
    EnvironmentTurn,
    PolicyTurn,
    RawPrompt,
    total_bytes,
)
from mrl.tasks.verify import Verdict

ENVIRONMENT_SLICE_S = 0.01
"""Seconds that the engine samples at most before it looks for answers of environments, while any is awaited."""
IN_STEP_SLICE_S = 0.5
SAMPLING = "sampling"


@dataclass(frozen=True)
class EpisodeSetup:
    """Means and limits with which the episodes of one policy are played."""

    open: Callable[[str], PlayedSession]
    """Prompt id -> session with an environment that is being reset."""
    rules: Callable[[str], EpisodeRules]
    """Prompt id -> rules of its task."""
    codec: TurnCodec
    max_turn_tokens: int
    row_tokens: int
    """Tokens that a prompt and its episode may have together, in each row."""
    pass_tokens: int = sys.maxsize
    """Tokens that the prompt and all rows may have together, which the learner has in one pass."""
    in_step: bool = False
    """Whether all environments that may ask for a turn answer before any turn is sampled, as a synchronous run must:
    which turns are sampled together decides every bit."""
    tell: Callable[[TurnChunk], None] | None = None
    """Sends agents pieces of their turns as these grow; None where agents get turns whole."""
    tells_opening: bool = False
    """Whether an episode keeps its first messages and tools, as needed where a teacher is to score it."""


class EpisodeEngine:
    """An engine that plays episodes. Calls that are not defined here go to the inner engine."""

    def __init__(self, engine: Engine, setup: EpisodeSetup) -> None:
        self._engine, self._setup = engine, setup
        self._numbers = itertools.count()
        self._waiting: list[EpisodeInPlay] = []
        """Episodes whose environment is awaited."""
        self._turns: dict[tuple[str, int], EpisodeInPlay] = {}
        """Request id at the inner engine, and index of the answer in it -> the episode whose turn that is."""
        self._prompts: dict[str, Int32s] = {}
        """Request id -> [P] prompt of the first of its episodes that began."""
        self._ended: list[FinishedAnswer] = []
        self._others: Counter[str] = Counter()
        """Id of a request without episodes -> number of its answers in the inner engine."""
        self._grown: list[PartialAnswer] = []
        """Growing answers of these requests, for the next call of `grown`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def doing(self) -> str:
        """Activity for heartbeats: sampling, or only waiting for environments."""
        return "awaiting environments" if self._waiting and not self._turns else SAMPLING

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See Engine; begins to reset the environments of new episodes."""
        others = [request for request in requests if not isinstance(request, EpisodeRequest)]
        self._engine.submit(others)
        self._others.update({request.request_id: request.seeds.size for request in others})
        for request in requests:
            if isinstance(request, EpisodeRequest):
                rules = self._setup.rules(request.prompt_id)
                for index in range(request.seeds.size):
                    session = self._setup.open(request.prompt_id)
                    self._waiting.append(EpisodeInPlay(request, index, session, rules, session.first))

    def collect(self, timeout_s: float) -> list[FinishedAnswer]:
        """See Engine; an episode comes whole, as a `PlayedEpisode`."""
        until_s = time.monotonic() + timeout_s
        if not (self._setup.in_step and self._turns):
            self._hear()
        slice_s = min(timeout_s, ENVIRONMENT_SLICE_S) if self._waiting else timeout_s
        found = self._engine.collect(0.0 if self._ended else slice_s)
        others = [one for one in found if (one.request_id, one.index) not in self._turns]
        for one in found:
            episode = self._turns.pop((one.request_id, one.index), None)
            if episode is not None:
                self._said(episode, one.generation)
        if any(episode.stream for episode in self._turns.values()):
            self._grown = self.grown()
        self._others -= Counter(one.request_id for one in others)  # only those above 0 stay
        if not (found or self._ended or self._turns or self._others):
            awaited = [episode.awaited for episode in self._waiting if episode.awaited is not None]
            wait(awaited, max(0.0, until_s - time.monotonic()), FIRST_COMPLETED)
        ended, self._ended = self._ended, []
        return others + ended

    def grown(self) -> list[PartialAnswer]:
        """See Engine; new pieces of growing turns are sent to their agents."""
        others, self._grown = self._grown, []
        for one in self._engine.grown():
            episode = self._turns.get((one.request_id, one.index))
            if episode is None:
                others += [one] if one.request_id in self._others else []  # else its turn was given up
            elif episode.stream and self._setup.tell is not None:
                for piece in episode.more_to_tell(one.generation, self._setup.codec):
                    self._setup.tell(piece)
        return others

    def abort(self, request_ids: Iterable[str]) -> None:
        """See Engine."""
        gone = set(request_ids)
        for name in gone:
            self._others.pop(name, None)
        turns = {name for (name, _), episode in self._turns.items() if episode.request.request_id in gone}
        self._forget(gone)
        self._engine.abort(turns | gone)

    def restart(self) -> None:
        """See Engine."""
        self._forget_all()
        self._engine.restart()

    def sleep(self) -> None:
        """See Engine."""
        self._forget_all()
        self._engine.sleep()

    def close(self) -> None:
        """See Engine."""
        self._forget_all()
        self._engine.close()

    def _forget_all(self) -> None:
        self._forget({episode.request.request_id for episode in (*self._waiting, *self._turns.values())})
        self._ended.clear()
        self._others.clear()
        self._grown.clear()

    def _forget(self, gone: set[str]) -> None:
        """Close and forget the episodes of these requests."""
        for episode in (*self._waiting, *self._turns.values()):
            if episode.request.request_id in gone:
                episode.session.close()
        self._waiting = [episode for episode in self._waiting if episode.request.request_id not in gone]
        self._turns = {at: one for at, one in self._turns.items() if one.request.request_id not in gone}
        self._prompts = {name: prompt for name, prompt in self._prompts.items() if name not in gone}
        self._ended = [one for one in self._ended if one.request_id not in gone]

    # The environment's side.

    def _hear(self) -> None:
        """Take in answers of environments, and submit the turns that follow, while there are weights to serve."""
        if self._engine.version is None:
            return
        awaited = [one.awaited for one in self._waiting if one.awaited is not None and not one.awaits_reward]
        if self._setup.in_step and wait(awaited, IN_STEP_SLICE_S).not_done:
            return
        answered = [episode for episode in self._waiting if episode.awaited is not None and episode.awaited.done()]
        gone = set(answered)
        self._waiting = [episode for episode in self._waiting if episode not in gone]
        ready = [episode for episode in answered if self._answered(episode)]
        if ready:
            self._engine.submit(self._requests(ready))

    def _answered(self, episode: EpisodeInPlay) -> bool:
        """Take in the environment's answer; return whether it is the policy's turn now."""
        assert episode.awaited is not None, "the environment was awaited"
        said, episode.awaited = episode.awaited.result(), None
        episode.heard(said, tells=self._setup.tell is not None)
        try:
            if episode.prompt_token_ids is None:
                return self._begin(episode, said)
            if episode.replay is not None and not episode.replay.is_over:
                return self._replayed(episode, episode.replay, said)
            if said.done:
                if said.messages:
                    episode.told(NOTHING.token_ids, said.messages)
                self._end(episode, said)
                return False
            if said.bare is not None:
                return self._bare(episode, said.bare)
            if said.begins_row:
                return self._rewritten(episode, said)
            assert episode.last_turn is not None, "the policy had its turn"
            given = episode.anew(self._setup.codec.renderer, said.messages)
            begins_row = given is not None
            if given is None:
                given = self._setup.codec.renderer.bridge(
                    episode.token_ids[-1].tolist(), episode.last_turn.tool_calls, said.messages
                )
        except (ModelFolderError, RecordError) as error:
            return self._fails(episode, WRONG_TYPE, str(error))
        episode.told(given, said.messages, begins_row=begins_row)
        return not self._has_ended(episode)

    def _bare(self, episode: EpisodeInPlay, bare: RawPrompt) -> bool:
        """Take in text without roles, in the current row or a new one; return whether it is the policy's turn now."""
        renderer, has_begun = self._setup.codec.renderer, episode.prompt_token_ids is not None
        if episode.request.given and not has_begun:
            return self._fails(episode, UNEQUAL, "the agent sent text without roles where the peer got messages")
        if max(bare.num_bytes / MAX_TOKEN_BYTES, len(bare.token_ids)) > self._setup.row_tokens:  # too long to tokenize
            if not has_begun:
                return self._fails(episode, TOO_LONG, "the first text is longer than a row may be")
            self._ask_reward(episode, MAX_TOKENS)
            return False
        row = given_row(bare, renderer, lambda: episode.past, episode.spelled) if has_begun else whole(bare, renderer)
        episode.given(row, renderer)
        return not self._has_ended(episode) if has_begun else self._opens(episode, row.token_ids)

    def _rewritten(self, episode: EpisodeInPlay, said: EnvironmentTurn) -> bool:
        """Take in a conversation that replaces the one so far; return whether it is the policy's turn now."""
        if total_bytes(said.messages) > MAX_TOKEN_BYTES * self._setup.row_tokens:  # before anything is tokenized
            self._ask_reward(episode, MAX_TOKENS)
            return False
        if not self._has_tools(episode, said):
            return False
        episode.conversation, episode.row_since = [], 0
        row = episode.anew(self._setup.codec.renderer, said.messages)
        if row is None:
            row = self._setup.codec.row(said.messages, [tool.as_chat() for tool in said.tools])
        episode.rewritten(row, said.messages)
        return not self._has_ended(episode)

    def _has_tools(self, episode: EpisodeInPlay, said: EnvironmentTurn) -> bool:
        """Set the tools from here on; end the episode and return False where the policy cannot call them."""
        if said.tools and not self._setup.codec.can_call:
            words = "the policy's chat template shows no tool call format that mrl knows; set policies.X.prompt.family"
            return self._fails(episode, WRONG_TYPE, words)
        episode.tools = said.tools
        return True

    def _begin(self, episode: EpisodeInPlay, said: EnvironmentTurn) -> bool:
        if said.done:
            self._end(episode, said)
            return False
        if said.bare is not None:
            return self._bare(episode, said.bare)
        if not self._has_tools(episode, said):
            return False
        episode.conversation = list(said.messages)
        episode.opening = Opening(said.messages, said.tools) if self._setup.tells_opening else None
        prompt = self._setup.codec.renderer.opening(said.messages, [tool.as_chat() for tool in said.tools])
        if episode.request.given:
            episode.prompt_token_ids = prompt
            episode.replay = TurnReplay(episode.request.given, self._setup.codec, episode.tools)
            self._replay(episode, episode.replay)
            return False
        return self._opens(episode, prompt)

    def _replay(self, episode: EpisodeInPlay, replay: TurnReplay) -> None:
        """Play the next of the given turns."""
        turn = replay.next_turn()
        if isinstance(turn, EnvironmentTurn):
            self._end(episode, turn)
            return
        episode.awaited = episode.session.step(turn)
        self._waiting.append(episode)

    def _replayed(self, episode: EpisodeInPlay, replay: TurnReplay, said: EnvironmentTurn) -> bool:
        """Take in the environment's answer to a given turn; return whether it is the policy's turn now."""
        end = replay.heard(said)
        if end is not None:
            self._end(episode, end)
        elif not replay.is_over:
            self._replay(episode, replay)
        else:
            assert episode.prompt_token_ids is not None, "it has begun"
            episode.conversation += [message for turn in replay.turns for message in turn.messages]
            prompt = episode.anew(self._setup.codec.renderer)
            if prompt is None:
                prompt = np.concatenate([episode.prompt_token_ids, *replay.parts])
            return self._opens(episode, prompt)
        return False

    def _opens(self, episode: EpisodeInPlay, prompt: Int32s) -> bool:
        """Set the prompt; end the episode and return False where the policy cannot have its first turn behind it."""
        room = min(self._setup.row_tokens - prompt.size, episode.rules.max_tokens - episode.num_given_tokens)
        if self._setup.max_turn_tokens > room:
            what = "the first message with the peer's turns" if episode.request.given else "the first message"
            words = f"{what} has {prompt.size} tokens and leaves {max(0, room)} for the episode: less than one turn"
            return self._fails(episode, TOO_LONG, words)
        if not np.array_equal(prompt, self._prompts.setdefault(episode.request.request_id, prompt)):
            words = "reset returned different first messages for the same seed"
            return self._fails(episode, WRONG_TYPE, words)
        episode.prompt_token_ids = prompt
        return True

    def _has_ended(self, episode: EpisodeInPlay) -> bool:
        """Ask for the reward where the policy can have no further turn; return whether that is so."""
        reason, more = "", self._setup.max_turn_tokens
        if episode.num_turns_in_all >= episode.rules.max_turns:
            reason = MAX_TURNS
        elif more > min(
            episode.rules.max_tokens - episode.num_tokens,
            self._setup.row_tokens - episode.past.size,
            self._setup.pass_tokens - episode.num_pass_tokens,
        ):
            reason = MAX_TOKENS
        if reason:
            self._ask_reward(episode, reason)
        return bool(reason)

    def _ask_reward(self, episode: EpisodeInPlay, reason: str, turn: PolicyTurn | None = None) -> None:
        episode.awaited, episode.awaits_reward = episode.session.finish(reason, turn), True
        self._waiting.append(episode)

    def _fails(self, episode: EpisodeInPlay, reason: str, words: str) -> bool:
        """End the episode, since its environment has failed; return False."""
        self._end(episode, EnvironmentTurn.failed(reason, words))
        return False

    def _end(self, episode: EpisodeInPlay, said: EnvironmentTurn) -> None:
        episode.session.close()
        if said.reason == GIVEN_UP:
            reason, verdict = GIVEN_UP, Verdict(episode.rules.failed_reward, "", failure=GIVEN_UP, words=said.words)
            episode.forget()
        elif said.has_failed or said.reward is None:
            reason, words = (said.reason, said.words) if said.has_failed else (WRONG_TYPE, "no reward was given")
            verdict = Verdict(episode.rules.failed_reward, "", failure=reason, words=words)
        else:
            reason, verdict = said.reason, Verdict(said.reward, episode.last_words)
        played = episode.played(verdict, reason)
        self._ended.append(FinishedAnswer(episode.request.request_id, episode.index, played))
        if not any(other.request is episode.request for other in (*self._waiting, *self._turns.values())):
            self._prompts.pop(episode.request.request_id, None)

    # The policy's side.

    def _requests(self, ready: Sequence[EpisodeInPlay]) -> list[GenerationRequest]:
        """Return one request for all first turns of a group, which have one prompt, and one for every other turn."""
        together: defaultdict[tuple[str, int], list[EpisodeInPlay]] = defaultdict(list)
        for episode in ready:
            place = -1 if not episode.num_turns else episode.index
            together[episode.request.request_id, place].append(episode)
        requests = []
        for (request_id, _), episodes in together.items():
            name = f"{request_id}/{next(self._numbers)}"
            seeds = np.array([episode.seed for episode in episodes], dtype=np.uint64)
            decoding, streams = episodes[0].request.decoding, any(episode.stream for episode in episodes)
            how: dict[str, Any] = {"may_be_refused": True, "decoding": decoding, "streams": streams}
            how["tells_prompt"] = episodes[0].num_turns == 0
            how["conversations"] = tuple(f"{request_id}/{episode.index}" for episode in episodes)
            requests.append(GenerationRequest(name, episodes[0].past, seeds, **how))
            self._turns |= {(name, index): episode for index, episode in enumerate(episodes)}
        return requests

    def _said(self, episode: EpisodeInPlay, generation: Generation) -> None:
        """Give a turn of the policy to its environment. A turn that the engine refused ends the episode."""
        if not generation.token_ids.size:
            self._ask_reward(episode, MAX_TOKENS)
            return
        is_cut, tells_tokens = generation.finish_reason is FinishReason.LENGTH, episode.wants_tokens
        try:
            episode.last_turn, message = self._setup.codec.heard(generation, episode.tools, tells_tokens=tells_tokens)
        except RecordError as error:  # more text than a turn may hold
            self._fails(episode, TOO_LONG, str(error))
            return
        episode.sampled(generation, message, self._setup.codec.renderer)
        if is_cut:
            self._ask_reward(episode, CUT, episode.last_turn)
            return
        episode.awaited = episode.session.step(episode.last_turn)
        self._waiting.append(episode)
