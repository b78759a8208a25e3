r"""Whether two answers are the same mathematics, by `math-verify`; runs in a verifier process, which bounds its time.

The package's own time limits are off: they rest on SIGALRM, which is refused in threads and does not interrupt a big
multiplication. The package gets one boxed answer, extracted beforehand: of two boxes in one text it accepts neither.

The package ignores the text beside a number, the left side of an equation, the text after an approximation sign, and
the base of a number. This module compares them too: otherwise a policy in training would learn to give several answers.
"""

import itertools
import logging
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from math_verify import parse, verify
from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig
from sympy import And, Eq, N

for name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(name).setLevel(logging.ERROR)  # they warn that time limits are off

FORMS = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
MAX_DEPTH = 20
"""Deepest nesting of brackets in an answer; the parser's time grows exponentially with some nesting."""
ROUNDING = 0.01
"""Largest relative difference between a value and its stated approximation."""

_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_HEDGE = re.compile(r"\b(?:or|nor|not|either|neither|maybe|perhaps|unless|except|but)\b", re.IGNORECASE)
_SEVERAL = re.compile(r"\b(?:or|and)\b|\\(?:lor|land|vee|wedge|cup|cap)(?![a-zA-Z])")
_BASE = re.compile(r"\d\s*_\s*(?:\{\s*(\w+)\s*\}|(\w))")
_PER_CENT = re.compile(r"(-?\d+(?:\.\d+)?)\s*\\?%")
_APPROXIMATION = re.compile(r"\\approx(?![a-zA-Z])|\\simeq(?![a-zA-Z])|≈")
_BETWEEN_WORDS = re.compile(r"(?<=\w)\s+(?=\w)")
_THOUSANDS = re.compile(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?")


def score(reference: str, answer: str) -> float:
    """Return 1.0 when `answer` equals `reference`, as text or as mathematics, and adds nothing to it; else 0.0."""
    if _squeezed(answer) == _squeezed(reference):
        return 1.0
    if _depth(answer) > MAX_DEPTH or _says_more(reference, answer):
        return 0.0
    gold, given = mrl_prepare_reference(reference), _parse(answer)
    if not gold or not verify(gold, given, timeout_seconds=None):
        return 0.0
    if any(isinstance(one, Eq | And) for one in gold):
        return 1.0
    sides = _numbers_equated(answer)
    return float(all(verify(gold, [side], timeout_seconds=None) or _is_rounded(side, gold[0]) for side in sides))


@lru_cache(maxsize=256)
def mrl_prepare_reference(reference: str) -> list[Any]:
    """Return the reference, parsed; kept, because the answers of a group share it."""
    return _parse(reference)


def _parse(answer: str) -> list[Any]:
    return list(parse(f"\\boxed{{{' '.join(answer.split())}}}", FORMS, parsing_timeout=None))


def _says_more(reference: str, answer: str) -> bool:
    """Whether the answer has a part that the parser ignores and that makes it differ from the reference."""
    if not _HEDGE.search(reference) and any(
        _HEDGE.search(text) and len(text.split()) > 1 for text in _TEXT.findall(answer)
    ):
        return True
    if set(_bases(answer)) - {"10", *_bases(reference)}:
        return True
    per_cent = _PER_CENT.fullmatch(answer.strip())
    if per_cent and reference.strip().isdecimal() and int(reference) > 1:
        return float(per_cent[1]) != int(reference)  # a unit then, not a factor
    parts = [part for part in _APPROXIMATION.split(answer) if part.strip()]
    return any(not _is_near(one, other) for one, other in itertools.pairwise(parts))


def _bases(answer: str) -> list[str]:
    """Return the subscripts of numbers: their bases."""
    return [braced or bare for braced, bare in _BASE.findall(answer)]


def _is_near(one: str, other: str) -> bool:
    """Whether both are numbers, and equal up to rounding."""
    first, second = _parse(one), _parse(other)
    return bool(first and second) and _is_close(first[0], second[0])


def _is_rounded(side: Any, gold: Any) -> bool:
    """Whether the side of an equation, not an integer, equals the reference up to rounding."""
    return not side.is_integer and _is_close(side, gold)


def _is_close(one: Any, other: Any) -> bool:
    try:
        first, second = complex(N(one)), complex(N(other))
    except (TypeError, ValueError, AttributeError):
        return False
    return abs(first - second) <= ROUNDING * max(abs(first), abs(second))


def _numbers_equated(answer: str) -> Iterator[Any]:
    """Yield the sides that are numbers, of an equation or a chain of equations; none of several separate equations."""
    if _SEVERAL.search(answer):
        return
    sides, depth = [""], 0
    for place, letter in enumerate(answer):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0 and letter in ",;":
            return
        if depth == 0 and letter == "=" and answer[max(0, place - 1)] not in "<>!:\\":
            sides.append("")
        else:
            sides[-1] += letter
    parsed = (_parse(side) for side in sides if len(sides) > 1 and side.strip())
    yield from (side[0] for side in parsed if side and getattr(side[0], "is_number", False))


def _squeezed(answer: str) -> str:
    """Return the answer without spaces that mean nothing: "1 2" is not 12, and "1 200" is 1200."""
    words = _BETWEEN_WORDS.sub(" ", answer.strip())
    words = words.replace(" ", "") if _THOUSANDS.fullmatch(words) else words
    return re.sub(r"(?<!\w)\s+|\s+(?!\w)", "", words).rstrip(".")


def _depth(answer: str) -> int:
    """Return the greatest nesting of brackets of any kind."""
    depth = deepest = 0
    for letter in answer:
        depth += (letter in "([{") - (letter in ")]}")
        deepest = max(deepest, depth)
    return deepest
