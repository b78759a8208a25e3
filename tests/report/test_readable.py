"""Numbers as a person reads them."""

import math

import pytest

from mrl.report import readable


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (readable.count, 0, "0"),
        (readable.count, 210, "210"),
        (readable.count, 999.6, "1.0k"),
        (readable.count, 5_120, "5.1k"),
        (readable.count, 9_960, "10k"),
        (readable.count, 999_700, "1.0M"),
        (readable.count, -5_120, "-5.1k"),
        (readable.count, 3.4e15, "3400T"),
        (readable.size, 71_000, "71 kB"),
        (readable.size, 12, "12 B"),
        (readable.fixed, 0.414, "0.41"),
        (readable.fixed, -0.001, "0.00"),
        (readable.signed, 0.37, "+0.37"),
        (readable.signed, -0.37, "-0.37"),
        (readable.signed, 0.001, "0.00"),
        (readable.percent, 0.631, "63%"),
        (readable.seconds, 0.05, "0.05s"),
        (readable.seconds, 0.0999, "0.1s"),
        (readable.seconds, 1.2, "1.2s"),
        (readable.seconds, 9.96, "10s"),
        (readable.seconds, 300, "300s"),
        (readable.seconds, 1500, "25m"),
        (readable.seconds, 10_800, "3.0h"),
        (readable.elapsed, 42.9, "00:42"),
        (readable.elapsed, 3723, "1:02:03"),
        (readable.elapsed, -1, "00:00"),
    ],
)
def test_numbers_are_short_and_carry_their_unit(function: object, value: float, text: str) -> None:
    """Every kind of number has one short form, at the edges of its ranges too."""
    assert callable(function)
    assert function(value) == text


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_what_is_missing_is_a_dash(missing: float | None) -> None:
    """Neither None, nor NaN, nor infinity is ever shown as a number."""
    for function in (
        readable.count,
        readable.size,
        readable.fixed,
        readable.signed,
        readable.percent,
        readable.seconds,
    ):
        assert function(missing) == "-"


def test_sparkline_spans_the_whole_series_in_the_given_width() -> None:
    """The line is scaled to its own range, means over equal parts, and drops what is no number."""
    assert readable.sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert readable.sparkline([0, 0, math.nan, 1, 1], 2) == "▁█"
    assert readable.sparkline([0.5, 0.5], 8) == "▄▄"
    assert readable.sparkline([math.nan], 8) == ""
    assert len(readable.sparkline([float(value) for value in range(1000)], 12)) == 12
