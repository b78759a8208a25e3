"""The experts that an engine's routers chose for the tokens of an answer, as they travel to the learner.

Token t is predicted at one place, whose own token is the one before it; its row holds what was chosen at that place.
So rows stand with sampled tokens as their log-probabilities do, whatever prompt, version or turn is before them.

Shapes: T sampled tokens, R rows; X = N * K slots: layer by layer, of N decoder layers (dense ones included), the K
experts that a token goes to.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

Experts: TypeAlias = npt.NDArray[np.uint8 | np.uint16]
"""[R, X] ids."""
MAX_EXPERTS_BYTES = 128 * 1024 * 1024
"""Of a group altogether: half of a message."""


class ChosenExperts(msgspec.Struct, frozen=True):
    """Those of one answer, of all sampled turns of an episode, or of a prompt."""

    ids: Annotated[bytes, msgspec.Meta(max_length=MAX_EXPERTS_BYTES)]
    """[R, X], little-endian."""
    num_slots: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    """X."""
    id_bytes: Literal[1, 2]
    """Of each; two where one is above 255."""

    @classmethod
    def packed(cls, experts_RX: Experts) -> "ChosenExperts":
        """As they travel."""
        ids = narrow(experts_RX)
        return cls(ids.tobytes(), ids.shape[1], 1 if ids.itemsize == 1 else 2)

    def unpacked(self, num_rows: int) -> Experts | None:
        """[R, X] of so many rows; None where they are not of as many."""
        if not num_rows or len(self.ids) != num_rows * self.num_slots * self.id_bytes:
            return None
        return np.frombuffer(self.ids, f"<u{self.id_bytes}").reshape(num_rows, self.num_slots)


def narrow(ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same ids in the narrowest format that holds them, little-endian."""
    return ids.astype("u1" if int(ids.max(initial=0)) < 256 else "<u2", copy=False)


class GrowingExperts:
    """Those of an answer that comes in parts; a server may tell them with the last part of a call alone."""

    def __init__(self, num_before: int) -> None:
        """`num_before` rows of its prompt are to stand before those of its tokens."""
        self.num_untold = num_before
        """Rows that are to be told next."""
        self._parts: list[Experts] = []

    def add(self, num_tokens: int, told_RX: Experts | None) -> None:
        """So many tokens more, and what is told with them: of all that was untold, or of more, where the answer ends
        within the part.
        """
        self.num_untold += num_tokens
        if told_RX is not None and self.num_untold and len(told_RX) >= self.num_untold:
            self._parts.append(told_RX[: self.num_untold])
            self.num_untold = 0

    def joined(self) -> Experts | None:
        """[R, X] of all so far; None where any are not known."""
        return None if self.num_untold else joined(self._parts)


def joined(parts: Sequence[Experts | None]) -> Experts | None:
    """Those of parts that follow each other; None without any, or where those of a part are not known."""
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts) or len({part.shape[1] for part in known}) > 1:
        return None
    return np.concatenate(known)
