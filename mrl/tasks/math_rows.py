"""Problems with reference answers, from rows of a JSONL file or of a data set of the Hugging Face hub.

One row is one JSON object. MATH has `problem` and `solution` with the answer in \\boxed{}; GSM8K has `question` and an
`answer` that ends in "#### 72"; MATH-500 has `problem` and a bare `answer`.
"""

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mrl.errors import MissingError, TaskError
from mrl.tasks.extract import MAX_ANSWER_CHARS, boxed_answer, stated_answer

HUB = "hub:"
INSTALL_HUB = "pip install 'mrl[tasks-hub]', or give a JSONL file"
FORM = 'a JSONL file, one object a line: {"problem": "...", "solution": "... \\\\boxed{...}"} or "answer": "..."'


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem and its right answer, as text."""

    problem: str
    reference: str
    row: str
    """As JSON."""


class Keys(NamedTuple):
    """Names under which a row holds its parts; of each the first that the row has counts."""

    problem: tuple[str, ...] = ("problem", "question")
    answer: tuple[str, ...] = ("answer",)
    solution: tuple[str, ...] = ("solution",)


def read_problems(rows: Iterator[tuple[str, Mapping[str, Any]]], keys: Keys) -> list[Problem]:
    """The problems of (place, row) pairs; rows without a usable reference answer are left out.

    Raises TaskError naming the first unusable row when more than half of them are.
    """
    problems: list[Problem] = []
    unusable: list[str] = []
    for place, row in rows:
        problem, reference = _first(row, keys.problem), reference_of(row, keys)
        if problem and reference:
            problems.append(Problem(problem, reference, json.dumps(row, ensure_ascii=False, default=str)))
        else:
            unusable.append(f"{place}: no {'reference answer' if problem else 'problem'} (keys {sorted(row)[:8]})")
    if len(unusable) > len(problems):
        got = f"{len(unusable)} unusable rows of {len(unusable) + len(problems)}"
        raise TaskError(unusable[0], got=got, wanted=FORM, cure="name the keys in the task's options")
    return problems


def reference_of(row: Mapping[str, Any], keys: Keys) -> str:
    """The right answer of a row: boxed, after "####", or the whole value of an answer key; "" when it has none."""
    given, solution = _first(row, keys.answer), _first(row, keys.solution)
    for text in (given, solution):
        found = boxed_answer(text) or (stated_answer(text) if "####" in text else "")
        if found:
            return found
    return given if len(given) <= MAX_ANSWER_CHARS else ""


def hub_rows(name: str, *, subset: str, split: str, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place, row) of one split, through the `datasets` package, which fetches it once and keeps it.

    Raises MissingError without the package, TaskError when it cannot load the data set.
    """
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise MissingError("the package datasets is not installed", where=where, cure=INSTALL_HUB) from error
    try:
        rows = datasets.load_dataset(name, subset or None, split=split)
    except Exception as error:  # the package raises dozens of kinds for a name, a network, a format
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise TaskError(f"the hub's data set {name!r} cannot be loaded ({reason})", where=where, got=split) from error
    for number, row in enumerate(rows):
        yield f"{name}[{split}][{number}]", row


def _first(row: Mapping[str, Any], keys: Sequence[str]) -> str:
    """The first of these values that is text or a number, as text; "" when there is none."""
    for key in keys:
        value = row.get(key)
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value).strip()
    return ""
