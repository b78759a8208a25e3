r"""Mathematics: problems from a file, answers in \boxed{}, judged by the `math-verify` package.

[tasks.math]
source = "math"
dataset = "data/math/train.jsonl"                  or the id of a data set on the hub
options = { held_out = "data/math/test.jsonl" }    or none: then 15 % of the problems, by hash, are held out

Every problem is either trained on or held out; a problem that stands in both files is held out.
"""

import importlib.util
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from mrl.config.table import Table
from mrl.errors import MissingError, TaskError
from mrl.tasks.data_rows import Split, check_of_folder, kept, rows_of
from mrl.tasks.extract import MAX_ANSWER_CHARS, boxed_answer, stated_answer, tagged_answer
from mrl.tasks.math_rows import FORM, Keys, Problem, read_problems
from mrl.tasks.options import checked_options
from mrl.tasks.source import Item, Part
from mrl.tasks.split import hashed_part

INSTALL = "pip install 'mrl[tasks]' (includes math-verify)"
HUB = "hub:"
PROMPT = "{problem}\nPlease reason step by step, and put your final answer within \\boxed{}."
DEFAULT_KEYS = Keys()


class MathOptions(Table):
    """The `options` of a task of this source."""

    held_out: str = ""
    """Second file, or second split of a folder, with the held-out problems."""
    filter: dict[str, Any] = Field(default={})
    """Columns with the value, or list of values, that a row must have there: { level = ["Level 4", "Level 5"] }."""
    prompt: str = PROMPT
    """The prompt; `{problem}` stands for the problem."""
    boxed_only: bool = False
    """Whether an answer must stand in \\boxed{}; otherwise "the answer is ..." and <answer> tags count as well."""
    problem_keys: tuple[str, ...] = DEFAULT_KEYS.problem
    """Keys of a row that may hold the problem; the first that the row has counts."""
    answer_keys: tuple[str, ...] = DEFAULT_KEYS.answer
    """Keys that hold the reference answer."""
    solution_keys: tuple[str, ...] = DEFAULT_KEYS.solution
    """Keys that hold a solution with the reference answer in \\boxed{}."""
    split: str = "train"
    """Split of a folder to train on."""
    subset: str = ""
    """Configuration of the data set."""


class MathSource:
    """Problems of one file (or two, with the held-out ones), in an order drawn by `seed`."""

    is_finite = True
    verifier = "mrl.tasks.math_answers:score"
    evaluates = False

    def __init__(self, dataset: str, options: Mapping[str, Any], *, seed: int, where: str, get: str = "") -> None:
        """Raises MissingError for a file or package that is not there, TaskError for bad options or contents."""
        if dataset.startswith(HUB):
            raise TaskError(
                f"data sets of the Hugging Face hub are named without the prefix {HUB!r}",
                where=where,
                got=dataset,
                wanted="OWNER/NAME",
                cure=f"set dataset = {json.dumps(dataset.removeprefix(HUB))} and run `mrl fetch`",
            )
        self._options = _options(options, where)
        check_of_folder(dataset, self._options.model_fields_set, where=where)
        if importlib.util.find_spec("math_verify") is None:
            raise MissingError("the package math-verify is not installed", where=where, cure=INSTALL)
        self._items = self._load(dataset, where, get)
        random.Random(f"{seed}/{len(self._items)}").shuffle(self._items)

    def items(self, limit: int) -> Iterator[Item]:
        """Yield all problems, the held-out ones of a second file first, so that a repeated problem is held out."""
        yield from sorted(self._items, key=lambda item: item.part != "held_out")

    def extract(self, completion: str) -> str:
        r"""Return the content of the last \boxed{}, else (unless `boxed_only`) of <answer> tags or a stated answer."""
        answer = boxed_answer(completion)
        if not answer and not self._options.boxed_only:
            tagged = tagged_answer(completion) if "</answer>" in completion else ""
            answer = boxed_answer(tagged) or tagged or stated_answer(completion)
        return answer if len(answer) <= MAX_ANSWER_CHARS else ""

    def verifier_reference(self, item: Item) -> str:
        """Return the right answer."""
        return item.reference

    def score(self, item: Item, answer: str) -> float:
        """Return 1.0 for an answer equal to the reference; in this process and without limits: pools use `verifier`."""
        module = importlib.import_module(self.verifier.partition(":")[0])
        return float(module.score(item.reference, answer))

    def _load(self, dataset: str, where: str, get: str) -> list[Item]:
        options = self._options
        keys = Keys(options.problem_keys, options.answer_keys, options.solution_keys)

        def read(place: str) -> list[Problem]:
            path, split = (Path(dataset), Split(place, options.subset)) if is_folder else (Path(place), Split(""))
            rows = rows_of(path, split, where=where, get=get, form=FORM)
            return read_problems(kept(rows, options.filter, where=where), keys)

        is_folder = Path(dataset).is_dir()
        known = read(options.split if is_folder else dataset)
        held_out = read(options.held_out) if options.held_out else []
        parts: list[tuple[Problem, Part]] = [(problem, "held_out") for problem in held_out]
        parts += [(problem, "train" if held_out else hashed_part(problem.problem)) for problem in known]
        return [
            Item(options.prompt.replace("{problem}", one.problem), "", "", number, one.reference, part, one.row)
            for number, (one, part) in enumerate(parts)
        ]


def _options(options: Mapping[str, Any], where: str) -> MathOptions:
    checked = checked_options(MathOptions, options, where=where)
    if "{problem}" not in checked.prompt:
        raise TaskError(
            "options.prompt: the placeholder {problem} is missing", where=where, got=checked.prompt, wanted="{problem}"
        )
    return checked
