"""What reasoning-gym's own scorers say of an answer; runs inside a verifier process, which bounds time and memory.

Some of them evaluate an answer as Python: `9**9**9` never ends, and text that a model sampled runs as code. While an
answer is scored nothing can be written, started, ended or connected to, as far as Python's audit events tell. That
stops what comes up by itself; against somebody who wants to get out only a container helps.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import reasoning_gym

from mrl.tasks.reasoning_gym_source import SIZE

SHUT = ("ctypes.", "os.", "pty.", "shutil.", "socket.", "subprocess.")
"""Audit events that are refused, by the beginnings of their names."""
OPEN = ("os.listdir", "os.scandir")
"""Of these, what looking for a module needs."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_is_scoring = False


def score(reference: str, answer: str) -> float:
    """The data set's own score of an answer to an entry, between 0 and 1.

    `reference` is the entry's `ReasoningGymSource.verifier_reference`.
    """
    dataset, entry = _entry(reference)
    with _nothing_outside():
        return float(dataset.score_answer(answer, entry))


@lru_cache(maxsize=256)
def _entry(reference: str) -> tuple[Any, Any]:
    """Kept, because the answers of a group share it."""
    name, options, seed, number = json.loads(reference)
    dataset = _opened(name, json.dumps(options), seed)
    entry = dataset[number]
    dataset.score_answer(entry["answer"], entry)  # which loads what the scorer needs
    return dataset, entry


@lru_cache(maxsize=16)
def _opened(name: str, options: str, seed: int) -> Any:
    return reasoning_gym.create_dataset(name, **{**SIZE, **json.loads(options), "seed": seed})


@contextmanager
def _nothing_outside() -> Iterator[None]:
    global _is_scoring
    _watch()
    _is_scoring = True
    try:
        yield
    finally:
        _is_scoring = False


@lru_cache(maxsize=1)
def _watch() -> None:
    """From now on, in this process: an audit hook can never be removed."""
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if not _is_scoring:
        return
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING
    if writes or (event.startswith(SHUT) and event not in OPEN):
        raise PermissionError(f"an answer asks for {event}")
