"""Scores of answers by reasoning-gym's own scorers; runs in a verifier process, which bounds time and memory.

Some scorers evaluate an answer as Python. Here they may evaluate only answers of a grammar that holds no code
(`answer_grammars`): while an answer is scored, Python's own audit events refuse to compile anything else. The refusal
comes before the first instruction of an answer could run, so no answer can undo it. The process is also sealed, for a
scorer that somebody overlooked or that a next version brings.

The nine data sets of `GRAMMARS` evaluate an answer of their grammar in the process that scores it, since only their own
scorer knows what is right. There the seal protects the host and the other answers, not the reward of that very answer:
code that got past the grammar could give itself any reward. Only the grammar stands in front of that.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType
from typing import Any

import reasoning_gym  # noqa: F401 - imported here, so that it takes no time of the first answer

from mrl.tasks.answer_grammars import GRAMMARS
from mrl.tasks.reasoning_gym_source import COMPOSITE, created

_own_texts: frozenset[str] | None = None
"""Texts of the entry, which a scorer may evaluate, while an answer is scored that must not be evaluated; else None."""


def score(reference: str, answer: str) -> float:
    """Return the data set's own score of an answer to an entry, between 0 and 1.

    `reference` is the entry's `ReasoningGymSource.verifier_reference`.
    """
    name, dataset, entry, texts = mrl_prepare_reference(reference)
    grammar = GRAMMARS.get(name)
    with _evaluating(None if grammar is not None and grammar(answer) else texts):
        return float(dataset.score_answer(answer, entry))


@lru_cache(maxsize=256)
def mrl_prepare_reference(reference: str) -> tuple[str, Any, Any, frozenset[str]]:
    """Return name of the entry's own data set, data set, entry and its texts; kept for the answers of a group."""
    name, options, seed, number = json.loads(reference)
    dataset = _opened(name, json.dumps(options), seed)
    entry = dataset[number]
    dataset.score_answer(entry["answer"], entry)  # has the scorer load what it needs
    of_part = entry["metadata"]["source_dataset"] if name == COMPOSITE else name
    return of_part, dataset, entry, frozenset(_texts_in(entry))


@lru_cache(maxsize=16)
def _opened(name: str, options: str, seed: int) -> Any:
    return created(name, json.loads(options), seed=seed)


def _texts_in(part: object) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    elif isinstance(part, dict):
        yield from _texts_in(list(part.values()))
    elif isinstance(part, list | tuple):
        for one in part:
            yield from _texts_in(one)


@contextmanager
def _evaluating(texts: frozenset[str] | None) -> Iterator[None]:
    """Allow only these texts to be evaluated, or everything (None)."""
    global _own_texts
    _watch()
    _own_texts = texts
    try:
        yield
    finally:
        _own_texts = None


@lru_cache(maxsize=1)
def _watch() -> None:
    """Install the audit hook in this process, for good: it can never be removed."""
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise PermissionError for text that becomes code; allow modules that are imported late, and mere syntax trees."""
    if _own_texts is None:
        return
    if event == "compile":
        text, origin = arguments
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        is_code = str(origin).startswith("<") and origin != "<unknown>" and text not in _own_texts
    else:
        is_code = event == "exec" and isinstance(arguments[0], CodeType) and arguments[0].co_filename == "<unknown>"
    if is_code:
        raise PermissionError("the answer does not match the grammar of answers that may be evaluated")
