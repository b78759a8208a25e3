"""Charts as inline SVG, without scripts: axes with units, direct labels, gaps where data is missing.

Colours come from the page's style sheet: class `c0`, `c1`, ... is the colour of a policy, so that one page serves light
and dark backgrounds.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 560, 290
LEFT, RIGHT, TOP, BOTTOM = 54, 96, 12, 42
LABEL_GAP = 14.0
MAX_DOTS = 300

Points = Sequence[tuple[float, float]]


class Line(NamedTuple):
    """One series: `points` as a line, `raw` as faint dots behind the line. With an empty `label` it has no label."""

    label: str
    colour: int
    points: Points
    raw: Points = ()
    dashed: bool = False
    marks: bool = False


class Axes(NamedTuple):
    """Labels with units, size of the chart, and the range of y where the data do not give it."""

    x: str
    y: str
    y_low: float | None = None
    y_high: float | None = None
    width: int = WIDTH
    height: int = HEIGHT
    whole_x: bool = True
    """Whether x counts something, so that ticks stand on whole numbers only."""


class Frame(NamedTuple):
    """Map from data to places in the drawing."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    width: int = WIDTH
    height: int = HEIGHT

    def x(self, value: float) -> float:
        """Return the horizontal place of a value."""
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Return the vertical place of a value."""
        return TOP + (self.y_high - value) / (self.y_high - self.y_low) * (self.height - TOP - BOTTOM)


def line_chart(lines: Sequence[Line], axes: Axes) -> str:
    """Return the chart as one `<svg>`; empty text when no series has a finite point."""
    frame = _frame(lines, axes)
    if frame is None:
        return ""
    body = [grid(frame, axes)]
    for line in lines:
        body.append(_dots(line, frame))
    for line in lines:
        body.append(_path(line, frame))
    body.append(_labels(lines, frame))
    return svg("".join(body), axes.width, axes.height, f"{axes.y} over {axes.x}")


def svg(body: str, width: float, height: float, description: str) -> str:
    """Return the outer `<svg>` element, which scales with the page."""
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(description)}">{body}</svg>'


def text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "", more: str = "") -> str:
    """Return a `<text>` element with one line of escaped text."""
    attributes = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{attributes}{more}>{escape(words)}</text>'


def grid(frame: Frame, axes: Axes) -> str:
    """Draw horizontal rules, ticks, and the labels of both axes."""
    parts = []
    left, right, bottom = LEFT, frame.width - RIGHT, frame.height - BOTTOM
    for tick in nice_ticks(frame.y_low, frame.y_high, 5):
        y = frame.y(tick)
        parts.append(f'<line class="rule" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(text(left - 7, y + 4, _number(tick), anchor="end", kind="tick"))
    for tick in nice_ticks(frame.x_low, frame.x_high, (right - left) // 60, whole=axes.whole_x):
        x = frame.x(tick)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(text(x, bottom + 17, _number(tick), anchor="middle", kind="tick"))
    parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(text((left + right) / 2, frame.height - 6, axes.x, anchor="middle", kind="label"))
    middle = (TOP + bottom) / 2
    turn = f' transform="rotate(-90 13 {middle:.1f})"'
    parts.append(text(13, middle, axes.y, anchor="middle", kind="label", more=turn))
    return "".join(parts)


def nice_ticks(low: float, high: float, wanted: int, *, whole: bool = False) -> list[float]:
    """Return about `wanted` round numbers within [low, high]; only integers if `whole`."""
    rough = max((high - low) / max(1, wanted), 1.0 if whole else 0.0)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    ticks: list[float] = []
    while (first + len(ticks)) * step <= high + 1e-9 * step:
        ticks.append((first + len(ticks)) * step)
    return ticks


def moving_mean(points: Points, window: int) -> list[tuple[float, float]]:
    """Return the centred mean over `window` points, fewer at the ends; points without a finite y are left out."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    half = window // 2
    sums = [0.0]
    for _, y in finite:
        sums.append(sums[-1] + y)
    smooth = []
    for place, (x, _) in enumerate(finite):
        first, last = max(0, place - half), min(len(finite), place + half + 1)
        smooth.append((x, (sums[last] - sums[first]) / (last - first)))
    return smooth


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return places near the wanted places, at least `gap` apart, within [low, high] as far as there is room."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    places = [0.0] * len(wanted)
    last = low - gap
    for index in order:
        last = places[index] = max(wanted[index], last + gap, low)
    last = high + gap
    for index in reversed(order):
        last = places[index] = min(places[index], last - gap)
    return places


