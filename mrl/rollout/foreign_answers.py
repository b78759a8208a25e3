"""Answers of peers in the tokens of the policy that is to score them: byte for byte, or not at all.

An episode begins with the opening as the scoring policy's own template renders it. Each turn of the peer is written in
the scoring policy's syntax of calls. Between turns the environment's messages stand as in an own episode.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mrl.alignment.flags import Flag
from mrl.alignment.ragged import offsets_of
from mrl.alignment.receiver import Receiver
from mrl.alignment.translate import translate_texts
from mrl.records.experience import MAX_COMPLETION_BYTES, GivenAnswer, SharedTurn
from mrl.sharing.own_traces import digest_of
from mrl.sharing.peer_episodes import EpisodeRenderer

Int32s = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


class ForeignText(NamedTuple):
    """One answer, or one turn of an episode, in own tokens."""

    token_ids: Int32s
    """[T]"""
    byte_lengths: Int32s
    """[T] bytes of each token."""
    written: bytes = b""
    """Digest of a turn as the policy writes it, where that is more than the turn's content; else empty."""


class ForeignAnswer(NamedTuple):
    """All tokens of one answer behind its prompt."""

    token_ids: Int32s
    """[T]"""
    is_scored: Bools
    """[T] whether a token is one of `texts`."""
    texts: list[ForeignText]


def foreign_answers(
    answers: Sequence[GivenAnswer], receiver: Receiver, *, max_tokens: int
) -> list[ForeignAnswer | None]:
    """Express answers of one turn in own tokens; None for one that needs more than `max_tokens`, or cannot be said."""
    texts, finished = [answer.completion for answer in answers], [answer.finished for answer in answers]
    own = translate_texts(texts, finished, receiver, max_tokens=max_tokens)
    is_said = own.is_exact & ((own.flags & Flag.RECV_TRUNC) == 0)
    found: list[ForeignAnswer | None] = []
    for row, can in enumerate(is_said.tolist()):
        part = slice(own.row_offsets[row], own.row_offsets[row + 1])
        text = ForeignText(own.token_ids[part], own.token_bytes[part])
        found.append(ForeignAnswer(text.token_ids, np.ones(text.token_ids.size, dtype=bool), [text]) if can else None)
    return found


def foreign_episode(answer: GivenAnswer, receiver: Receiver, renderer: EpisodeRenderer) -> ForeignAnswer | None:
    """Express an episode in own tokens; None for one with too much text, or that own tokens or template cannot say."""
    own = [turn for turn in answer.turns if turn.is_sampled]
    num_bytes = sum(message.num_bytes for turn in answer.turns for message in turn.messages)
    if not own or num_bytes > MAX_COMPLETION_BYTES:
        return None
    texts = list[ForeignText]()
    for place, turn in enumerate(own, 1):
        text = _turn(turn, receiver, renderer, is_ended=place < len(own) or answer.finished)
        if text is None:
            return None
        texts.append(text)
    spelled = renderer.join(answer.turns, [text.token_ids for text in texts])
    return None if isinstance(spelled, str) else ForeignAnswer(spelled.token_ids, spelled.is_sampled, texts)


def _turn(turn: SharedTurn, receiver: Receiver, renderer: EpisodeRenderer, *, is_ended: bool) -> ForeignText | None:
    text = renderer.text(turn.messages)
    if isinstance(text, str):
        return None
    token_ids = renderer.rest(text, is_begun=False, is_ended=is_ended)
    if not token_ids.size or receiver.completion_bytes(token_ids) != text:
        return None
    written = b"" if text == turn.messages[0].content.encode() else digest_of(text)
    return ForeignText(token_ids, receiver.byte_lengths(token_ids, offsets_of(np.array([token_ids.size]))), written)
