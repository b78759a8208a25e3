"""One episode of a policy: what is asked for, what it is while it is played, and the row that comes of it."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mrl.engines.engine import NOTHING, Generation, GenerationRequest
from mrl.engines.segments import append_span
from mrl.models.turn_spelling import TurnSpelling
from mrl.records.chosen_experts import Experts, joined
from mrl.records.episodes import EpisodeSegment, Message, Opening, ToolSpec, conversation_to_read, shortened
from mrl.records.experience import SharedTurn
from mrl.records.finish import FinishReason
from mrl.records.plain_requests import TurnPiece
from mrl.records.version import VersionSpan
from mrl.rollout.bare_rows import GivenRow, spelled_turn, to_read
from mrl.rollout.replaying import OwnVoice, TurnReplay
from mrl.tasks.environments.contract import DONE, EnvironmentTurn, PolicyTurn
from mrl.tasks.verify import Verdict

PIECES = 32
"""A turn is told in pieces of which each makes it longer by this part at least."""

Int32s = npt.NDArray[np.int32]


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
    given: tuple[SharedTurn, ...] = ()
    """Turns of a peer that stand before those of the policy."""


@dataclass(frozen=True, slots=True)
class PlayedEpisode(Generation):
    """One episode. Of its T tokens the policy sampled S, which `logprobs` [S] and `versions` are of."""

    prompt_token_ids: Int32s
    """[P], given turns included."""
    segments: list[EpisodeSegment]
    """Behind the given turns."""
    verdict: Verdict
    ending: str
    """A name of `ENDS` or `FAILURES` of the contract."""
    opening: Opening | None = None
    """None where it is not to be told, or the environment did not begin."""
    given: tuple[SharedTurn, ...] = ()
    """Turns of a peer that it went on from."""


@dataclass(slots=True, eq=False)
class EpisodeInPlay:
    """One episode that is being played."""

    request: EpisodeRequest
    index: int
    session: PlayedSession
    rules: EpisodeRules
    awaited: "Future[EnvironmentTurn] | None"
    """What the environment is to say; None while the policy has its turn."""
    replay: TurnReplay | None = None
    """The given turns, while they are played and behind it; None where there are none."""
    prompt_token_ids: Int32s | None = None
    """Of an episode in which it is the policy's turn, or was."""
    opening: Opening | None = None
    """What its environment began it with, where that is to be told."""
    token_ids: list[Int32s] = field(default_factory=list)
    logprobs: list[npt.NDArray[np.float32]] = field(default_factory=list)
    experts: list[Experts | None] = field(default_factory=list)
    """Of each turn of the policy; the first may begin with those of the prompt."""
    versions: list[VersionSpan] = field(default_factory=list)
    segments: list[EpisodeSegment] = field(default_factory=list)
    num_turns: int = 0
    tools: tuple[ToolSpec, ...] = ()
    """What its environment offers."""
    conversation: list[Message] = field(default_factory=list)
    """All that was said, from the first message on."""
    row_at: int = 0
    """Place in `token_ids` at which the row begins that the policy sees now; 0 behind the prompt."""
    row_since: int = 0
    """Place in `conversation` from which on that row shows the reasoning of turns."""
    last_turn: PolicyTurn | None = None
    is_bare: bool = False
    """Whether the policy has, or had, its newest turn behind text without roles."""
    spelled: str | None = None
    """The row of such a turn as text, where its agent has all of it in text."""
    stream: str = ""
    """Under which name an agent is told how the turn grows that the policy has now."""
    streamed: str = ""
    """What it was told."""
    next_piece_tokens: int = 0
    """Tokens of the turn at which it is told more."""
    awaits_reward: bool = False
    """Whether it has had all its turns. The reward of an agent of several policies may hang on turns of the others."""
    wants_tokens: bool = False
    """Whether the agent is told the tokens of that turn one by one."""

    @property
    def has_tools(self) -> bool:
        """Whether there are tools to call."""
        return bool(self.tools)

    @property
    def num_given_tokens(self) -> int:
        """Of turns of a peer, and what the environment said to them."""
        return 0 if self.replay is None else self.replay.num_tokens

    @property
    def num_tokens(self) -> int:
        """Behind the first message: given, sampled, and said by the environment, in all rows."""
        return self.num_given_tokens + sum(ids.size for ids in self.token_ids)

    @property
    def num_pass_tokens(self) -> int:
        """Of its prompt and all its rows."""
        assert self.prompt_token_ids is not None, "it has begun"
        return self.prompt_token_ids.size + sum(ids.size for ids in self.token_ids)

    @property
    def num_turns_in_all(self) -> int:
        """Given ones included."""
        return self.num_turns + sum(turn.is_sampled for turn in self.request.given)

    @property
    def past(self) -> Int32s:
        """All that the policy sees at its next turn."""
        assert self.prompt_token_ids is not None, "it has begun"
        behind = self.token_ids[self.row_at :]
        return np.concatenate([*behind] if self.row_at else [self.prompt_token_ids, *behind])

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

    def heard(self, said: EnvironmentTurn, *, tells: bool) -> None:
        """What is to be told of the turn that follows; `tells`: whether any is told while it grows."""
        self.stream, self.wants_tokens = said.stream if tells else "", said.wants_tokens
        self.streamed, self.next_piece_tokens = "", 0

    def more_to_tell(self, generation: Generation, voice: OwnVoice) -> list[TurnPiece]:
        """What its agent was not told before of a turn that goes on: one piece, or none."""
        told, num_tokens = self.streamed, generation.token_ids.size
        if num_tokens < self.next_piece_tokens:
            return []
        self.next_piece_tokens = num_tokens + num_tokens // PIECES  # all of the turn is spelled each time
        text = voice.so_far(voice.spelling.text(generation.token_ids.tolist()), self.has_tools)
        if len(text) <= len(told) or not text.startswith(told):
            return []
        num_turns, self.streamed = self.num_turns_in_all, text
        return [TurnPiece(session=self.stream, num_turns=num_turns, start=len(told), text=text[len(told) :])]

    def sampled(self, generation: Generation, message: Message, spelling: TurnSpelling) -> None:
        """The policy had a turn."""
        self.num_turns += 1
        if self.spelled is not None:
            self.spelled += spelled_turn(generation.token_ids, spelling)
        self.conversation.append(message)
        self._put(generation.token_ids, [message], is_sampled=True, is_bare=self.is_bare)
        self.logprobs.append(generation.logprobs)
        self.experts.append(generation.experts)
        for span in generation.versions:
            self.versions = append_span(self.versions, span.num_tokens, span.version)

    def told(self, token_ids: Int32s, messages: Sequence[Message], *, begins_row: bool = False) -> None:
        """The environment answered it; `token_ids` are the whole conversation where that begins a row."""
        if begins_row:
            self.row_at = len(self.token_ids)
        self.conversation += messages
        self._put(token_ids, messages, is_sampled=False, begins_row=begins_row)

    def rewritten(self, token_ids: Int32s, messages: Sequence[Message]) -> None:
        """The agent has put these messages in the place of all that was said; `token_ids` are all of them."""
        self.row_at, self.conversation = len(self.token_ids), list(messages)
        self.is_bare, self.spelled = False, None
        kept = conversation_to_read(messages)
        self._put(token_ids, kept, is_sampled=False, begins_row=True, is_rewritten=True)

    def given(self, row: GivenRow, spelling: TurnSpelling) -> None:
        """Its agent gave text without roles, and no tools; the first such text is the prompt's to hold."""
        self.is_bare, self.spelled, self.tools = True, row.spelled, ()
        if self.prompt_token_ids is None:
            return
        if row.begins_row:
            self.row_at = len(self.token_ids)
        told = [to_read(row.token_ids, spelling)]
        self._put(row.token_ids, told, is_sampled=False, begins_row=row.begins_row, is_bare=True)

    def anew(self, spelling: TurnSpelling, messages: Sequence[Message] = ()) -> Int32s | None:
        """[P] the beginning of a new row, where one begins with these messages. Raises ModelFolderError."""
        tools = [tool.as_chat() for tool in self.tools]
        row = spelling.anew([*self.conversation, *messages], tools, since=self.row_since)
        if row is None:
            return None
        token_ids, self.row_since = row
        return token_ids

    def _put(self, token_ids: Int32s, messages: Sequence[Message], **how: bool) -> None:
        self.token_ids.append(token_ids)
        self.segments.append(EpisodeSegment(num_tokens=token_ids.size, messages=tuple(messages), **how))

    def forget(self) -> None:
        """Nobody may train on it: it was given up in mid-play, by no fault of the policy's."""
        self.token_ids, self.logprobs, self.versions, self.segments = [], [], [], []
        self.experts = []

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
            experts=joined(self.experts),
            finish_reason=FinishReason.STOP if ending == DONE else FinishReason.LENGTH,
            prompt_token_ids=NOTHING.token_ids if self.prompt_token_ids is None else self.prompt_token_ids,
            segments=self.segments,
            verdict=verdict,
            ending=ending,
            opening=self.opening,
            given=self.request.given,
        )
