"""The experts that an engine's routers chose for the tokens of an answer, on their way to the learner.

Token t is predicted from the place before it. Row t holds the experts that were chosen at that place. Rows therefore
stand beside sampled tokens as log-probabilities do, whatever prompt, version or turn lies before them.

Shapes: T sampled tokens, R rows, X = N * K slots. N counts decoder layers (dense ones included), K the experts that one
token goes to. Slots are ordered layer by layer.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

Experts: TypeAlias = npt.NDArray[np.uint8 | np.uint16]
"""[R, X] ids of experts."""
MAX_EXPERTS_BYTES = 128 * 1024 * 1024
"""Most bytes of expert ids of one group, prompt included: half of the largest message."""


class ChosenExperts(msgspec.Struct, frozen=True):
    """Expert ids of one answer, of all sampled turns of an episode, or of a prompt."""

    ids: Annotated[bytes, msgspec.Meta(max_length=MAX_EXPERTS_BYTES)]
    """[R, X] ids, little-endian."""
    num_slots: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    """X, slots of one row."""
    id_bytes: Literal[1, 2]
    """Bytes of each id: 2 where an id is above 255, else 1."""

    @classmethod
    def packed(cls, experts_RX: Experts) -> "ChosenExperts":
        """Pack [R, X] ids for the wire."""
        ids = narrow(experts_RX)
        return cls(ids.tobytes(), ids.shape[1], 1 if ids.itemsize == 1 else 2)

    def unpacked(self, num_rows: int) -> Experts | None:
        """Return the [R, X] ids; None unless there are exactly `num_rows` rows, at least one."""
        if not num_rows or len(self.ids) != num_rows * self.num_slots * self.id_bytes:
            return None
        return np.frombuffer(self.ids, f"<u{self.id_bytes}").reshape(num_rows, self.num_slots)


def narrow(ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the same ids in the narrowest format that holds them, little-endian."""
    return ids.astype("u1" if int(ids.max(initial=0)) < 256 else "<u2", copy=False)


class GrowingExperts:
    """Expert ids of an answer that grows part by part. A server may tell them only with the last part of a call."""

    def __init__(self, num_before: int) -> None:
        """Expect `num_before` rows of the answer's prompt before those of its tokens."""
        self.num_untold = num_before
        """Rows that are expected and not yet known."""
        self._parts: list[Experts] = []

    def add(self, num_tokens: int, told_RX: Experts | None) -> None:
        """Add `num_tokens` expected rows, and the ids that came with them.

        `told_RX` has all expected rows, or more where the answer ended within the part: its first rows are kept. An
        array of fewer rows is ignored.
        """
        self.num_untold += num_tokens
        if told_RX is not None and self.num_untold and len(told_RX) >= self.num_untold:
            self._parts.append(told_RX[: self.num_untold])
            self.num_untold = 0

    def joined(self) -> Experts | None:
        """Return the [R, X] ids of the answer so far; None while any row is unknown."""
        return None if self.num_untold else joined(self._parts)


def joined(parts: Sequence[Experts | None]) -> Experts | None:
    """Join the ids of consecutive parts; return None without a part, or where the ids of a part are unknown."""
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts) or len({part.shape[1] for part in known}) > 1:
        return None
    return np.concatenate(known)
