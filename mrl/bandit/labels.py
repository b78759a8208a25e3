"""Where names and values stand in a picture: beside what they name, never over each other.

Places are in axes coordinates: 0 to 1 from left to right and from bottom to top.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from mrl.bandit.method_looks import LOOKS
from mrl.bandit.problem import Floats
from mrl.plots import INK

HALO = withStroke(linewidth=3, foreground="white")
CHARACTER, LINE, GAP = 0.027, 0.062, 0.028
"""Width of a character, height of a line, distance from a dot, in a panel of about three by two and a half inches."""
LABEL_DISTANCE = 0.058
"""Least distance of two names at the ends of lines."""


class Box(NamedTuple):
    """A label's extent."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: "Box") -> bool:
        """Whether two boxes share a point."""
        across = self.left < other.right and other.left < self.right
        return across and self.bottom < other.top and other.bottom < self.top

    def count(self, points_P2: Floats) -> int:
        """How many points lie inside."""
        x, y = points_P2.T
        return int(((self.left < x) & (x < self.right) & (self.bottom < y) & (y < self.top)).sum())


def apart(places: Sequence[float], gap: float) -> list[float]:
    """The places in their order, moved as little as needed for neighbours to be `gap` apart."""
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
    """Names of lines right of the axes, at the height of their last point, as far as they do not overlap."""
    heights = [float(in_axes(axes, *end)[1]) for end in ends.values()]
    for name, height in zip(ends, apart(heights, LABEL_DISTANCE), strict=True):
        axes.text(1.015, height, texts[name], color=LOOKS[name].colour, transform=axes.transAxes, va="center",
                  fontweight="bold", fontsize=9.5)  # fmt: skip


def label_points(axes: Axes, points_P2: Floats, texts: Sequence[str], line_L2: Floats) -> None:
    """A value beside each point, on the side where it covers least of the line; one without room is left out."""
    line_L2 = _dense(line_L2)
    taken: list[Box] = [Box(x - 0.02, y - 0.028, x + 0.02, y + 0.028) for x, y in points_P2]
    for point, text in zip(points_P2, texts, strict=True):
        if not np.all((point >= 0) & (point <= 1)):
            continue
        boxes = [box for box in _sides(point, len(text)) if not any(map(box.overlaps, taken))]
        if boxes:
            best = min(boxes, key=lambda box: box.count(line_L2))
            taken.append(best)
            middle = (best.left + best.right) / 2, (best.bottom + best.top) / 2
            axes.text(*middle, text, transform=axes.transAxes, ha="center", va="center", fontsize=8.5, color=INK,
                      zorder=6, path_effects=[HALO])  # fmt: skip


def in_axes(axes: Axes, x: float | Floats, y: float | Floats) -> Floats:
    """Data as places in the axes, [..., 2]."""
    flat = np.stack([np.ravel(x), np.ravel(y)], axis=-1)
    places: Floats = axes.transAxes.inverted().transform(axes.transData.transform(flat))
    return places.reshape(*np.shape(x), 2)


def _dense(line_L2: Floats) -> Floats:
    """The same line with points close enough to be seen by any label that covers it."""
    steps_L = np.concatenate([[0.0], np.hypot(*np.diff(line_L2, axis=0).T).cumsum()])
    at = np.linspace(0, steps_L[-1], 400)
    return np.stack([np.interp(at, steps_L, line_L2[:, axis]) for axis in (0, 1)], axis=-1)


def _sides(point: Floats, length: int) -> list[Box]:
    """Right, left, above and below, as far as they lie inside the axes."""
    x, y = map(float, point)
    width, tall = length * CHARACTER, LINE
    boxes = [
        Box(x + GAP, y - tall / 2, x + GAP + width, y + tall / 2),
        Box(x - GAP - width, y - tall / 2, x - GAP, y + tall / 2),
        Box(x - width / 2, y + GAP, x + width / 2, y + GAP + tall),
        Box(x - width / 2, y - GAP - tall, x + width / 2, y - GAP),
    ]
    return [box for box in boxes if box.left > 0 and box.right < 1 and box.bottom > 0 and box.top < 1]
