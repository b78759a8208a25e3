"""Turns of an episode for people to read, beside the numbers that were trained on."""

from collections.abc import Iterable

import msgspec

from mrl.records.episodes import EpisodeSegment, Message, Messages
from mrl.records.experience import SharedTurn

CUT = " [...]"
"""Mark at the end of a text that was cut."""


class ReadableTurn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One segment of an episode: a turn of the policy, or the messages that its environment gave."""

    is_sampled: bool
    """Whether a policy sampled the turn. Other turns are never trained on."""
    tokens: int | None = None
    """Tokens of the turn in its row; 0 for messages after the policy's last turn, None for a peer's turn."""
    messages: Messages
    begins_row: bool = False
    """Whether a new row begins with the turn, in which the template renders the whole conversation."""
    is_rewritten: bool = False
    """Whether an agent rewrote the conversation, so that the new row holds only these messages."""
    is_bare: bool = False
    """Whether the turn is text without roles that an agent gave, or was sampled behind such a text."""


def readable_turns(turns: Iterable[EpisodeSegment | SharedTurn], max_chars: int) -> list[ReadableTurn]:
    """Return the turns up to `max_chars` characters of text; the message that exceeds them is cut, and is the last.

    A row that an agent begins repeats earlier text. Its messages are cut where they would take more than a quarter of
    the characters left.
    """
    found: list[ReadableTurn] = []
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
        told = ReadableTurn(
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
    """Return the message, or a cut copy without tool calls: a part of a call would be no call."""
    if _chars(message) <= most:
        return message
    return Message(message.role, message.content[:most] + CUT, name=message.name)
