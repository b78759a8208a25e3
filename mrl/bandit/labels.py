"""Places of the names of lines in a picture: beside their lines, never over each other.

Places are in axes coordinates: 0 to 1 from bottom to top.
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from mrl.bandit.method_styles import LOOKS

HALO = withStroke(linewidth=3, foreground="white")
LABEL_DISTANCE = 0.058
"""Least distance of two names at the ends of lines."""


def apart(places: Sequence[float], gap: float) -> list[float]:
    """Return the places in their order, moved as little as needed for neighbours to be `gap` apart."""
    order = sorted(range(len(places)), key=places.__getitem__)
    blocks: list[tuple[float, int]] = []  # (centre, size): labels that touch move together
    for index in order:
        centre, size = places[index], 1
        while blocks and centre - blocks[-1][0] < gap * (size + blocks[-1][1]) / 2:
            before, count = blocks.pop()
            centre, size = (centre * size + before * count) / (size + count), size + count
        blocks.append((centre, size))
    moved = [centre + gap * (i - (size - 1) / 2) for centre, size in blocks for i in range(size)]
    return [moved[order.index(index)] for index in range(len(places))]


def label_ends(axes: Axes, ends: dict[str, tuple[float, float]], texts: dict[str, str]) -> None:
    """Write names of lines right of the axes, at the height of their last point, as far as they do not overlap."""
    to_axes = axes.transData - axes.transAxes
    heights = [float(to_axes.transform(end)[1]) for end in ends.values()]
    for name, height in zip(ends, apart(heights, LABEL_DISTANCE), strict=True):
        axes.text(1.015, height, texts[name], color=LOOKS[name].colour, transform=axes.transAxes, va="center",
                  fontweight="bold", fontsize=9.5)  # fmt: skip
