"""The looks of methods: one colour and one mark per method, the same in every picture of the study.

Colours are Okabe and Ito's, darkened for a white ground, which most eyes tell apart; labels stand at the data, so that
no picture depends on colour alone.
"""

from typing import NamedTuple


class PlotStyle(NamedTuple):
    """Colour, mark and dashes of a method's line."""

    colour: str
    mark: str
    dashes: str = "-"


LOOKS: dict[str, PlotStyle] = {
    "GRPO": PlotStyle("#222222", "o"),
    "GRPO, fixed b": PlotStyle("#626a74", "o", "--"),
    "XGRPO": PlotStyle("#0072b2", "s"),
    "XGRPO pooled": PlotStyle("#0072b2", "s"),
    "XGRPO peer-only": PlotStyle("#2a7fb5", "s", "--"),
    "SGT": PlotStyle("#00805d", "D"),
    "PRP exact": PlotStyle("#d55e00", "^"),
    "PRP behaviour": PlotStyle("#d55e00", "^"),
    "PRP truncated": PlotStyle("#9a6700", "v", "--"),
    "PRP residual": PlotStyle("#7a5c3a", "<", ":"),
    "PRP recompute": PlotStyle("#a5447b", "P", "-."),
}
