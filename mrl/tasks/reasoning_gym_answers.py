"""What reasoning-gym's own scorers say of an answer; runs inside a verifier process, which bounds time and memory.

Some of them evaluate an answer as Python. Here they may do that to answers of a grammar that holds no code
(`answer_grammars`), and to no others: while an answer is scored, Python's own audit events refuse to compile anything
else. That comes before the first instruction of an answer could run, so no answer can undo it. It is a scorer that
somebody overlooked, or a next version's, for which the process is also sealed.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType
from typing import Any

import reasoning_gym

from mrl.tasks.answer_grammars import GRAMMARS, MIXED
from mrl.tasks.reasoning_gym_source import SIZE

_may_compile = True


def score(reference: str, answer: str) -> float:
    """The data set's own score of an answer to an entry, between 0 and 1.

    `reference` is the entry's `ReasoningGymSource.verifier_reference`.
    """
    name, dataset, entry = prepare(reference)
    source = entry["metadata"]["source_dataset"] if name == MIXED else name
    is_harmless = GRAMMARS.get(source)
    with _compiling(is_harmless is not None and is_harmless(answer)):
        return float(dataset.score_answer(answer, entry))


@lru_cache(maxsize=256)
def prepare(reference: str) -> tuple[str, Any, Any]:
    """Name, data set and entry; kept, because the answers of a group share them."""
    name, options, seed, number = json.loads(reference)
    dataset = _opened(name, json.dumps(options), seed)
    entry = dataset[number]
    dataset.score_answer(entry["answer"], entry)  # which loads what the scorer needs
    return name, dataset, entry


@lru_cache(maxsize=16)
def _opened(name: str, options: str, seed: int) -> Any:
    return reasoning_gym.create_dataset(name, **{**SIZE, **json.loads(options), "seed": seed})


@contextmanager
def _compiling(is_allowed: bool) -> Iterator[None]:
    global _may_compile
    _watch()
    _may_compile = is_allowed
    try:
        yield
    finally:
        _may_compile = True


@lru_cache(maxsize=1)
def _watch() -> None:
    """From now on, in this process: an audit hook can never be removed."""
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise PermissionError for text that becomes code; modules that are loaded late, and mere syntax trees, may."""
    if _may_compile:
        return
    if event == "compile":
        origin = str(arguments[1])
        is_text = origin.startswith("<") and origin != "<unknown>"
    else:
        is_text = event == "exec" and isinstance(arguments[0], CodeType) and arguments[0].co_filename == "<unknown>"
    if is_text:
        raise PermissionError("the answer is not of the form that the scorer may evaluate")
