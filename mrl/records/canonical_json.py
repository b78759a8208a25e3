"""One spelling for equal JSON, after RFC 8785: keys sorted by UTF-16 units, no spaces, numbers as ECMAScript has them.

Integers keep all their digits; RFC 8785 knows only doubles.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MAX_DEPTH = 64
"""Most levels of objects and lists nested in each other."""


def canonical_json(value: object) -> str:
    """Return the text of a JSON value. Raises ValueError for other values, for NaN, and for text that is not UTF-8."""
    return _written(value, MAX_DEPTH)


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises ValueError for broken text, NaN, a key given twice, and nesting deeper than `MAX_DEPTH`.
    """
    try:
        value = strict_json(text, _refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    canonical_json(value)
    return value


def strict_json(text: str, of_constant: Callable[[str], object]) -> Any:
    """Return the value of a JSON text of any depth, with numbers of any size; `of_constant` gives NaN and infinities.

    Raises ValueError for broken text and a key given twice, RecursionError where Python can nest no deeper.
    """
    return json.loads(text, object_pairs_hook=_unique, parse_constant=of_constant)


def _written(value: object, depth: int) -> str:
    if depth < 0:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    match value:
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
        case str():
            value.encode()  # a lone surrogate has no UTF-8
            return json.dumps(value, ensure_ascii=False)
        case int():
            return str(value)
        case float():
            return _number(value)
        case Mapping():
            if not all(isinstance(key, str) for key in value):
                raise ValueError("a key is not a string")
            keys = sorted(value, key=lambda key: key.encode("utf-16-be"))
            return "{" + ",".join(f"{_written(key, 0)}:{_written(value[key], depth - 1)}" for key in keys) + "}"
        case Sequence() if not isinstance(value, bytes | bytearray | memoryview):
            return "[" + ",".join(_written(one, depth - 1) for one in value) + "]"
    raise ValueError(f"{type(value).__name__} is not a JSON type")


def _number(value: float) -> str:
    """Return a double as ECMAScript writes it: 1 for 1.0, 1e+21, 1e-7."""
    if not math.isfinite(value):
        raise ValueError(f"{value} is not a JSON number")
    if value == int(value) and abs(value) < 1e21:
        return str(int(value))
    mantissa, _, exponent = repr(value).partition("e")
    if not exponent:
        return mantissa
    power = int(exponent)
    if -7 < power < 0:
        return f"{value:.{len(mantissa.partition('.')[2]) - power}f}"
    return f"{mantissa}e{power:+d}"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"duplicate key {next(key for key in keys if keys.count(key) > 1)!r}")
    return found


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
