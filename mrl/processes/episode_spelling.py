"""What peers said in their episodes, in a policy's own tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mrl.errors import ModelFolderError
from mrl.models.turn_spelling import TurnSpelling
from mrl.records.episodes import Message, ToolCall
from mrl.records.experience import SharedTurn
from mrl.sharing.peer_episodes import SpelledEpisode

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True)
class OwnWords:
    """Says the episodes of peers as the policy itself would have them in a row."""

    spelling: TurnSpelling
    eos_id: int | None
    max_turn_tokens: int
    max_episode_tokens: int

    def spell(self, turns: Sequence[SharedTurn]) -> SpelledEpisode | str:
        """The episode behind its prompt, or why not.

        "tool_calls": the own template cannot say its calls. "no_bridge": it does not go on with what an environment
        said. "too_long": a turn, or the whole, is longer than own ones may be; nobody has verified a part of it.
        "malformed": it does not begin with a turn of the policy, or has one that is no single message.
        """
        parts, is_sampled = list[Int32s](), list[bool]()
        calls: Sequence[ToolCall] = ()
        for turn in turns:
            if not parts and not turn.is_sampled:
                return "malformed"
            found = self._turn(turn.messages) if turn.is_sampled else self._bridge(parts[-1], calls, turn.messages)
            if isinstance(found, str):
                return found
            calls = turn.messages[0].tool_calls if turn.is_sampled else ()
            parts.append(found)
            is_sampled.append(turn.is_sampled)
        if sum(part.size for part in parts) > self.max_episode_tokens:
            return "too_long"
        sizes = [part.size for part in parts]
        return SpelledEpisode(np.concatenate(parts), np.repeat(np.array(is_sampled), sizes))

    def _turn(self, messages: Sequence[Message]) -> Int32s | str:
        if len(messages) != 1 or messages[0].role != "assistant":
            return "malformed"
        found = self.spelling.turn(messages[0].content, messages[0].tool_calls, eos_id=self.eos_id)
        if found is None:
            return "tool_calls"
        return found if found.size <= self.max_turn_tokens else "too_long"

    def _bridge(self, turn_ids: Int32s, calls: Sequence[ToolCall], messages: Sequence[Message]) -> Int32s | str:
        try:
            return self.spelling.bridge(turn_ids.tolist(), calls, messages)
        except ModelFolderError:
            return "no_bridge"
