"""Text or ids without roles that an agent has the policy go on from: the tokens to give, and the row they belong to.

What was sampled is never tokenized again. An agent that repeats all of a row and adds to it goes on in that row: only
the addition is given. Any other text begins a new row.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mrl.errors import RecordError
from mrl.models.turn_renderer import TurnRenderer
from mrl.records.episodes import MAX_LAST_CHARS, MAX_TURN_BYTES, Message, bytes_of
from mrl.tasks.environments.contract import RawPrompt

Int32s = npt.NDArray[np.int32]


class RawPromptRow(NamedTuple):
    """Tokens to give to the policy for a bare text."""

    token_ids: Int32s
    """[B] the addition to the row, or all of a new one."""
    begins_row: bool
    spelled: str | None
    """Text of the row up to here, as the agent has it; None where the agent gave ids."""


def whole(bare: RawPrompt, renderer: TurnRenderer) -> RawPromptRow:
    """Return a new row of all of the text, with the special tokens that the tokenizer itself puts before a text.

    Raises RecordError for an id that the policy does not have, and for no token at all.
    """
    if bare.text is None:
        return RawPromptRow(_known(bare.token_ids, renderer), True, None)
    token_ids = renderer.plain(bare.text)
    if not token_ids.size:
        raise RecordError("the agent sent a text without any token")
    return RawPromptRow(token_ids, True, bare.text)


def given_row(bare: RawPrompt, renderer: TurnRenderer, past: Callable[[], Int32s], spelled: str | None) -> RawPromptRow:
    """Return what a bare text adds to the current row, or a new row where it does not begin with the current one.

    `past` gives the ids of the current row, [P]; `spelled` is its text, None where that is not known. Ids are compared
    with the row's ids, and a text with its text. Raises RecordError as `whole` does.
    """
    if bare.text is None:
        row = past()
        goes_on = len(bare.token_ids) > row.size and bare.token_ids[: row.size] == tuple(row.tolist())
        return (
            RawPromptRow(_known(bare.token_ids[row.size :], renderer), False, None)
            if goes_on
            else whole(bare, renderer)
        )
    if spelled is not None and bare.text.startswith(spelled):
        added = renderer.turn(bare.text.removeprefix(spelled), eos_id=None, is_begun=True)
        if added.size:
            return RawPromptRow(added, False, bare.text)
    return whole(bare, renderer)


def _known(token_ids: Sequence[int], renderer: TurnRenderer) -> Int32s:
    """Return given ids, [B]. Raises RecordError for an id that the policy's tokenizer does not know."""
    unknown = next((one for one in sorted(set(token_ids)) if not renderer.name(one)), None)
    if unknown is not None:
        raise RecordError(f"the agent sent a token id that the policy does not have: {unknown}")
    return np.array(token_ids, dtype=np.int32)


def spelled_turn(token_ids: Int32s, renderer: TurnRenderer) -> str:
    """Return a sampled turn as text, with the name of the token that ended it."""
    text, last = renderer.text(token_ids.tolist()), token_ids[-1:].tolist()
    return text + renderer.name(last[0]) if renderer.is_end(last[0]) else text


def to_read(token_ids: Int32s, renderer: TurnRenderer) -> Message:
    """Return given ids as a message for people to read: only its beginning, where it is more than a message holds. The
    role "user" stands for no role.
    """
    text = renderer.text(token_ids.tolist())
    return Message("user", text if bytes_of(text) <= MAX_TURN_BYTES else text[:MAX_LAST_CHARS])
