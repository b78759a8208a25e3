"""Numbers on the page, and its captions."""

import re

import pytest

from mrl.bandit.study import PICTURES
from mrl.bandit.study_page import significant
from mrl.bandit.study_text import CAPTIONS, LIMITS, OPENING, TWO_NUMBERS


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.00759317, "0.00759"), (0.13, "0.130"), (0.0, "0"), (4e-19, "0"), (0.00001234, "1.23e-05"), (123.0, "123")],
)
def test_three_significant_digits(value: float, text: str) -> None:
    """Trailing zeros stay, rounding dust is zero."""
    assert significant(value) == text


def test_every_picture_has_its_caption() -> None:
    """One caption per picture, with words for those who cannot see it."""
    assert list(CAPTIONS) == list(PICTURES)
    assert all(all(caption) for caption in CAPTIONS.values())


def test_the_page_keeps_paper_and_analysis_apart() -> None:
    """The paper is cited for the methods, and the analysis is called this project's."""
    assert "2605.07244" in OPENING
    assert re.search(r"not results of\s+that paper", OPENING)


def test_markup_is_closed() -> None:
    """Every opened element of the fixed text is closed."""
    for text in (OPENING, TWO_NUMBERS, LIMITS, *(part for caption in CAPTIONS.values() for part in caption)):
        for name in ("p", "b", "sup", "sub", "dl", "dt", "dd", "ul", "li", "span", "header", "h1", "h2", "a"):
            assert len(re.findall(rf"<{name}[ >]", text)) == text.count(f"</{name}>"), (name, text[:60])
