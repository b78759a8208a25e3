"""The looks of methods: one colour and one mark per method, the same in every picture of the study.

Colours are Okabe and Ito's, darkened for a white ground, which most eyes tell apart; labels stand at the data, so that
no picture depends on colour alone.
"""

from typing import NamedTuple


class Look(NamedTuple):
    """Colour, mark and dashes of a method's line."""

    colour: str
    mark: str
    dashes: str = "-"


LOOKS: dict[str, Look] = {
    "GRPO": Look("#222222", "o"),
    "GRPO, fixed b": Look("#626a74", "o", "--"),
    "XGRPO": Look("#0072b2", "s"),
    "XGRPO pooled": Look("#0072b2", "s"),
    "XGRPO peer-only": Look("#2a7fb5", "s", "--"),
    "SGT": Look("#00805d", "D"),
    "PRP exact": Look("#d55e00", "^"),
    "PRP behaviour": Look("#d55e00", "^"),
    "PRP truncated": Look("#9a6700", "v", "--"),
    "PRP residual": Look("#7a5c3a", "<", ":"),
    "PRP recompute": Look("#a5447b", "P", "-."),
}
