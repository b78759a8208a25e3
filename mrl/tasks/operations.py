"""The named operations that solve the word tasks. A locally made policy names an operation before it answers."""

import difflib
from collections.abc import Callable, Mapping

from mrl.errors import TaskError

Operation = Callable[[str, str], str]
"""(subject, letter) -> result. Only counting reads the letter; it counts the first letter where none is asked for."""

OPERATIONS: dict[str, Operation] = {
    "reverse": lambda word, _: word[::-1],
    "capital": lambda word, _: word.upper(),
    "trim": lambda word, _: word[1:],
    "double": lambda word, _: word[:1] + word,
    "count": lambda word, letter: str(word.count(letter or word[0])),
    "swap": lambda word, _: word[1::-1] + word[2:],
    "rotate": lambda word, _: word[1:] + word[:1],
    "front": lambda word, _: word[-1:] + word[:-1],
}


def check_name(name: str, known: Mapping[str, object], what: str, *, where: str) -> None:
    """Check that a name is known. Raises TaskError, with the closest known name, for any other; `what` says so."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        cure = f"did you mean {near[0]!r}?" if near else ""
        raise TaskError(what, where=where, got=name, wanted="one of " + ", ".join(known), cure=cure)


def write_completion(operation: str, result: str) -> str:
    """Return a completion in the form that the warm start teaches.

    >>> write_completion("reverse", "nus")
    'reverse <answer>nus</answer>'
    """
    return f"{operation} <answer>{result}</answer>"
