"""The named operations that solve the word tasks; a locally made policy names one before it answers."""

import difflib
from collections.abc import Callable

from mrl.errors import TaskError

Operation = Callable[[str, str], str]
"""(subject, letter) -> result; only counting reads the letter, and takes the first one where none is asked for."""

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


def check_operation(name: str, *, where: str) -> None:
    """Raises TaskError for an operation that does not exist."""
    if name not in OPERATIONS:
        near = difflib.get_close_matches(name, OPERATIONS, n=1)
        raise TaskError(
            "operation does not exist",
            where=where,
            got=name,
            wanted="one of " + ", ".join(OPERATIONS),
            cure=f"did you mean {near[0]!r}?" if near else "",
        )


def write_completion(operation: str, result: str) -> str:
    """The answer's form in the warm start.

    >>> write_completion("reverse", "nus")
    'reverse <answer>nus</answer>'
    """
    return f"{operation} <answer>{result}</answer>"
