"""Adapter to the `reasoning-gym` package: its prompts unaltered, its own scorers.

A scorer that only compares texts runs here; all others in verifier processes (`reasoning_gym_answers`).

A data set is created once and indexed; entry `i` depends on the seed and `i` alone. The package may be missing
(extra `tasks`): it is imported when a data set is opened.
"""

import difflib
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mrl.errors import MissingError, TaskError
from mrl.tasks.answer_grammars import GRAMMARS
from mrl.tasks.extract import tagged_answer
from mrl.tasks.source import Item

INSTALL = "pip install 'mrl[tasks]' (it holds reasoning-gym)"
VERIFIER = "mrl.tasks.reasoning_gym_answers:score"
SIZE = {"size": 1_000_000}
"""Entries that there may be, unless the options say otherwise; some data sets refuse so many."""
LOOKED_AT_ENTRIES = 8
COMPARE_TEXTS = {"spell_backward"}
"""Data sets with a scorer of their own that is quick and harmless; without one, texts are compared anyway."""

SUBJECTS: dict[str, Callable[[Mapping[str, Any]], tuple[str, str]]] = {
    "spell_backward": lambda entry: (entry["metadata"]["word"], ""),
    "letter_counting": lambda entry: (entry["question"].split('"')[3], entry["metadata"]["target_letter"]),
}
"""(word, letter) behind an entry, for the data sets whose prompts are about one word."""


class ReasoningGymSource:
    """One data set of reasoning-gym."""

    is_finite = False

    def __init__(self, dataset: str, options: Mapping[str, Any], *, seed: int, where: str, get: str = "") -> None:
        """Raises MissingError without the package, TaskError for an unknown data set or options that it refuses."""
        gym = _import("reasoning_gym", where)
        known = sorted(_import("reasoning_gym.factory", where).DATASETS)
        if dataset not in known:
            near = difflib.get_close_matches(dataset, known, n=3)
            cure = (
                "did you mean " + " or ".join(near) + "?"
                if near
                else "python -c 'import reasoning_gym.factory as f; \
print(*f.DATASETS)' lists them"
            )
            raise TaskError("reasoning-gym has no such data set", where=where, got=dataset, cure=cure)
        try:
            self._dataset, again = (gym.create_dataset(dataset, **{**SIZE, **options, "seed": seed}) for _ in range(2))
        except (TypeError, ValueError, AssertionError) as error:
            reason = (str(error).splitlines() or ["assertion"])[0]
            what = f"data set {dataset!r} refuses its options ({reason})"
            raise TaskError(what, where=where, got=dict(options), cure="see the data set's config class") from error
        _check_repeatable(self._dataset, again, where)
        self._subject = SUBJECTS.get(dataset)
        self._asked = dataset, dict(options), seed
        compares = dataset in COMPARE_TEXTS or not _has_own_scorer(self._dataset)
        self.verifier = "" if compares else VERIFIER
        self.evaluates = dataset in GRAMMARS

    def items(self, limit: int) -> Iterator[Item]:
        """The first `limit` entries."""
        for number in range(min(limit, len(self._dataset))):
            entry = self._dataset[number]
            subject, letter = self._subject(entry) if self._subject else ("", "")
            answer = entry["answer"]
            yield Item(entry["question"], subject, letter, number, "" if answer is None else str(answer))

    def extract(self, completion: str) -> str:
        """What stands in the answer's tags."""
        return tagged_answer(completion)

    def verifier_reference(self, item: Item) -> str:
        """Which entry it is: the scorer looks at all of it."""
        return json.dumps([*self._asked, item.number])

    def score(self, item: Item, answer: str) -> float:
        """The data set's own score of an extracted answer, between 0 and 1; without limits: pools use `verifier`."""
        return float(self._dataset.score_answer(answer, self._dataset[item.number]))


def _check_repeatable(dataset: Any, again: Any, where: str) -> None:
    """Learners and workers each open it, and have to see the same. Raises TaskError."""
    for number in range(min(LOOKED_AT_ENTRIES, len(dataset))):
        one, other = dataset[number], again[number]
        if (one["question"], one["answer"]) != (other["question"], other["answer"]):
            what = f"entry {number} is another one whenever the data set is opened"
            raise TaskError(what, where=where, got=type(dataset).__name__, cure="another data set")


def _has_own_scorer(dataset: Any) -> bool:
    from reasoning_gym.dataset import ProceduralDataset

    return type(dataset).score_answer is not ProceduralDataset.score_answer


def _import(name: str, where: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingError("the package reasoning-gym is not installed", where=where, cure=INSTALL) from error
