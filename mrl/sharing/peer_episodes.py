"""Episodes of peers in own tokens: every message as the own template says it, the peer's turns to be imitated.

What an environment said takes places in the row and is not trained on. Nothing is compared by token: of such an episode
no log-probability crosses. Where one does, `peer_turns` aligns it.

Shapes: T own tokens behind the prompt, S of them the peer's turns.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from mrl.records.episodes import Message, Opening, transcript
from mrl.records.experience import EpisodeRecord, SharedTurn
from mrl.records.rollouts import Answer
from mrl.sharing.advantages import Float32s
from mrl.sharing.regime import Bools, Int32s, TrainingExample


class SpelledEpisode(NamedTuple):
    """An episode in own tokens."""

    token_ids: Int32s
    """[T] up to the end of the last turn of the policy."""
    is_sampled: Bools
    """[T] whether a token belongs to a turn of the policy."""


class EpisodeSpelling(Protocol):
    """The own way to say what others have said."""

    def opening(self, opening: Opening) -> Int32s | str:
        """[P] the prompt of an episode that begins so; why not: "no_opening" where the template refuses it."""
        ...

    def spell(self, turns: Sequence[SharedTurn]) -> SpelledEpisode | str:
        """The episode behind its prompt, or why it cannot be said: a word to count."""
        ...

    def text(self, messages: Sequence[Message]) -> bytes | str:
        """What the policy would write of one turn, as UTF-8, or why it cannot: a word to count."""
        ...

    def rest(self, text: bytes, *, is_begun: bool, is_ended: bool) -> Int32s:
        """[T] text at the end of a turn, behind a part that `is_begun`; closed by the own EOS where it `is_ended`."""
        ...

    def join(self, turns: Sequence[SharedTurn], said: Sequence[Int32s]) -> SpelledEpisode | str:
        """The episode with these ids [T] of the turns of the policy, in their order; why not, as of `spell`."""
        ...

    def read(self, token_ids: Sequence[int]) -> str:
        """Own tokens as text, special ones in it."""
        ...


class PeerEpisode(NamedTuple):
    """One verified episode of a peer in own tokens."""

    record: EpisodeRecord
    spelled: SpelledEpisode | None
    """None where it cannot be said in own tokens."""
    rejected: str = ""
    """Why, then."""

    @property
    def source(self) -> str:
        """The policy that acted in it."""
        return self.record.source

    @property
    def is_usable(self) -> bool:
        """Whether it may be trained on."""
        return self.spelled is not None

    @property
    def num_tokens(self) -> int:
        """S."""
        return 0 if self.spelled is None else int(self.spelled.is_sampled.sum())

    @property
    def completion(self) -> bytes:
        """What was said, as people read it."""
        return said_in(self.record.turns).encode(errors="replace")

    @property
    def reward(self) -> float:
        """As the peer's environment gave it."""
        return self.record.reward

    def example(self, prompt_token_ids: Int32s, *, component: str, weights: Float32s) -> TrainingExample:
        """The training example of its turns, with `weights` [S]."""
        assert self.spelled is not None, "only what can be said is trained on"
        return TrainingExample(
            prompt_token_ids=prompt_token_ids,
            answer_token_ids=self.spelled.token_ids,
            component=component,
            advantages=np.zeros(self.num_tokens, dtype=np.float32),
            weights=weights,
            behaviour_logprobs=None,
            prompt_id=self.record.prompt_id,
            source=self.source,
            is_trained=self.spelled.is_sampled,
        )


def peer_episode(record: EpisodeRecord, spelling: EpisodeSpelling | None) -> PeerEpisode:
    """The episode of a record in own tokens; "no_spelling" rejects it in a policy that has no episodes itself."""
    if spelling is None:
        return PeerEpisode(record, None, "no_spelling")
    spelled = spelling.spell(record.turns)
    return PeerEpisode(record, None, spelled) if isinstance(spelled, str) else PeerEpisode(record, spelled)


def shared_turns(answer: Answer) -> list[SharedTurn]:
    """The turns of an own episode as peers get them, up to the policy's last.

    None of one that an agent has rewritten, since peers put turns into one row and each of these was said in its own,
    nor of one with text that has no roles, which no template of a peer's could say.
    """
    if answer.is_unsayable:
        return []
    last = max(place for place, segment in enumerate(answer.segments) if segment.is_sampled)
    return [SharedTurn(is_sampled=one.is_sampled, messages=one.messages) for one in answer.segments[: last + 1]]


def said_in(turns: Sequence[SharedTurn]) -> str:
    """A conversation as people read it."""
    return transcript([message for turn in turns for message in turn.messages])
