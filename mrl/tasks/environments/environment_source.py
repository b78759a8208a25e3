"""Start states of an environment as prompts: rows of a JSONL file, or seeds.

[tasks.wordle]
source = "environment"
dataset = "my_games:Wordle"              a class, in a module beside the configuration or installed
options = { size = 2000 }                seeds 0 to 1999, `reset(seed=17)`; or a file of rows:
options = { data = "words.jsonl" }       `reset(**row)`, with `seed`, the number of the row, where it takes one

The environment's first messages are the policy's prompt. The hash of a start state's text decides to which part of the
data it belongs: 15 % are held out.
"""

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from mrl.config.table import Table
from mrl.config.task_tables import COMMAND, OUTSIDE
from mrl.errors import TaskError
from mrl.records.canonical_json import canonical_json
from mrl.tasks.games.game_names import GAMES
from mrl.tasks.jsonl_rows import jsonl_rows
from mrl.tasks.options import checked_options
from mrl.tasks.source import Item, Part
from mrl.tasks.split import hashed_part

FORM = 'a JSONL file, one object per line with the arguments of the environment\'s reset: {"word": "..."}'


class EnvironmentOptions(Table):
    """The `options` of a task of this source."""

    data: str = ""
    """JSONL file, one start state a line; empty for seeds."""
    held_out: str = ""
    """Second JSONL file, with the held-out start states."""
    size: int = Field(default=0, ge=0)
    """Number of seeds, where there is no file; 0 for as many as the pool takes."""
    reset: dict[str, Any] = Field(default={})
    """Further arguments of `reset`, the same in every episode: { letters = 5 }."""


class EnvironmentSource:
    """Start states of one environment, in an order drawn by `seed`."""

    verifier = ""
    evaluates = False

    def __init__(self, dataset: str, options: Mapping[str, Any], *, seed: int, where: str, get: str = "") -> None:
        """Raises MissingError for a file that is not there, TaskError for bad options or rows."""
        self._options = checked_options(EnvironmentOptions, options, where=where)
        self._check_name(dataset, where)
        if self._options.held_out and not self._options.data:
            cure = "set options.data to the file with the start states to train on"
            raise TaskError("options.held_out: options.data is not set", where=where, cure=cure)
        self._dataset, self._is_game = dataset, dataset in GAMES
        self.is_finite = bool(self._options.data or self._options.size)
        self._rows = [
            (part, row)
            for part, file in self._files()
            for _, row in jsonl_rows(Path(file), where=where, get=get, form=FORM)
        ]
        self._seed = seed

    def items(self, limit: int) -> Iterator[Item]:
        """Yield all start states of files, held-out first; without a file `size` seeds, or `limit` if `size` is 0."""
        if self._rows:
            found = [self._item(number, part, row) for number, (part, row) in enumerate(self._rows)]
            random.Random(f"{self._seed}/{len(found)}").shuffle(found)
            yield from sorted(found, key=lambda item: item.part != "held_out")
            return
        for number in range(self._options.size or limit):
            yield self._item(number, None, {})

    def extract(self, completion: str) -> str:
        """Return the whole completion."""
        return completion

    def verifier_reference(self, item: Item) -> str:
        """Return an empty text: the environment knows the right answer."""
        return item.reference

    def score(self, item: Item, answer: str) -> float:
        """Return 0.0: only the environment gives rewards, and only to episodes."""
        return 0.0

    def _check_name(self, dataset: str, where: str) -> None:
        if ":" not in dataset and dataset not in GAMES:
            wanted = '"module:Class", "ws://HOST:PORT", or a game: ' + ", ".join(GAMES)
            raise TaskError("no such environment", where=f"{where}.dataset", got=dataset, wanted=wanted)

    def _files(self) -> list[tuple[Part | None, str]]:
        parts: list[tuple[Part | None, str]] = [("held_out", self._options.held_out)] * bool(self._options.held_out)
        of_train: Part | None = "train" if self._options.held_out else None
        return parts + [(of_train, self._options.data)] * bool(self._options.data)

    def _item(self, number: int, part: Part | None, row: Mapping[str, Any]) -> Item:
        whole = {**self._options.reset, **row}
        state = canonical_json(row) if row else f"seed {number}"
        text = f"{self._dataset} {state}"
        if part is None and not self._is_game:  # the warm start needs a third part of a game's states
            part = hashed_part(text)
        return Item(text, "", "", number, part=part, row=json.dumps(whole, ensure_ascii=False))


class AgentSource(EnvironmentSource):
    """Start states that agents get as rows; the agent's first messages are the policy's prompt."""

    def _check_name(self, dataset: str, where: str) -> None:
        if ":" not in dataset and dataset not in (OUTSIDE, COMMAND):
            wanted = f'an async function, "module:function", or "{OUTSIDE}" for agents that connect from outside'
            raise TaskError("no such agent", where=f"{where}.dataset", got=dataset, wanted=wanted)
