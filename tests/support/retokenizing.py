"""A text in a receiver's own tokens, whole or not at all, as an engine of that policy would have sampled it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mrl.alignment import Flag, Receiver, Rejected, translate_texts


@dataclass(frozen=True, slots=True)
class Retokenized:
    """A text in own tokens: [T] int32, the own EOS included when the text was finished."""

    token_ids: npt.NDArray[np.int32]


def retokenize(receiver: Receiver, text: bytes, *, finished: bool, max_tokens: int) -> Retokenized | Rejected:
    """Run `translate_texts` on one text; a row that `max_tokens` would cut is Rejected("too_long")."""
    row = translate_texts([text], [finished], receiver, max_tokens=max_tokens).row(0)
    if row.reject_reason:
        return Rejected(row.reject_reason)
    return Rejected("too_long") if row.flags & Flag.RECV_TRUNC else Retokenized(row.token_ids)
