"""Turns of a peer with which an own episode begins: played again, and compared with the peer's record.

Each turn is written in the policy's own tokens and read back as a sampled turn would be, so that the environment gets
what the episode's row says. The environment's answers have to be those of the peer's record, message by message; else
the episode ends as unequal, and nothing is sampled behind it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mrl.engines.engine import Generation
from mrl.errors import ModelFolderError, RecordError
from mrl.models.turn_renderer import TurnRenderer
from mrl.records.direct_requests import TokenLogprob
from mrl.records.episodes import Message, ToolSpec, transcript
from mrl.records.experience import SharedTurn
from mrl.records.finish import FinishReason
from mrl.tasks.environments.contract import LIMITS, UNEQUAL, UNSAID, EnvironmentTurn, PolicyTurn

Int32s = npt.NDArray[np.int32]
SHOWN_CHARS = 100


@dataclass(frozen=True)
class TurnCodec:
    """Turns written in one policy's tokens, and its sampled tokens read as turns."""

    renderer: TurnRenderer
    read: Callable[[str, bool, Sequence[ToolSpec]], tuple[PolicyTurn, Message]]
    """Text of a turn, whether it was cut at the limit, and the tools that there are to call -> the turn for the
    environment, and the message that is kept of it."""
    say: Callable[[Sequence[Message]], Int32s | str]
    """Messages of another policy's turn -> [T] own ids of it, or a word that says why there are none."""
    can_call: bool
    """Whether the policy's template shows a way to call tools that `read` knows."""
    so_far: Callable[[str, bool], str]
    """Text of a growing turn, and whether there are tools to call -> what its message is sure to begin with."""
    spelled: Callable[[int], bytes]
    """Token id -> its bytes; of a special token its name."""

    def heard(
        self, generation: Generation, tools: Sequence[ToolSpec], *, tells_tokens: bool
    ) -> tuple[PolicyTurn, Message]:
        """Return a sampled turn as `read` does. Raises RecordError for more text than a turn may hold."""
        is_cut = generation.finish_reason is FinishReason.LENGTH
        turn, message = self.read(self.renderer.text(generation.token_ids.tolist()), is_cut, tools)
        if not tells_tokens or generation.token_ids.size > LIMITS.sampled:
            return turn, message
        pairs = zip(generation.token_ids.tolist(), generation.logprobs.tolist(), strict=True)
        tokens = tuple(TokenLogprob(token_id, self.spelled(token_id), logprob) for token_id, logprob in pairs)
        return replace(turn, sampled=tokens), message

    def row(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Int32s:
        """Return a whole conversation, to be answered, as a row [P].

        Without a chat template its assistant turns are written as turns of the policy. Raises ModelFolderError where
        own tokens cannot say the conversation.
        """
        own = [place for place, message in enumerate(messages) if message.role == "assistant"]
        if self.renderer.template or not own:
            return self.renderer.opening(messages, tools)
        parts = [self.renderer.opening(messages[: own[0]]) if own[0] else self.renderer.plain("")]
        for place, end in zip(own, [*own[1:], len(messages)], strict=True):
            turn = self.say(messages[place : place + 1])
            if isinstance(turn, str):
                raise ModelFolderError(
                    f"a turn of the conversation cannot be written in the policy's tokens: {turn}",
                    cure="set policies.X.prompt.chat_template: a chat template can write turns of any length",
                )
            parts += [turn, self.renderer.bridge(turn.tolist(), messages[place].tool_calls, messages[place + 1 : end])]
        return np.concatenate(parts)


@dataclass(slots=True)
class TurnReplay:
    """Given turns of one episode, and how far they are played."""

    turns: Sequence[SharedTurn]
    codec: TurnCodec
    tools: Sequence[ToolSpec]
    parts: list[Int32s] = field(default_factory=list)
    """Ids of what was played: a turn, a bridge, a turn, a bridge, ..."""
    said: PolicyTurn | None = None
    """The newest turn, as the environment got it."""

    @property
    def num_tokens(self) -> int:
        """Tokens of what was played so far."""
        return sum(part.size for part in self.parts)

    @property
    def is_over(self) -> bool:
        """Whether all given turns are played, and the policy goes on."""
        return len(self.parts) >= len(self.turns)

    def next_turn(self) -> PolicyTurn | EnvironmentTurn:
        """Return the next given turn for the environment, or the end of an episode in which it cannot be said."""
        messages = self.turns[len(self.parts)].messages
        token_ids = self.codec.say(messages)
        if isinstance(token_ids, str):
            return EnvironmentTurn.failed(
                UNSAID, f"a peer's turn cannot be written in the policy's tokens: {token_ids}"
            )
        wanted = messages[0]
        try:
            self.said, message = self.codec.read(self.codec.renderer.text(token_ids.tolist()), False, self.tools)
        except RecordError as error:
            return EnvironmentTurn.failed(UNSAID, str(error))
        # A template may drop content beside calls.
        if message.tool_calls != wanted.tool_calls or not (wanted.tool_calls or message.content == wanted.content):
            words = f"a peer's turn changes in the policy's tokens: {_shown([wanted])} becomes {_shown([message])}"
            return EnvironmentTurn.failed(UNSAID, words)
        self.parts.append(token_ids)
        return self.said

    def heard(self, answer: EnvironmentTurn) -> EnvironmentTurn | None:
        """Take in the environment's answer; return the end of the episode where the peer got another answer.

        Raises ModelFolderError where the own template has no bridge to that answer.
        """
        expected = self.turns[len(self.parts)].messages
        if answer.has_failed:
            return answer
        is_own = answer.bare is not None or answer.begins_row  # of a row that is not the peer's
        if answer.done or is_own or answer.messages != expected:
            told = "the end" if answer.done else "a new row" if is_own else _shown(answer.messages)
            words = f"the answer to a peer's turn is {told}, but the peer got {_shown(expected)}"
            return EnvironmentTurn.failed(UNEQUAL, words)
        assert self.said is not None, "it answers a turn"
        bridge = self.codec.renderer.bridge(self.parts[-1].tolist(), self.said.tool_calls, answer.messages)
        self.parts.append(bridge)
        return None


def _shown(messages: Sequence[Message]) -> str:
    return repr(transcript(messages)[:SHOWN_CHARS])
