r"""Any prompts and references from JSONL or Parquet files, usually judged by a verifier of your own.

[tasks.code]
source = "jsonl"
dataset = "data/problems.jsonl"                    one object a line: {"prompt": "...", "reference": "..."}
options = { held_out = "data/held_out.jsonl" }     or none: then 15 % of the prompts, by hash, are held out
verifier = "my_verifiers:passes_tests"             def passes_tests(reference: str, answer: str) -> float

A prompt may be a conversation, [{"role": "system", "content": "..."}, {"role": "user", "content": "..."}], as "prompt"
or under the key "messages"; the last message is a user's. The policy's chat template renders it.

The reference holds all that the verifier needs to know of a prompt (tests, a rubric); a reference that is no text is
given to the verifier as JSON. The verifier may also take the `prompt`, and the whole `row` as a dict. Without a
verifier an answer is right when it equals the reference, letter for letter.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from mrl.config.nearest_key import nearest
from mrl.config.table import Table
from mrl.errors import TaskError
from mrl.tasks.data_rows import Row, Split, check_of_folder, kept, rows_of
from mrl.tasks.extract import tagged_answer
from mrl.tasks.options import checked_options
from mrl.tasks.source import Item, Part, Turn
from mrl.tasks.split import hashed_part

ROW = '{"prompt": "...", "reference": "..."}'
FORM = f"a JSONL file, one object per line: {ROW}"
MESSAGES = "messages"
"""Key of a row with a conversation, read where the row has no `prompt_key`."""
ROLES = ("system", "user", "assistant", "tool")
ABSENT = object()
"""Mark for a value that a row does not have."""
MAX_PROMPT_BYTES = 1 << 20
"""Longest prompt: more than any model reads at once."""


class JsonlOptions(Table):
    """The `options` of a task of this source."""

    held_out: str = ""
    """Second file, or second split of a folder, with the held-out prompts."""
    prompt_key: str = "prompt"
    """Key of a row that holds the prompt; "extra.question" is "question" within "extra", where no key has that name."""
    reference_key: str = "reference"
    """Key of the reference, which the verifier gets beside the answer, such as "reward_model.ground_truth"."""
    split: str = "train"
    """Split of a folder to train on."""
    subset: str = ""
    """Configuration of the data set in a folder."""
    filter: dict[str, Any] = Field(default={})
    """Columns with the value, or list of values, that a row must have there: { level = ["Level 4", "Level 5"] }."""


class JsonlSource:
    """Prompts of one file (or two, with the held-out ones), in an order drawn by `seed`."""

    is_finite = True
    verifier = ""
    evaluates = False

    def __init__(self, dataset: str, options: Mapping[str, Any], *, seed: int, where: str, get: str = "") -> None:
        """Raises MissingError for a file that is not there, TaskError for bad options or rows."""
        self._options = checked_options(JsonlOptions, options, where=where)
        check_of_folder(dataset, self._options.model_fields_set, where=where)
        held_out = self._options.held_out
        parts: list[Part | None] = ["held_out", "train"] if held_out else [None]
        train = self._options.split if Path(dataset).is_dir() else dataset
        files = [held_out, train] if held_out else [train]
        found = [
            (part, *self._row(place, row))
            for part, file in zip(parts, files, strict=True)
            for place, row in self._rows(dataset, file, where=where, get=get)
        ]
        self._items = [
            Item(prompt, "", "", number, reference, part or hashed_part(prompt), row, turns)
            for number, (part, prompt, turns, reference, row) in enumerate(found)
        ]
        random.Random(f"{seed}/{len(self._items)}").shuffle(self._items)

    def items(self, limit: int) -> Iterator[Item]:
        """Yield all prompts, the held-out ones first, so that a prompt which stands in both files is held out."""
        yield from sorted(self._items, key=lambda item: item.part != "held_out")

    def extract(self, completion: str) -> str:
        """Return the content of the last <answer> tags, or the whole completion."""
        return tagged_answer(completion)

    def verifier_reference(self, item: Item) -> str:
        """Return the right answer."""
        return item.reference

    def score(self, item: Item, answer: str) -> float:
        """Return 1.0 for exactly the reference, else 0.0."""
        return float(answer == item.reference.strip())

    def _rows(self, dataset: str, file: str, *, where: str, get: str) -> Iterator[Row]:
        """Yield the rows of a file or, where the data set is a folder, of the split `file`."""
        path, split = (
            (Path(dataset), Split(file, self._options.subset)) if Path(dataset).is_dir() else (Path(file), Split(""))
        )
        yield from kept(rows_of(path, split, where=where, get=get, form=FORM), self._options.filter, where=where)

    def _row(self, place: str, row: Mapping[str, Any]) -> tuple[str, tuple[Turn, ...], str, str]:
        """Return prompt, its turns if it is a conversation, reference, and the whole row as JSON. Raises TaskError."""
        key = self._options.prompt_key
        own, reference = _value(row, key), _value(row, self._options.reference_key)
        prompt = row.get(MESSAGES) if own is ABSENT else own
        turns = _turns(prompt, place, MESSAGES if own is ABSENT else key) if isinstance(prompt, list) and prompt else ()
        text = _shown(turns) if turns else prompt
        if not isinstance(text, str) or not text:
            raise _lacking(key, "prompt_key", place, row)
        if reference is None or reference is ABSENT:
            raise _lacking(self._options.reference_key, "reference_key", place, row)
        if (size := len(text.encode("utf-8", "surrogatepass"))) > MAX_PROMPT_BYTES:
            wanted, cure = f"at most {MAX_PROMPT_BYTES:,} bytes", "remove the row, or shorten its prompt"
            raise TaskError("the prompt is too long", where=place, got=f"{size:,} bytes", wanted=wanted, cure=cure)
        reference = reference if isinstance(reference, str) else json.dumps(reference, ensure_ascii=False)
        return text, turns if len(turns) > 1 else (), reference, json.dumps(row, ensure_ascii=False)


def _value(row: Mapping[str, Any], key: str) -> Any:
    """Return the value under the key, else under its words between dots, one within the other; ABSENT without one."""
    if key in row:
        return row[key]
    value: Any = row
    for word in key.split("."):
        value = value.get(word, ABSENT) if isinstance(value, Mapping) else ABSENT
    return value


def _turns(messages: list[Any], place: str, key: str) -> tuple[Turn, ...]:
    """Return (role, content) of every message. Raises TaskError for an invalid message, or if the last is no user's."""
    turns = []
    for number, message in enumerate(messages, start=1):
        role, content = (message.get("role"), _said(message)) if isinstance(message, dict) else (None, None)
        if role not in ROLES or content is None:
            wanted = f'{{"role": one of {", ".join(ROLES)}, "content": a text, or a list of parts of type "text"}}'
            got = json.dumps(message, ensure_ascii=False)[:80]
            raise TaskError(f"{key}: message {number} is not valid", where=place, got=got, wanted=wanted)
        turns.append((role, content))
    if turns[-1][0] != "user":
        cure = "remove the last answer from the prompt; if it is the right answer, make it the reference"
        what = f"{key}: the last message is not from the user"
        raise TaskError(what, where=place, got=f"role {turns[-1][0]!r}", wanted="role 'user'", cure=cure)
    return tuple(turns)


def _said(message: Mapping[str, Any]) -> str | None:
    """Return the text of a message, its parts joined; None where it has no text, or other parts such as an image."""
    content = message.get("content")
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    whole = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
    return "".join(map(str, texts)) if texts and whole else None


def _shown(turns: Sequence[Turn]) -> str:
    """Return the text of a single user's turn, or several turns with their roles."""
    return turns[0][1] if len(turns) == 1 else "\n".join(f"{role}: {content}" for role, content in turns)


def _lacking(key: str, option: str, place: str, row: Mapping[str, Any]) -> TaskError:
    if (value := _value(row, key)) is not ABSENT:
        got = json.dumps(value, ensure_ascii=False)[:60]
        wanted = "text, or a list of messages" if option == "prompt_key" else "text, or any JSON value except null"
        return TaskError(f"{key!r} has no usable value", where=place, got=got, wanted=wanted)
    near = nearest(key, row)
    flag = f"--{option.replace('_', '-')} of `mrl init`"
    cure = f"set options.{option} = {near or 'NAME OF THE COLUMN'!r} in the task's table, or use {flag}"
    return TaskError(f"the row has no key {key!r}", where=place, got=f"keys {sorted(row)[:8]}", wanted=ROW, cure=cure)
