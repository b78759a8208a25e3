"""Episodes of peers in own tokens: every message as the own template writes it, the peer's turns to be imitated.

Messages of the environment take places in the row and are not trained on. Nothing is compared by token: such episodes
cross without log-probabilities. Episodes with log-probabilities are aligned by `peer_turns`.

Shapes: T own tokens after the prompt, S of them the peer's turns.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from mrl.records.episodes import Message, Opening, transcript
from mrl.records.experience import EpisodeRecord, SharedTurn
from mrl.records.rollouts import Answer
from mrl.sharing.advantages import Float32s
from mrl.sharing.regime import Bools, Int32s, TrainingExample


class RenderedEpisode(NamedTuple):
    """An episode in own tokens."""

    token_ids: Int32s
    """[T] own ids, up to the end of the policy's last turn."""
    is_sampled: Bools
    """[T] whether a token belongs to a turn of the policy."""


class EpisodeRenderer(Protocol):
    """Writes conversations of other policies in own tokens."""

    def opening(self, opening: Opening) -> Int32s | str:
        """Return [P] ids of the prompt of an episode that begins so, or "no_opening" where the template refuses it."""
        ...

    def spell(self, turns: Sequence[SharedTurn]) -> RenderedEpisode | str:
        """Return the episode after its prompt, or why it cannot be written: a word to count."""
        ...

    def text(self, messages: Sequence[Message]) -> bytes | str:
        """Return the text that the policy itself would write for one turn, as UTF-8, or why not: a word to count."""
        ...

    def rest(self, text: bytes, *, is_begun: bool, is_ended: bool) -> Int32s:
        """Return [T] ids of a text at the end of a turn, after a part that `is_begun`; closed by the own EOS where it
        `is_ended`.
        """
        ...

    def join(self, turns: Sequence[SharedTurn], said: Sequence[Int32s]) -> RenderedEpisode | str:
        """Return the episode with these ids [T] of the policy's turns, in their order; or why not, as `spell`."""
        ...

    def read(self, token_ids: Sequence[int]) -> str:
        """Return own tokens as text, with special tokens."""
        ...


class PeerEpisode(NamedTuple):
    """One verified episode of a peer in own tokens."""

    record: EpisodeRecord
    spelled: RenderedEpisode | None
    """The episode in own tokens; None where it cannot be written in them."""
    rejected: str = ""
    """Why it cannot be written; "" when it can."""

    @property
    def source(self) -> str:
        """The policy whose episode it is."""
        return self.record.source

    @property
    def is_usable(self) -> bool:
        """Whether it may be trained on."""
        return self.spelled is not None

    @property
    def num_tokens(self) -> int:
        """S, the tokens of the peer's turns."""
        return 0 if self.spelled is None else int(self.spelled.is_sampled.sum())

    @property
    def completion(self) -> bytes:
        """The bytes of all messages, as people read them."""
        return said_in(self.record.turns).encode(errors="replace")

    @property
    def reward(self) -> float:
        """Reward that the peer's environment gave."""
        return self.record.reward

    def example(self, prompt_token_ids: Int32s, *, component: str, weights: Float32s) -> TrainingExample:
        """Return the training example of its turns, with `weights` [S]."""
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


def peer_episode(record: EpisodeRecord, renderer: EpisodeRenderer | None) -> PeerEpisode:
    """Return a record's episode in own tokens; "no_spelling" rejects it in a policy without episodes of its own."""
    if renderer is None:
        return PeerEpisode(record, None, "no_spelling")
    spelled = renderer.spell(record.turns)
    return PeerEpisode(record, None, spelled) if isinstance(spelled, str) else PeerEpisode(record, spelled)


def shared_turns(answer: Answer) -> list[SharedTurn]:
    """Return the turns of an own episode as peers get them, up to the policy's last.

    There are none for an episode that an agent has rewritten, since peers put turns into one row and each of these was
    sampled in its own row. Nor are there any for an episode with text that has no roles, which no template of a peer
    could write.
    """
    if answer.is_unsayable:
        return []
    last = max(place for place, segment in enumerate(answer.segments) if segment.is_sampled)
    return [SharedTurn(is_sampled=one.is_sampled, messages=one.messages) for one in answer.segments[: last + 1]]


def said_in(turns: Sequence[SharedTurn]) -> str:
    """Return a conversation as people read it."""
    return transcript([message for turn in turns for message in turn.messages])
