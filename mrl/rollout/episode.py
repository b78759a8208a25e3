"""One episode of a policy: its request, its state while it is played, and its result."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mrl.engines.engine import NOTHING, Generation, GenerationRequest
from mrl.models.turn_renderer import TurnRenderer
from mrl.records.chosen_experts import Experts, joined
from mrl.records.direct_requests import TurnChunk
from mrl.records.episodes import EpisodeSegment, Message, Opening, ToolSpec, conversation_to_read, shortened
from mrl.records.experience import SharedTurn
from mrl.records.finish import FinishReason
from mrl.records.version import VersionSpan, append_span
from mrl.rollout.raw_prompts import RawPromptRow, spelled_turn, to_read
from mrl.rollout.turn_replay import TurnCodec, TurnReplay
from mrl.tasks.environments.contract import DONE, EnvironmentTurn, PolicyTurn
from mrl.tasks.verify import Verdict

PIECES = 32
"""A growing turn is sent in pieces, each of which makes it longer by at least one part in so many."""

Int32s = npt.NDArray[np.int32]


class PlayedSession(Protocol):
    """Session of one episode with its environment. No call waits."""

    first: "Future[EnvironmentTurn]"
    """The environment's first turn."""

    def step(self, turn: PolicyTurn) -> "Future[EnvironmentTurn]":
        """Give the environment a turn of the policy; the future holds its answer."""
        ...

    def finish(self, reason: str, turn: PolicyTurn | None = None) -> "Future[EnvironmentTurn]":
        """Ask for the reward of an episode that ends on the policy's side.

        `reason` is a key of `ENDS`; `turn` is the last turn, where the environment has not had it.
        """
        ...

    def close(self) -> None:
        """Forget the episode."""
        ...


@dataclass(frozen=True, slots=True)
class EpisodeRules:
    """Rules of the episodes of one task."""

    max_turns: int
    """Most turns of the policy."""
    max_tokens: int
    """Most tokens behind the first messages, sampled and given."""
    failed_reward: float
    """Reward of an episode whose environment fails."""


@dataclass(frozen=True, slots=True)
class EpisodeRequest(GenerationRequest):
    """Play `seeds.size` episodes from one start state. The prompt is empty: the environment gives it."""

    prompt_id: str = ""
    given: tuple[SharedTurn, ...] = ()
    """First turns of a peer's episode, with the environment's answers, before the policy's own turns."""


@dataclass(frozen=True, slots=True)
class PlayedEpisode(Generation):
    """One episode of T tokens. The policy sampled S of them, to which `logprobs` [S] and `versions` belong."""

    prompt_token_ids: Int32s
    """[P], given turns included."""
    segments: list[EpisodeSegment]
    """Segments behind the given turns."""
    verdict: Verdict
    ending: str
    """A key of `ENDS` or `FAILURES` of the contract."""
    opening: Opening | None = None
    """First messages and tools; None where no teacher needs them, or the environment did not begin."""
    given: tuple[SharedTurn, ...] = ()
    """First turns of a peer's episode from which it went on."""


