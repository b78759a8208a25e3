"""The named operations that solve the word tasks. A locally made policy names an operation before it answers."""

import difflib
from collections.abc import Callable

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


def check_operation(name: str, *, where: str) -> None:
    """Check an operation's name. Raises TaskError for an operation that does not exist."""
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
    """Return a completion in the form that the warm start teaches.

    >>> write_completion("reverse", "nus")
    'reverse <answer>nus</answer>'
    """
    return f"{operation} <answer>{result}</answer>"
