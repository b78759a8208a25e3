r"""Any prompts and references from a file, usually judged by a verifier of your own.

[tasks.code]
source = "jsonl"
dataset = "data/problems.jsonl"                    one object a line: {"prompt": "...", "reference": "..."}
options = { held_out = "data/held_out.jsonl" }     or none: then 15 % of the prompts, by hash, are held out
verifier = "my_verifiers:passes_tests"             def passes_tests(reference: str, answer: str) -> float

What the verifier needs to know of a prompt (tests, a rubric) stands in its reference; one that is no text is given to
it as JSON. It may also take the `prompt`, and the whole `row` as a dict. Without a verifier an answer is right when it
is the reference, letter for letter.
"""

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mrl.config.table import Table
from mrl.errors import TaskError
from mrl.tasks.extract import tagged_answer
from mrl.tasks.math_rows import jsonl_rows
from mrl.tasks.options import checked_options
from mrl.tasks.source import Item, Part
from mrl.tasks.split import HELD_OUT_PERCENT, hash_percent

FORM = 'a JSONL file, one object a line: {"prompt": "...", "reference": "..."}'


class JsonlOptions(Table):
    """The `options` of a task of this source."""

    held_out: str = ""
    """Second JSONL file, with the held-out prompts."""
    prompt_key: str = "prompt"
    """Key of a row that holds the prompt."""
    reference_key: str = "reference"
    """Key that holds what the verifier is given beside the answer."""


class JsonlSource:
    """Prompts of one file (or two, with the held-out ones), in an order drawn by `seed`."""

    is_finite = True
    verifier = ""
    evaluates = False

    def __init__(self, dataset: str, options: Mapping[str, Any], *, seed: int, where: str, get: str = "") -> None:
        """Raises MissingError for a file that is not there, TaskError for bad options or rows."""
        self._options = checked_options(JsonlOptions, options, where=where)
        held_out = self._options.held_out
        parts: list[Part | None] = ["held_out", "train"] if held_out else [None]
        files = [held_out, dataset] if held_out else [dataset]
        found = [
            (part, *self._row(place, row))
            for part, file in zip(parts, files, strict=True)
            for place, row in jsonl_rows(Path(file), where=where, get=get, form=FORM)
        ]
        self._items = [
            Item(prompt, "", "", number, reference, part or _hashed_part(prompt), row)
            for number, (part, prompt, reference, row) in enumerate(found)
        ]
        random.Random(f"{seed}/{len(self._items)}").shuffle(self._items)

    def items(self, limit: int) -> Iterator[Item]:
        """All prompts, the held-out ones first, so that one that stands in both files is held out."""
        yield from sorted(self._items, key=lambda item: item.part != "held_out")

    def extract(self, completion: str) -> str:
        """What stands in the last <answer> tags, or the whole completion."""
        return tagged_answer(completion)

    def verifier_reference(self, item: Item) -> str:
        """The right answer."""
        return item.reference

    def score(self, item: Item, answer: str) -> float:
        """1.0 for exactly the reference."""
        return float(answer == item.reference.strip())

    def _row(self, place: str, row: Mapping[str, Any]) -> tuple[str, str, str]:
        """Prompt and reference of a row, and all of it as JSON. Raises TaskError."""
        prompt, reference = row.get(self._options.prompt_key), row.get(self._options.reference_key)
        if not isinstance(prompt, str) or not prompt:
            raise _lacking(self._options.prompt_key, "prompt_key", place, row)
        if reference is None:
            raise _lacking(self._options.reference_key, "reference_key", place, row)
        reference = reference if isinstance(reference, str) else json.dumps(reference, ensure_ascii=False)
        return prompt, reference, json.dumps(row, ensure_ascii=False)


def _lacking(key: str, option: str, place: str, row: Mapping[str, Any]) -> TaskError:
    cure = f"name the key in the task's options.{option}"
    return TaskError(f"row without {key!r}", where=place, got=f"keys {sorted(row)[:8]}", wanted=FORM, cure=cure)


def _hashed_part(prompt: str) -> Part:
    return "held_out" if hash_percent(prompt) < HELD_OUT_PERCENT else "train"
