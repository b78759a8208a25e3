r"""Are two answers the same mathematics? By `math-verify`; runs inside a verifier process, which bounds its time.

The package's own time limits are off: they rest on SIGALRM, which is refused in threads and does not interrupt a big
multiplication. It is given one boxed answer, extracted beforehand: of two boxes in one text it accepts neither.
"""

import logging
from functools import lru_cache
from typing import Any

from math_verify import parse, verify
from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

for name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(name).setLevel(logging.ERROR)  # they warn that time limits are off

FORMS = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
MAX_DEPTH = 20
"""Deeper nesting is no answer; the parser's time grows exponentially with some of it."""


def score(reference: str, answer: str) -> float:
    """1.0 when `answer` is `reference`, letter for letter or mathematically, else 0.0."""
    if _squeezed(answer) == _squeezed(reference):
        return 1.0
    if _depth(answer) > MAX_DEPTH:
        return 0.0
    gold = _parsed_reference(reference)
    return float(bool(gold) and verify(gold, _parse(answer), timeout_seconds=None))


@lru_cache(maxsize=256)
def _parsed_reference(reference: str) -> list[Any]:
    """Kept, because the answers of a group share it."""
    return _parse(reference)


def _parse(answer: str) -> list[Any]:
    return list(parse(f"\\boxed{{{' '.join(answer.split())}}}", FORMS, parsing_timeout=None))


def _squeezed(answer: str) -> str:
    return "".join(answer.split()).rstrip(".")


def _depth(answer: str) -> int:
    """Greatest nesting of brackets of any kind."""
    depth = deepest = 0
    for letter in answer:
        depth += (letter in "([{") - (letter in ")]}")
        deepest = max(deepest, depth)
    return deepest
