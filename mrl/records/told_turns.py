"""Turns of an episode for people to read, beside the numbers that were trained on."""

from collections.abc import Iterable

import msgspec

from mrl.records.episodes import EpisodeSegment, Message, Messages
from mrl.records.experience import SharedTurn

CUT = " [...]"
"""Stands where a text was too long to keep."""


class ToldTurn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stretch of an episode: one turn of the policy, or what its environment said to it."""

    is_sampled: bool
    """Whether a policy said it; the rest is never trained on."""
    tokens: int | None = None
    """That it takes in the row; 0 for what was said when all was over, None for a peer's."""
    messages: Messages
    begins_row: bool = False
    """Whether a new row begins with it, in which all that was said stands as the template renders it."""
    is_rewritten: bool = False
    """Whether that row holds these messages alone, as an agent has rewritten the conversation."""
    is_bare: bool = False
    """Whether it is text without roles that an agent gave, or what was sampled behind such a text."""


def told_turns(turns: Iterable[EpisodeSegment | SharedTurn], max_chars: int) -> list[ToldTurn]:
    """The turns, up to so many characters of text; the message in which they run out is cut, and none follows.

    A row that an agent begins says again what stands before: all of its messages are cut rather than that it takes more
    than a quarter of what is left.
    """
    found: list[ToldTurn] = []
    for turn in turns:
        if max_chars <= 0:
            break
        own = turn if isinstance(turn, EpisodeSegment) else None
        messages = list(turn.messages)
        begins_anew = own is not None and (own.is_rewritten or (own.is_bare and own.begins_row))
        if begins_anew and sum(map(_chars, messages)) > max_chars // 4:
            messages = [_cut(message, max_chars // (4 * len(messages))) for message in messages]
        kept: list[Message] = []
        for message in messages:
            if max_chars > 0:
                kept.append(_cut(message, max_chars))
                max_chars -= _chars(message)
        told = ToldTurn(
            is_sampled=turn.is_sampled,
            tokens=own.num_tokens if own else None,
            messages=tuple(kept),
            begins_row=own.begins_row if own else False,
            is_rewritten=own.is_rewritten if own else False,
            is_bare=own.is_bare if own else False,
        )
        found.append(told)
    return found


def _chars(message: Message) -> int:
    return len(message.content) + sum(len(call.name) + len(call.arguments) for call in message.tool_calls)


def _cut(message: Message, most: int) -> Message:
    """Without its calls where it is cut: a part of one is none."""
    if _chars(message) <= most:
        return message
    return Message(message.role, message.content[:most] + CUT, name=message.name)
