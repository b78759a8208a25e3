"""Text or ids without roles, which agents ask the policy behind: which tokens are given, and in which row.

What was sampled is never tokenized again. Whoever repeats all of a row and adds to it goes on in that row, and what is
added alone is given; whoever does not begins another one.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mrl.errors import RecordError
from mrl.models.turn_spelling import TurnSpelling
from mrl.records.episodes import MAX_LAST_CHARS, MAX_TURN_BYTES, Message, bytes_of
from mrl.tasks.environments.contract import BareText

Int32s = npt.NDArray[np.int32]


class GivenRow(NamedTuple):
    """What is given of a bare text."""

    token_ids: Int32s
    """[B]"""
    begins_row: bool
    spelled: str | None
    """All of the row with it, as whoever gave it has it in text; None where it is not told in text alone."""


def whole(bare: BareText, spelling: TurnSpelling) -> GivenRow:
    """All of it, with the special tokens that the tokenizer itself puts before a text.

    Raises RecordError for an id that the policy does not have, and for no token at all.
    """
    if bare.text is None:
        return GivenRow(_known(bare.token_ids, spelling), True, None)
    token_ids = spelling.plain(bare.text)
    if not token_ids.size:
        raise RecordError("the agent gave a text of no token")
    return GivenRow(token_ids, True, bare.text)


def given_row(bare: BareText, spelling: TurnSpelling, past: Callable[[], Int32s], spelled: str | None) -> GivenRow:
    """What of it stands behind the row of now: `past` is that row, [P], and `spelled` its text, if that is known.

    Ids are held against the row's ids, and a text against its text. Raises RecordError as `whole` does.
    """
    if bare.text is None:
        row = past()
        goes_on = len(bare.token_ids) > row.size and bare.token_ids[: row.size] == tuple(row.tolist())
        return GivenRow(_known(bare.token_ids[row.size :], spelling), False, None) if goes_on else whole(bare, spelling)
    if spelled is not None and bare.text.startswith(spelled):
        added = spelling.turn(bare.text.removeprefix(spelled), eos_id=None, is_begun=True)
        if added.size:
            return GivenRow(added, False, bare.text)
    return whole(bare, spelling)


def _known(token_ids: Sequence[int], spelling: TurnSpelling) -> Int32s:
    """[B] what was sampled is the policy's own; of all else the tokenizer has to know each id."""
    unknown = next((one for one in sorted(set(token_ids)) if not spelling.name(one)), None)
    if unknown is not None:
        raise RecordError(f"the agent gave a token that the policy does not have: {unknown}")
    return np.array(token_ids, dtype=np.int32)


def spelled_turn(token_ids: Int32s, spelling: TurnSpelling) -> str:
    """A sampled turn as text, what ended it by its name."""
    text, last = spelling.text(token_ids.tolist()), token_ids[-1:].tolist()
    return text + spelling.name(last[0]) if spelling.is_end(last[0]) else text


def to_read(token_ids: Int32s, spelling: TurnSpelling) -> Message:
    """What was given, for people; its beginning, where it is more than a message holds. The role is none of its own."""
    text = spelling.text(token_ids.tolist())
    return Message("user", text if bytes_of(text) <= MAX_TURN_BYTES else text[:MAX_LAST_CHARS])
