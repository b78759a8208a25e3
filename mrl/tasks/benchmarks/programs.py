"""Programs that a policy wrote, run with a benchmark's tests: in a sealed process of their own, or not at all.

As in EvalPlus and lm-evaluation-harness the program and its tests share one interpreter. A program could therefore
forge its verdict, though nothing outside. Such benchmarks have no split to train on.
"""

import base64
import re
import zlib

import numpy  # noqa: F401 - tests compare with it, and a sealed process would read it anew

MAX_PROGRAM_CHARS = 32_768
_BLOCK = re.compile(r"```[ \t]*(?:python|py)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


def program_in(completion: str) -> str:
    """Return the last code block of a completion, or all of it; "" when there is none, or it is too long."""
    blocks = _BLOCK.findall(completion)
    program = str(blocks[-1]) if blocks else completion
    return program if program.strip() and len(program) <= MAX_PROGRAM_CHARS else ""


def packed(tests: str) -> str:
    """Return tests as a short text: a request to a verifier process has a bound."""
    return base64.b85encode(zlib.compress(tests.encode())).decode()


def passes(reference: str, answer: str) -> float:
    """Return 1.0 for a program that passes the `packed` tests; a program that raises anything is wrong."""
    tests = zlib.decompress(base64.b85decode(reference)).decode()
    names: dict[str, object] = {"__name__": "__main__"}
    try:
        for text in (answer, tests):
            exec(compile(text, "<program>", "exec"), names)
    except BaseException:  # noqa: BLE001 - the edge of a process that is there to run this one program
        return 0.0
    return 1.0
