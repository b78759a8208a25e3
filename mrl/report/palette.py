"""Colours: one per policy, the same in the live view and in the report, and one per kind of activity.

Okabe and Ito's palette, which most eyes tell apart, lightened on dark backgrounds and darkened on light ones.
"""

from typing import NamedTuple


class Colour(NamedTuple):
    """A colour, as `#rrggbb`, for light and for dark backgrounds."""

    light: str
    dark: str


POLICY_COLOURS: tuple[Colour, ...] = (
    Colour("#0072b2", "#3d9fe0"),  # blue
    Colour("#d55e00", "#ef7d2d"),  # vermillion
    Colour("#009e73", "#22bf92"),  # bluish green
    Colour("#b3568a", "#cc79a7"),  # reddish purple
    Colour("#c98600", "#e69f00"),  # orange
    Colour("#3a9bd6", "#8ccdf2"),  # sky blue
    Colour("#9c8f00", "#f0e442"),  # yellow, darkened on white
    Colour("#222222", "#e8e8e8"),  # black
)
"""Colours in the order of the policies in the configuration; the ninth policy has the first colour again."""

KINDS = (
    "training", "sampling", "publishing", "forming a batch", "loading weights", "verifying", "evaluating", "scoring"
)  # fmt: skip
"""Activities with a colour of their own, in the order of `KIND_COLOURS`."""
OTHER_KIND = len(KINDS)
KIND_COLOURS: tuple[Colour, ...] = (
    Colour("#009e73", "#22bf92"),
    Colour("#56b4e9", "#8ccdf2"),
    Colour("#d55e00", "#ef7d2d"),
    Colour("#c98600", "#e69f00"),
    Colour("#b3568a", "#cc79a7"),
    Colour("#9c8f00", "#f0e442"),
    Colour("#0072b2", "#3d9fe0"),
    Colour("#222222", "#e8e8e8"),
    Colour("#7a7168", "#a89f95"),
)
"""Colours in the order of `KINDS`; the last is that of all other activities."""


def colour_of(index: int) -> Colour:
    """Return the colour of the policy at place `index`."""
    return POLICY_COLOURS[index % len(POLICY_COLOURS)]
