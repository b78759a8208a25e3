"""Flags of a row for what happened to it on its way to the receiver, and the reason why a row was refused."""

from dataclasses import dataclass
from enum import IntFlag
from typing import Literal

Reason = Literal[
    "type",
    "shape",
    "size",
    "lengths",
    "logprobs",
    "ids_differ",
    "empty",
    "utf8",
    "special_out",
    "bytes_differ",
    "too_long",
]
"""Why a row cannot be used.

wire        "type" a field of the wrong type; "shape" arrays that differ in length; "size" absurdly large, or
            far more tokens than bytes; "lengths" byte lengths that are negative or do not sum to the text;
            "logprobs" not finite, positive or absurdly small; "ids_differ" ids of the own tokenizer that it does not
            know, or that are not what the other fields say
translation "empty" no bytes; "utf8" no valid UTF-8 up to any peer token; "special_out" the receiver would emit a
            special token; "bytes_differ" the receiver's tokens do not stand for the text; "too_long" not one span fits
"""


class Flag(IntFlag):
    """Bits for what happened to one translated row."""

    TAIL = 1
    """The row lacks its end: the peer was cut off, or bytes after its last whole character were dropped."""
    NORM = 2
    """The receiver reads the text in NFC, and the peer did not write it so."""
    SPECIAL_IN = 4
    """The peer emitted a special token before its end."""
    SPECIAL_OUT = 8
    """The receiver would have produced a special token; the row is rejected."""
    REJECT = 16
    """The row was rejected, and carries nothing over; its reason says why."""
    NONCANON = 32
    """The peer sampled other ids than its tokenizer gives the text, as the source itself tells."""
    EOS_UNMAPPED = 64
    """The peer ended the answer, and its end has no counterpart here. A foreign end is dropped. A token of the own
    tokenizer that is no EOS of this receiver stays, and ends nothing."""
    RECV_TRUNC = 128
    """The row is cut at the last whole span within the receiver's token limit."""
    UNTRACED = 256
    """Only the text is known. The row's log-probs are zeros that mean nothing, and it counts in no residual."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A text that cannot be expressed exactly, and the reason; an expected outcome, to be counted."""

    reason: Reason
