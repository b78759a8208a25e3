"""Chart primitives."""

import math
import xml.etree.ElementTree as ElementTree

import pytest

from mrl.report.svg import Axes, Line, line_chart, moving_mean, nice_ticks, runs, spread

AXES = Axes("step", "reward")


def parse(drawing: str) -> ElementTree.Element:
    return ElementTree.fromstring(drawing)


def test_ticks_are_round_and_inside() -> None:
    """About as many as wanted, on multiples of 1, 2 or 5 times a power of ten."""
    assert nice_ticks(0, 1, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert nice_ticks(-3, 320, 6) == [0, 100, 200, 300]
    assert nice_ticks(1e-4, 3e-4, 4) == pytest.approx([1e-4, 1.5e-4, 2e-4, 2.5e-4, 3e-4])
    assert nice_ticks(0, 2, 6, whole=True) == [0, 1, 2]


def test_moving_mean_is_centred_and_ignores_what_is_no_number() -> None:
    """At the ends the window shrinks; a NaN neither counts nor breaks the line."""
    points = [(0.0, 1.0), (1.0, math.nan), (2.0, 3.0), (3.0, 8.0)]
    assert moving_mean(points, 3) == [(0.0, 2.0), (2.0, 4.0), (3.0, 5.5)]
    assert moving_mean([], 3) == []


def test_labels_keep_their_distance_and_stay_inside() -> None:
    """Labels that would overlap are moved apart, in their order, within the bounds."""
    assert spread([10.0, 50.0], 14, 0, 100) == [10.0, 50.0]
    places = spread([99.0, 99.0, 98.0], 14, 0, 100)
    assert sorted(places) == [72.0, 86.0, 100.0]
    assert places[2] == 72.0
    assert min(spread([0.0, 0.0], 14, 2, 100)) == 2


def test_a_gap_parts_the_line() -> None:
    """A missing value is never bridged."""
    assert runs([(0, 1.0), (1, math.nan), (2, math.nan), (3, 2.0), (4, 3.0)]) == [[(0, 1.0)], [(3, 2.0), (4, 3.0)]]
    points = [(0.0, 1.0), (1.0, 2.0), (2.0, math.nan), (3.0, 2.0), (4.0, 3.0)]
    path = next(e for e in parse(line_chart([Line("a", 0, points)], AXES)).iter("path") if e.get("class") == "line c0")
    assert (path.get("d") or "").count("M") == 2


def test_a_single_point_is_a_dot() -> None:
    """One point makes one mark, at a finite place, and no line."""
    drawing = parse(line_chart([Line("a", 0, [(3.0, 0.5)])], AXES))
    (circle,) = drawing.iter("circle")
    assert math.isfinite(float(circle.get("cx") or "nan"))
    assert not [element for element in drawing.iter("path") if element.get("class") == "line c0"]


def test_nothing_finite_makes_no_chart() -> None:
    """Without a number there is no drawing, rather than an empty frame."""
    assert line_chart([Line("a", 0, [(0.0, math.nan)]), Line("b", 1, [])], AXES) == ""


@pytest.mark.parametrize("points", [[(0.0, 0.0), (1.0, 0.0)], [(5.0, 1e-12)], [(0.0, -1e6), (1.0, 1e6)], [(0.0, 7.0)]])
@pytest.mark.parametrize("axes", [AXES, Axes("step", "share", 0.0, 1.0), Axes("step", "count", 0.0)])
def test_every_range_draws_finite_coordinates(points: list[tuple[float, float]], axes: Axes) -> None:
    """Flat, tiny and huge ranges, and bounds that the data leave, give a chart without NaN or infinity."""
    drawing = line_chart([Line("a", 0, points, points)], axes)
    parse(drawing)
    assert "nan" not in drawing
    assert "inf" not in drawing


def test_long_series_draw_a_bounded_number_of_dots() -> None:
    """A run of ten thousand steps does not make a page of ten thousand dots."""
    points = [(float(step), 0.5) for step in range(10_000)]
    dots = next(
        e for e in parse(line_chart([Line("a", 0, [], points)], AXES)).iter("path") if e.get("class") == "dots c0"
    )
    assert (dots.get("d") or "").count("M") <= 300


def test_labels_and_axes_are_escaped() -> None:
    """A hostile name is text in the drawing."""
    drawing = line_chart([Line("<b>&", 0, [(0.0, 1.0)], marks=True)], Axes('"x"', "<y>"))
    assert "<b>" not in drawing
    assert any(element.text == "<b>&" for element in parse(drawing).iter("text"))