def runs(points: Points) -> list[list[tuple[float, float]]]:
    """Split points where y is not finite; the points there are left out."""
    parts: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if math.isfinite(y):
            parts[-1].append((x, y))
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


def _frame(lines: Sequence[Line], axes: Axes) -> Frame | None:
    finite = [(x, y) for line in lines for x, y in (*line.points, *line.raw) if math.isfinite(y) and math.isfinite(x)]
    if not finite:
        return None
    xs, ys = [x for x, _ in finite], [y for _, y in finite]
    y_low = min(ys) if axes.y_low is None else axes.y_low
    y_high = max(ys) if axes.y_high is None else axes.y_high
    if y_high - y_low < 1e-9:
        y_low, y_high = y_low - (0.5 if axes.y_low is None else 0.0), y_low + 1.0
    x_low, x_high = min(xs), max(xs)
    if x_high - x_low < 1e-9:
        x_low, x_high = x_low - 1, x_high + 1
    x_low = 0.0 if 0 < x_low <= 0.1 * x_high else x_low
    room = 0.05 * (y_high - y_low)
    y_low, y_high = y_low - (room if axes.y_low is None else 0), y_high + (room if axes.y_high is None else 0)
    return Frame(x_low, x_high, y_low, y_high, axes.width, axes.height)


def _dots(line: Line, frame: Frame) -> str:
    finite = [(x, y) for x, y in line.raw if math.isfinite(y)]
    stride = math.ceil(len(finite) / MAX_DOTS) or 1
    dots = "".join(f"M{frame.x(x):.1f} {frame.y(y):.1f}h0" for x, y in finite[::stride])
    return f'<path class="dots c{line.colour}" d="{dots}"/>' if dots else ""


def _path(line: Line, frame: Frame) -> str:
    parts, marks = [], []
    for run in runs(line.points):
        places = [(frame.x(x), frame.y(y)) for x, y in run]
        if len(places) == 1 or line.marks:
            marks += [
                f'<circle class="mark c{line.colour}" cx="{px:.1f}" cy="{py:.1f}" r="3.2">'
                f"<title>{escape(line.label)} {x:g}: {y:.3g}</title></circle>"
                for (px, py), (x, y) in zip(places, run, strict=True)
            ]
        if len(places) > 1:
            parts.append("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places))
    kind = "line dashed" if line.dashed else "line"
    path = f'<path class="{kind} c{line.colour}" d="{"".join(parts)}"/>' if parts else ""
    return path + "".join(marks)


def _labels(lines: Sequence[Line], frame: Frame) -> str:
    ends = [
        (line, run[-1]) for line in lines if line.label and (run := [p for p in line.points if math.isfinite(p[1])])
    ]
    bottom = frame.height - BOTTOM
    places = spread([frame.y(y) for _, (_, y) in ends], LABEL_GAP, TOP + 2, bottom)
    parts = []
    for (line, (x, y)), place in zip(ends, places, strict=True):
        label_x = frame.width - RIGHT + 10
        end_x, end_y = frame.x(x), frame.y(y)
        if abs(place - end_y) > 5 or label_x - end_x > 16:
            parts.append(
                f'<path class="lead c{line.colour}" d="M{end_x + 4:.1f} {end_y:.1f}L{label_x - 2} {place:.1f}"/>'
            )
        parts.append(text(label_x, place + 4, line.label[:14], kind=f"name c{line.colour}"))
    return "".join(parts)


def _number(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.6g}"
