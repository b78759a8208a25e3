"""Adapter to the `reasoning-gym` package: its prompts unaltered, its own scorers.

A scorer that only compares texts runs here; all others in verifier processes (`reasoning_gym_answers`).

A data set is created once and indexed; entry `i` depends on the seed and `i` alone. The package may be missing
(extra `tasks`): it is imported when a data set is opened.
"""

import difflib
import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mrl.errors import MissingError, TaskError
from mrl.tasks.answer_grammars import GRAMMARS
from mrl.tasks.extract import tagged_answer
from mrl.tasks.source import Item

INSTALL = "pip install 'mrl[tasks]' (includes reasoning-gym)"
VERIFIER = "mrl.tasks.reasoning_gym_answers:score"
SIZE = {"size": 1_000_000}
"""Entries of a data set, unless the options say otherwise; some data sets refuse so many."""
LOOKED_AT_ENTRIES = 8
COMPOSITE = "composite"
"""Name of the data set made of others, listed in its option `datasets` as tables of name, weight and config."""
COMPARE_TEXTS = {"spell_backward"}
"""Data sets whose own scorer is quick and harmless. Where a data set has no own scorer, texts are compared anyway."""

SUBJECTS: dict[str, Callable[[Mapping[str, Any]], tuple[str, str]]] = {
    "spell_backward": lambda entry: (entry["metadata"]["word"], ""),
    "letter_counting": lambda entry: (entry["question"].split('"')[3], entry["metadata"]["target_letter"]),
}
"""Data set -> (word, letter) of an entry, for the data sets whose prompts are about one word."""


class ReasoningGymSource:
    """One data set of reasoning-gym."""

    is_finite = False

    def __init__(self, dataset: str, options: Mapping[str, Any], *, seed: int, where: str, get: str = "") -> None:
        """Raises MissingError without the package, TaskError for an unknown data set or options that it refuses."""
        _import("reasoning_gym", where)
        known = sorted(_import("reasoning_gym.factory", where).DATASETS)
        if dataset not in known:
            near = difflib.get_close_matches(dataset, known, n=3)
            cure = (
                "did you mean " + " or ".join(near) + "?"
                if near
                else "list the data sets with python -c 'import reasoning_gym.factory as f; \
print(*f.DATASETS)'"
            )
            raise TaskError("reasoning-gym has no such data set", where=where, got=dataset, cure=cure)
        parts = _parts(options, seed=seed, where=f"{where}.options.datasets") if dataset == COMPOSITE else []
        try:
            self._dataset, again = (created(dataset, options, seed=seed) for _ in range(2))
        except (TypeError, ValueError, AssertionError, AttributeError, LookupError) as error:
            reason = (str(error).splitlines() or ["assertion failed"])[0]
            what = f"data set {dataset!r} does not accept its options ({reason})"
            cure = "see the data set's config class in reasoning-gym"
            raise TaskError(what, where=where, got=dict(options), cure=cure) from error
        _check_repeatable(self._dataset, again, where)
        self._subject = SUBJECTS.get(dataset)
        self._asked = dataset, dict(options), seed
        compares = dataset in COMPARE_TEXTS or not _has_own_scorer(self._dataset)
        self.verifier = "" if compares else VERIFIER
        self.evaluates: bool = dataset in GRAMMARS or any(part.evaluates for part in parts)

    def items(self, limit: int) -> Iterator[Item]:
        """Yield the first `limit` entries."""
        for number in range(min(limit, len(self._dataset))):
            entry = self._dataset[number]
            subject, letter = self._subject(entry) if self._subject else ("", "")
            answer = entry["answer"]
            yield Item(entry["question"], subject, letter, number, "" if answer is None else str(answer))

    def extract(self, completion: str) -> str:
        """Return the content of the answer's tags."""
        return tagged_answer(completion)

    def verifier_reference(self, item: Item) -> str:
        """Return data set, options, seed and place of the entry as JSON: the scorer reads the whole entry."""
        return json.dumps([*self._asked, item.number])

    def score(self, item: Item, answer: str) -> float:
        """Return the data set's own score of an extracted answer, 0 to 1; without limits: pools use `verifier`."""
        return float(self._dataset.score_answer(answer, self._dataset[item.number]))


def created(dataset: str, options: Mapping[str, Any], *, seed: int) -> Any:
    """Create a data set of the package. Raises TypeError, ValueError, AssertionError for options that it refuses."""
    from reasoning_gym import create_dataset
    from reasoning_gym.composite import DatasetSpec

    given = {**SIZE, **options, "seed": seed}
    if dataset == COMPOSITE and "datasets" in options:
        given["datasets"] = [DatasetSpec(**{"weight": 1.0, "config": {}, **part}) for part in options["datasets"]]
    return create_dataset(dataset, **given)


def _parts(options: Mapping[str, Any], *, seed: int, where: str) -> list[ReasoningGymSource]:
    """Open each part of a composite data set by itself. Raises TaskError, which names the part with a mistake."""
    found, tables = [], options.get("datasets")
    if not isinstance(tables, list) or not tables:
        raise TaskError(
            "the composite data set has no list of parts",
            where=where,
            wanted='a list such as [{ name = "chain_sum", weight = 1 }]',
        )
    for number, part in enumerate(tables):
        name, at = part.get("name") if isinstance(part, Mapping) else None, f"{where}[{number}]"
        if not isinstance(name, str) or not name or set(part) - {"name", "weight", "config"}:
            wanted = "a table with name, and optionally weight and config"
            raise TaskError("not a valid part of a composite data set", where=at, got=part, wanted=wanted)
        weight, config = part.get("weight", 1.0), part.get("config", {})
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise TaskError("not a valid weight", where=f"{at}.weight", got=weight, wanted="a finite number > 0")
        if name == COMPOSITE or not isinstance(config, Mapping):
            what = "composite data sets cannot be nested" if name == COMPOSITE else "config is not a table"
            wanted = "the name of another data set, and config as a table of its options"
            raise TaskError(what, where=at, got=part, wanted=wanted)
        found.append(ReasoningGymSource(name, config, seed=seed, where=at))
    return found


def _check_repeatable(dataset: Any, again: Any, where: str) -> None:
    """Check that two openings give the same entries: learners and workers each open the data set. Raises TaskError."""
    for number in range(min(LOOKED_AT_ENTRIES, len(dataset))):
        one, other = dataset[number], again[number]
        if (one["question"], one["answer"]) != (other["question"], other["answer"]):
            what = f"the data set is not reproducible: entry {number} differs each time it is opened with the same seed"
            raise TaskError(what, where=where, got=type(dataset).__name__, cure="use another data set")


def _has_own_scorer(dataset: Any) -> bool:
    from reasoning_gym.dataset import ProceduralDataset

    return type(dataset).score_answer is not ProceduralDataset.score_answer


def _import(name: str, where: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingError("the package reasoning-gym is not installed", where=where, cure=INSTALL) from error
