r"""A benchmark by name: its rows from the Hugging Face hub, asked and scored as the `catalogue` says.

[tasks.gsm8k]
source = "benchmark"
dataset = "gsm8k"

The test split is held out. A benchmark without a training split wants `weight = 0`: it is evaluated, not trained on.
"""

import importlib
import importlib.util
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mrl.config.table import Table
from mrl.errors import MissingError, TaskError
from mrl.tasks.benchmarks.catalogue import Benchmark
from mrl.tasks.benchmarks.programs import packed, program_in
from mrl.tasks.data_rows import Split, rows_of
from mrl.tasks.extract import MAX_ANSWER_CHARS, boxed_answer
from mrl.tasks.options import checked_options
from mrl.tasks.source import Item, Part

INSTALL = "pip install 'mrl[tasks]' (includes math-verify)"
MATH = "mrl.tasks.math_answers:score"
VERIFIERS = {"math": MATH, "text": "", "program": "mrl.tasks.benchmarks.programs:passes"}
HASHES = re.compile(r"#### (-?[0-9.,]+)")
_PLACES = re.compile(r"\{problem\}|\{test\}")
LAST_CHARS = 300
"""Characters at the end of a completion in which an answer after "#### " must stand."""


class BenchmarkOptions(Table):
    """The `options` of a task of this source."""

    data: str = ""
    """Folder with the data set in the hub's layout; empty to take it from the hub."""
    prompt: str = ""
    """Prompt instead of the benchmark's own; `{problem}` stands for the problem."""


class BenchmarkSource:
    """The problems of one benchmark, in an order drawn by `seed`."""

    is_finite = True

    def __init__(
        self,
        benchmark: Benchmark,
        dataset: str,
        options: Mapping[str, Any],
        *,
        seed: int,
        where: str,
        get: str = "",
    ) -> None:
        """`dataset` is the folder with the rows. Raises MissingError, TaskError for rows or options that do not fit."""
        self._benchmark = benchmark
        self.verifier = VERIFIERS[benchmark.compare]
        self.evaluates = benchmark.compare == "program"
        if self.verifier == MATH and importlib.util.find_spec("math_verify") is None:
            raise MissingError("the package math-verify is not installed", where=where, cure=INSTALL)
        self._prompt = checked_options(BenchmarkOptions, options, where=where).prompt or benchmark.prompt
        if "{problem}" not in self._prompt:
            what = "options.prompt: the placeholder {problem} is missing"
            raise TaskError(what, where=where, got=self._prompt, wanted="{problem}")
        parts: list[tuple[str, Part]] = [(benchmark.held_out, "held_out")]
        parts += [(benchmark.train, "train")] * bool(benchmark.train)
        items: list[Item] = []
        for split, part in parts:
            rows = rows_of(Path(dataset), Split(split, benchmark.subset), where=where, get=get, form="benchmark rows")
            items += [self._item(place, row, part, number) for number, (place, row) in enumerate(rows, len(items))]
        random.Random(f"{seed}/{len(items)}").shuffle(items)
        self._items = items

    def items(self, limit: int) -> Iterator[Item]:
        """Yield all problems, the held-out ones first."""
        yield from sorted(self._items, key=lambda item: item.part != "held_out")

    def extract(self, completion: str) -> str:
        """Return the answer of a completion, from the place that the benchmark defines; "" when there is none."""
        answer = EXTRACTIONS[self._benchmark.extract](completion)
        return answer if self.evaluates or len(answer) <= MAX_ANSWER_CHARS else ""

    def verifier_reference(self, item: Item) -> str:
        """Return the right answer, or the tests of a program."""
        return packed(self._tests(json.loads(item.row))) if self.evaluates else item.reference

    def _tests(self, row: Mapping[str, Any]) -> str:
        """Return the tests of a row as one text that runs them."""
        tests, entry = str(row.get(self._benchmark.tests) or ""), row.get(self._benchmark.entry, "")
        return f"{tests}\n\ncheck({entry})\n" if entry else tests

    def score(self, item: Item, answer: str) -> float:
        """Return 1.0 for the reference, as text or as mathematics; in this process and without limits.

        Programs are never run here: they are compared as text.
        """
        if self.verifier != MATH:
            return float(answer == item.reference)
        return float(importlib.import_module(MATH.partition(":")[0]).score(item.reference, answer))

    def _item(self, place: str, row: Mapping[str, Any], part: Part, number: int) -> Item:
        problem = row.get(self._benchmark.problem)
        reference = REFERENCES[self._benchmark.reference](row.get(self._benchmark.answer))
        for column, found in ((self._benchmark.problem, problem), (self._benchmark.answer, reference)):
            if not isinstance(found, str) or not found:
                what, got = f"the row has no usable value in {column!r}", f"columns {sorted(row)[:8]}"
                cure = "if the columns have changed, set revision to an earlier version of the data set"
                raise TaskError(what, where=place, got=got, cure=cure)
        examples = row.get(self._benchmark.examples) or [""]
        if self.evaluates and not (self._tests(row).strip() and isinstance(examples, list)):
            what = f"the row has no usable value in {self._benchmark.tests!r}"
            raise TaskError(what, where=place, got=f"columns {sorted(row)[:8]}")
        parts = {"{problem}": str(problem).strip() if self.evaluates else str(problem), "{test}": str(examples[0])}
        text, kept = _PLACES.sub(lambda found: parts[found[0]], self._prompt), json.dumps(row, ensure_ascii=False)
        return Item(text, "", "", number, reference, part, kept)


def _behind_hashes(text: str) -> str:
    """Return the number after the last "#### " near the end of a text, without commas."""
    found = HASHES.findall(text[-LAST_CHARS:])
    return str(found[-1]).replace(",", "").replace("$", "") if found else ""


def _boxed_or_dollars(text: str) -> str:
    """Return the boxed content, else the text between the first and the last dollar sign, else the whole text."""
    if boxed := boxed_answer(text):
        return boxed
    first, last = text.find("$"), text.rfind("$")
    return (text[first + 1 : last] if first < last else text).strip()


def _plain(value: Any) -> str:
    is_answer = isinstance(value, str | int | float) and not isinstance(value, bool)
    return str(value).strip() if is_answer else ""


EXTRACTIONS: dict[str, Callable[[str], str]] = {
    "hashes": _behind_hashes,
    "boxed": boxed_answer,
    "boxed_or_dollars": _boxed_or_dollars,
    "program": program_in,
}
"""Place of the answer in a completion -> function that finds it."""
REFERENCES: dict[str, Callable[[Any], str]] = {
    "plain": _plain,
    "hashes": lambda value: _behind_hashes(_plain(value)),
    "boxed": lambda value: boxed_answer(_plain(value)),
    "first": lambda value: _plain(value[0]).strip("$") if isinstance(value, list) and value else "",
}
"""Form of the right answer in a row -> function that reads it."""
