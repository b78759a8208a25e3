"""The backend of a made-up policy: how it writes turns and calls, and episodes that it has played."""

from collections.abc import Sequence

import numpy as np

from mrl.alignment import Receiver, translate_texts
from mrl.records.codec import pack_array
from mrl.records.episodes import CUT, EpisodeSegment, Message, Opening
from mrl.records.experience import SharedTurn
from mrl.records.finish import FinishReason
from mrl.records.rollouts import Answer
from mrl.records.version import Version, VersionSpan
from mrl.sharing.peer_episodes import RenderedEpisode


class DirectRequestCodec:
    """Backend with lines of text between turns and calls written as `call` says. `refuses`: the refusal to give."""

    def __init__(self, receiver: Receiver, call: str = "<{name} {arguments}>", *, max_tokens: int = 999) -> None:
        self.receiver, self._call, self._max_tokens = receiver, call, max_tokens
        self.refuses = ""

    def opening(self, opening: Opening) -> np.ndarray | str:
        """Return a line for each tool's name and each message; or "no_opening" where that is to be refused."""
        if self.refuses == "no_opening":
            return self.refuses
        tools = [Message("user", tool.name) for tool in opening.tools]
        return self.bridge([*tools, *opening.messages])

    def text(self, messages: Sequence[Message]) -> bytes | str:
        """Return content and calls of a turn, or the reason of a refusal."""
        if self.refuses == "tool_calls":
            return self.refuses
        if len(messages) != 1 or messages[0].role != "assistant":
            return "malformed"
        calls = [self._call.format(name=one.name, arguments=one.arguments) for one in messages[0].tool_calls]
        return (messages[0].content + "".join(calls)).encode()

    def rest(self, text: bytes, *, is_begun: bool, is_ended: bool) -> np.ndarray:
        """Return the text's tokens, the same wherever they stand."""
        return self._ids(text, is_ended=is_ended)

    def join(self, turns: Sequence[SharedTurn], said: Sequence[np.ndarray]) -> RenderedEpisode | str:
        """Join turns, with a line for each message between them, or return the reason of a refusal."""
        if self.refuses == "no_bridge":
            return self.refuses
        own = iter(said)
        parts = [next(own) if turn.is_sampled else self.bridge(turn.messages) for turn in turns]
        if sum(part.size for part in parts) > self._max_tokens:
            return "too_long"
        sampled = np.array([turn.is_sampled for turn in turns])
        return RenderedEpisode(np.concatenate(parts), np.repeat(sampled, [part.size for part in parts]))

    def bridge(self, messages: Sequence[Message]) -> np.ndarray:
        """Return the tokens between two turns."""
        return self._ids("".join(f"\n{one.content}\n" for one in messages).encode(), is_ended=False)

    def played(
        self, said: Sequence[Message], *, reward: float = 1.0, ending: str = "done", seed: int = 0, step: int = 0
    ) -> Answer:
        """Make an episode of this policy: own turns and an environment's in alternation, with made-up
        log-probabilities.
        """
        rng = np.random.default_rng(seed)
        ids, segments = [], []
        for place, message in enumerate(said):
            is_own = message.role == "assistant"
            is_ended = not (ending == CUT and place == len(said) - 1)
            part = self._ids(self.text([message]), is_ended=is_ended) if is_own else self.bridge([message])
            if place == len(said) - 1 and not is_own:
                part = part[:0]
            ids.append(part)
            segments.append(EpisodeSegment(num_tokens=part.size, is_sampled=is_own, messages=(message,)))
        num_sampled = sum(one.num_tokens for one in segments if one.is_sampled)
        return Answer(
            token_ids=pack_array(np.concatenate(ids), "i4"),
            logprobs=pack_array(-rng.exponential(size=num_sampled), "f4"),
            versions=[VersionSpan(num_sampled, Version(0, step))],
            completion=b"as people read it",
            finish_reason=FinishReason.STOP if ending == "done" else FinishReason.LENGTH,
            reward=reward,
            segments=segments,
            ending=ending,
        )

    def _ids(self, text: bytes, *, is_ended: bool) -> np.ndarray:
        end = np.array([self.receiver.eos_id] if is_ended else [], dtype=np.int32)
        if not text:
            return end
        row = translate_texts([text], [False], self.receiver, max_tokens=1 << 20).row(0)
        assert not row.reject_reason
        return np.concatenate([row.token_ids, end])
