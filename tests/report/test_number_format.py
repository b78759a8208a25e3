"""Numbers as a person reads them."""

import math

import pytest

from mrl.report import number_format

SHOWN = {
    "count": {0: "0", 210: "210", 999.6: "1.0k", 5_120: "5.1k", 9_960: "10k", 999_700: "1.0M", -5_120: "-5.1k",
              3.4e15: "3400T"},
    "size": {71_000: "71 kB", 12: "12 B"},
    "fixed": {0.414: "0.41", -0.001: "0.00"},
    "signed": {0.37: "+0.37", -0.37: "-0.37", 0.001: "0.00"},
    "percent": {0.631: "63%"},
    "seconds": {0.05: "0.05s", 0.0999: "0.1s", 1.2: "1.2s", 9.96: "10s", 300: "300s", 1500: "25m", 10_800: "3.0h"},
    "elapsed": {42.9: "00:42", 3723: "1:02:03", -1: "00:00"},
}  # fmt: skip
"""Function -> what it makes of a number."""


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [(function, value, text) for function, shown in SHOWN.items() for value, text in shown.items()],
)
def test_numbers_are_short_and_carry_their_unit(function: str, value: float, text: str) -> None:
    """Every kind of number has one short form, at the edges of its ranges too."""
    assert getattr(number_format, function)(value) == text


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