@dataclass(slots=True, eq=False)
class EpisodeInPlay:
    """One episode that is being played."""

    request: EpisodeRequest
    index: int
    session: PlayedSession
    rules: EpisodeRules
    awaited: "Future[EnvironmentTurn] | None"
    """The environment's next answer; None while the policy has its turn."""
    replay: TurnReplay | None = None
    """Replay of the given turns, also after its end; None where no turns are given."""
    prompt_token_ids: Int32s | None = None
    """[P] None until the environment has begun."""
    opening: Opening | None = None
    """First messages and tools, where a teacher needs them."""
    token_ids: list[Int32s] = field(default_factory=list)
    logprobs: list[npt.NDArray[np.float32]] = field(default_factory=list)
    experts: list[Experts | None] = field(default_factory=list)
    """Experts of each turn of the policy; those of the first turn may begin with the prompt's."""
    versions: list[VersionSpan] = field(default_factory=list)
    segments: list[EpisodeSegment] = field(default_factory=list)
    num_turns: int = 0
    tools: tuple[ToolSpec, ...] = ()
    """Tools that its environment offers."""
    conversation: list[Message] = field(default_factory=list)
    """All messages, from the first one on."""
    row_at: int = 0
    """Place in `token_ids` at which the current row begins, the row that the policy sees; 0: with the prompt."""
    row_since: int = 0
    """Place in `conversation` from which on the current row shows the reasoning of turns."""
    last_turn: PolicyTurn | None = None
    is_bare: bool = False
    """Whether the policy's newest turn goes on from text without roles."""
    spelled: str | None = None
    """Text of the current row, where the agent gave all of it as text without roles."""
    stream: str = ""
    """Name under which pieces of the current turn are sent to its agent; "" where none are."""
    streamed: str = ""
    """Text of the current turn that was sent in pieces."""
    next_piece_tokens: int = 0
    """Tokens of the current turn from which on the next piece is sent."""
    awaits_reward: bool = False
    """Whether all turns are over. The reward of an agent of several policies may depend on turns of the others."""
    wants_tokens: bool = False
    """Whether the agent is told the tokens of the current turn one by one."""

    @property
    def has_tools(self) -> bool:
        """Whether there are tools to call."""
        return bool(self.tools)

    @property
    def num_given_tokens(self) -> int:
        """Tokens of a peer's turns, and of the environment's answers to them."""
        return 0 if self.replay is None else self.replay.num_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens behind the first messages: given, sampled, and of the environment, in all rows."""
        return self.num_given_tokens + sum(ids.size for ids in self.token_ids)

    @property
    def num_pass_tokens(self) -> int:
        """Tokens of its prompt and of all its rows."""
        assert self.prompt_token_ids is not None, "it has begun"
        return self.prompt_token_ids.size + sum(ids.size for ids in self.token_ids)

    @property
    def num_turns_in_all(self) -> int:
        """Turns of the policy, and of the peer where turns are given."""
        return self.num_turns + sum(turn.is_sampled for turn in self.request.given)

    @property
    def past(self) -> Int32s:
        """[P] the current row: all that the policy sees at its next turn."""
        assert self.prompt_token_ids is not None, "it has begun"
        behind = self.token_ids[self.row_at :]
        return np.concatenate([*behind] if self.row_at else [self.prompt_token_ids, *behind])

    @property
    def seed(self) -> int:
        """Seed of the next turn; the first has the episode's own, so that a single turn is sampled as an answer is."""
        own = int(self.request.seeds[self.index])
        if not self.num_turns:
            return own
        digest = hashlib.blake2b(f"{own}|turn {self.num_turns}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    @property
    def last_words(self) -> str:
        """Content of the policy's last turn; "" before its first turn."""
        return next((one.messages[0].content for one in reversed(self.segments) if one.is_sampled), "")

    def heard(self, said: EnvironmentTurn, *, tells: bool) -> None:
        """Note what the agent wants to be told of the next turn; `tells` says whether growing turns are sent at all."""
        self.stream, self.wants_tokens = said.stream if tells else "", said.wants_tokens
        self.streamed, self.next_piece_tokens = "", 0

    def more_to_tell(self, generation: Generation, codec: TurnCodec) -> list[TurnChunk]:
        """Return the new piece of a growing turn for its agent: a list of one piece, or of none."""
        told, num_tokens = self.streamed, generation.token_ids.size
        if num_tokens < self.next_piece_tokens:
            return []
        self.next_piece_tokens = num_tokens + num_tokens // PIECES  # all of the turn is spelled each time
        text = codec.so_far(codec.renderer.text(generation.token_ids.tolist()), self.has_tools)
        if len(text) <= len(told) or not text.startswith(told):
            return []
        num_turns, self.streamed = self.num_turns_in_all, text
        return [TurnChunk(session=self.stream, num_turns=num_turns, start=len(told), text=text[len(told) :])]

    def sampled(self, generation: Generation, message: Message, renderer: TurnRenderer) -> None:
        """Take in a turn that the policy sampled."""
        self.num_turns += 1
        if self.spelled is not None:
            self.spelled += spelled_turn(generation.token_ids, renderer)
        self.conversation.append(message)
        self._put(generation.token_ids, [message], is_sampled=True, is_bare=self.is_bare)
        self.logprobs.append(generation.logprobs)
        self.experts.append(generation.experts)
        for span in generation.versions:
            self.versions = append_span(self.versions, span.num_tokens, span.version)

    def told(self, token_ids: Int32s, messages: Sequence[Message], *, begins_row: bool = False) -> None:
        """Take in the environment's answer; `token_ids` are the whole conversation where it begins a row."""
        if begins_row:
            self.row_at = len(self.token_ids)
        self.conversation += messages
        self._put(token_ids, messages, is_sampled=False, begins_row=begins_row)

    def rewritten(self, token_ids: Int32s, messages: Sequence[Message]) -> None:
        """Take in messages by which the agent replaced the whole conversation; `token_ids` are all of them."""
        self.row_at, self.conversation = len(self.token_ids), list(messages)
        self.is_bare, self.spelled = False, None
        kept = conversation_to_read(messages)
        self._put(token_ids, kept, is_sampled=False, begins_row=True, is_rewritten=True)

    def given(self, row: RawPromptRow, renderer: TurnRenderer) -> None:
        """Take in an agent's text without roles, which ends the use of tools. A first text is in the prompt alone."""
        self.is_bare, self.spelled, self.tools = True, row.spelled, ()
        if self.prompt_token_ids is None:
            return
        if row.begins_row:
            self.row_at = len(self.token_ids)
        told = [to_read(row.token_ids, renderer)]
        self._put(row.token_ids, told, is_sampled=False, begins_row=row.begins_row, is_bare=True)

    def anew(self, renderer: TurnRenderer, messages: Sequence[Message] = ()) -> Int32s | None:
        """Return the beginning of a new row, [P], where the template drops reasoning that the current row shows.

        `messages` come behind the conversation. Raises ModelFolderError.
        """
        tools = [tool.as_chat() for tool in self.tools]
        row = renderer.anew([*self.conversation, *messages], tools, since=self.row_since)
        if row is None:
            return None
        token_ids, self.row_since = row
        return token_ids

    def _put(self, token_ids: Int32s, messages: Sequence[Message], **how: bool) -> None:
        self.token_ids.append(token_ids)
        self.segments.append(EpisodeSegment(num_tokens=token_ids.size, messages=tuple(messages), **how))

    def forget(self) -> None:
        """Drop all tokens: the episode was given up in mid-play, by no fault of the policy's, and is not trained on."""
        self.token_ids, self.logprobs, self.versions, self.segments = [], [], [], []
        self.experts = []

    def played(self, verdict: Verdict, ending: str) -> PlayedEpisode:
        """Return the result. Its row ends with the last sampled token: messages behind that take no tokens."""
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
