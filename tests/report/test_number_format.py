"""Numbers as a person reads them."""

import math

import pytest

from mrl.report import number_format


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (number_format.count, 0, "0"),
        (number_format.count, 210, "210"),
        (number_format.count, 999.6, "1.0k"),
        (number_format.count, 5_120, "5.1k"),
        (number_format.count, 9_960, "10k"),
        (number_format.count, 999_700, "1.0M"),
        (number_format.count, -5_120, "-5.1k"),
        (number_format.count, 3.4e15, "3400T"),
        (number_format.size, 71_000, "71 kB"),
        (number_format.size, 12, "12 B"),
        (number_format.fixed, 0.414, "0.41"),
        (number_format.fixed, -0.001, "0.00"),
        (number_format.signed, 0.37, "+0.37"),
        (number_format.signed, -0.37, "-0.37"),
        (number_format.signed, 0.001, "0.00"),
        (number_format.percent, 0.631, "63%"),
        (number_format.seconds, 0.05, "0.05s"),
        (number_format.seconds, 0.0999, "0.1s"),
        (number_format.seconds, 1.2, "1.2s"),
        (number_format.seconds, 9.96, "10s"),
        (number_format.seconds, 300, "300s"),
        (number_format.seconds, 1500, "25m"),
        (number_format.seconds, 10_800, "3.0h"),
        (number_format.elapsed, 42.9, "00:42"),
        (number_format.elapsed, 3723, "1:02:03"),
        (number_format.elapsed, -1, "00:00"),
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
        number_format.count,
        number_format.size,
        number_format.fixed,
        number_format.signed,
        number_format.percent,
        number_format.seconds,
    ):
        assert function(missing) == "-"


def test_sparkline_spans_the_whole_series_in_the_given_width() -> None:
    """The line is scaled to its own range, means over equal parts, and drops what is no number."""
    assert number_format.sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert number_format.sparkline([0, 0, math.nan, 1, 1], 2) == "▁█"
    assert number_format.sparkline([0.5, 0.5], 8) == "▄▄"
    assert number_format.sparkline([math.nan], 8) == ""
    assert len(number_format.sparkline([float(value) for value in range(1000)], 12)) == 12
