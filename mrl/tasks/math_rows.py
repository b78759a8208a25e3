"""Problems with reference answers, from rows of data files.

One row is one JSON object. MATH has `problem` and `solution` with the answer in \\boxed{}; GSM8K has `question` and an
`answer` that ends in "#### 72"; MATH-500 has `problem` and a bare `answer`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mrl.errors import TaskError
from mrl.tasks.extract import MAX_ANSWER_CHARS, boxed_answer, stated_answer

FORM = 'a JSONL file, one object per line: {"problem": "...", "solution": "... \\\\boxed{...}"} or "answer": "..."'


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem and its right answer, as text."""

    problem: str
    reference: str
    row: str
    """The row as JSON."""


class Keys(NamedTuple):
    """Keys under which a row holds its parts; the first of each that the row has counts."""

    problem: tuple[str, ...] = ("problem", "question")
    answer: tuple[str, ...] = ("answer",)
    solution: tuple[str, ...] = ("solution",)


def read_problems(rows: Iterator[tuple[str, Mapping[str, Any]]], keys: Keys) -> list[Problem]:
    """Return the problems of (place, row) pairs; rows without a usable reference answer are left out.

    Raises TaskError naming the first unusable row when more than half of the rows are unusable.
    """
    problems: list[Problem] = []
    unusable: list[str] = []
    for place, row in rows:
        problem, reference = _first(row, keys.problem), reference_of(row, keys)
        if problem and reference:
            problems.append(Problem(problem, reference, json.dumps(row, ensure_ascii=False, default=str)))
        else:
            unusable.append(f"{place}: no {'reference answer' if problem else 'problem text'} (keys {sorted(row)[:8]})")
    if len(unusable) > len(problems):
        got = f"{len(unusable)} unusable rows of {len(unusable) + len(problems)}"
        raise TaskError(
            unusable[0],
            got=got,
            wanted=FORM,
            cure="set problem_keys, answer_keys or solution_keys in the task's options",
        )
    return problems


def reference_of(row: Mapping[str, Any], keys: Keys) -> str:
    """Return the right answer of a row: boxed, after "####", or the whole value of an answer key; "" without one."""
    given, solution = _first(row, keys.answer), _first(row, keys.solution)
    for text in (given, solution):
        found = boxed_answer(text) or (stated_answer(text) if "####" in text else "")
        if found:
            return found
    return given if len(given) <= MAX_ANSWER_CHARS else ""


def _first(row: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Return the first value under these keys that is text or a number, as text; "" when there is none."""
    for key in keys:
        value = row.get(key)
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value).strip()
    return ""
