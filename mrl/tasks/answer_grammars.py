"""The answers that a scorer may evaluate: arithmetic, expressions of known functions, and lists; none of them is code.

Some scorers of reasoning-gym give an answer to Python's `eval`, or to sympy, which does the same with it. An answer of
these grammars has no name but a function's or a variable's, no attribute, no assignment, and no string but an element
of a list. So it can mean a number, a term or a list, and nothing else.
"""

import re
from collections.abc import Callable

MAX_CHARS = 10_000
_ARITHMETIC = re.compile(r"[0-9+\-*/(). \t\r\n]*")
_TERM = re.compile(r"[A-Za-z0-9+\-*/(). \t\r\n]*")
_NAME = re.compile(r"[A-Za-z]+")
_ATTRIBUTE = re.compile(r"\.[ \t\r\n]*[A-Za-z]")
_STRING = re.compile(r"'[^'\\\r\n]*'|\"[^\"\\\r\n]*\"")
_LIST = re.compile(r"[0-9+\-.,\[\]() \t\r\n]*")
_FUNCTIONS = {
    "sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "asec", "acsc", "acot",
    "sinh", "cosh", "tanh", "sech", "csch", "coth", "asinh", "acosh", "atanh", "acoth",
    "exp", "log", "ln", "sqrt", "Abs", "sign", "erf", "erfi", "pi",
}  # fmt: skip


def is_arithmetic(text: str) -> bool:
    """Whether the text consists of numbers, + - * / ** and brackets only."""
    return len(text) <= MAX_CHARS and _ARITHMETIC.fullmatch(text) is not None


def is_term(text: str) -> bool:
    """Whether the text is arithmetic with variables of one letter and the functions of elementary mathematics."""
    if len(text) > MAX_CHARS or not _TERM.fullmatch(text) or _ATTRIBUTE.search(text):
        return False
    return all(len(name) == 1 or name in _FUNCTIONS for name in _NAME.findall(text))


def is_list(text: str) -> bool:
    """Whether the text consists of lists, numbers and plain strings only."""
    if len(text) > MAX_CHARS or "'''" in text or '"""' in text:
        return False
    return _LIST.fullmatch(_STRING.sub("0", text)) is not None


GRAMMARS: dict[str, Callable[[str], bool]] = {
    "binary_matrix": is_list,
    "n_queens": is_list,
    "spiral_matrix": is_list,
    "string_insertion": is_list,
    "countdown": is_arithmetic,
    "puzzle24": is_arithmetic,
    "simple_integration": is_term,
    "intermediate_integration": is_term,
    "polynomial_multiplication": is_term,
}
"""Data set of reasoning-gym -> grammar of the answers that its scorer may evaluate. Other scorers evaluate nothing."""
