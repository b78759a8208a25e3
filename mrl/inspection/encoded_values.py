"""Any bytes as the lines of a msgpack tree, under limits: for bytes that nobody vouches for.

Values are read one at a time by the plain msgpack library and shown at once, so that memory does not grow with what the
bytes claim: no container is ever built. Depth, values, and the shown length of texts and bytes are bounded; control
characters never reach the terminal.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import msgpack
import numpy as np

MAX_DEPTH = 24
MAX_VALUES = 2000
MAX_PASSED_OVER = 100_000
MAX_ITEMS = 32
"""Of one array; the rest of it is passed over."""
MAX_SHOWN_CHARS = 160
MAX_SHOWN_BYTES = 32
MAX_SHOWN_NUMBERS = 8
INDENT = "  "

ARRAYS = {"byte_lengths": "<i4", "token_ids": "<i4", "logprobs": "<f4", "special": "u1"}
"""Fields of `mrl.records.experience` that are arrays in bytes."""


class _Enough(Exception):
    """The limits are used up."""


@dataclass(slots=True)
class _Walk:
    data: bytes
    unpacker: msgpack.Unpacker
    num_values: int = 0
    num_passed_over: int = 0

    def count(self) -> None:
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise _Enough(f"more than {MAX_VALUES} values")

    def pass_over(self) -> None:
        self.num_passed_over += 1
        if self.num_passed_over > MAX_PASSED_OVER:
            raise _Enough(f"more than {MAX_PASSED_OVER} values to pass over")
        self.unpacker.skip()


def value_lines(data: bytes) -> list[str]:
    """The msgpack value at the beginning of `data`, a line each; the last line says where and why it broke off."""
    lines, end = walked(data)
    return lines + ([f"... and {len(data) - end} more bytes behind the value"] if 0 < end < len(data) else [])


def walked(data: bytes) -> tuple[list[str], int]:
    """The lines of the value at the beginning of `data`, and where it ends; 0 when it was not read to its end."""
    # A fresh one each time: one that has failed once must not be used again.
    unpacker = msgpack.Unpacker(raw=False, unicode_errors="replace", strict_map_key=False, max_buffer_size=0)
    unpacker.feed(data)
    lines: list[str] = []
    try:
        for line in _value(_Walk(data, unpacker), "", 0):
            lines.append(line)
    except _Enough as error:
        return [*lines, f"... here it is enough: {error}"], 0
    except (msgpack.UnpackException, ValueError, RecursionError) as error:
        reason = shown_text(f"{type(error).__name__} {error}".strip())
        return [*lines, f"... broken off at byte {unpacker.tell()} of {len(data)}: {reason}"], 0
    return lines, unpacker.tell()


def _value(walk: _Walk, label: str, depth: int) -> Iterator[str]:
    """One value, with what lies in it indented below its own line."""
    walk.count()
    kind = _container(walk)
    if kind and depth >= MAX_DEPTH:
        walk.pass_over()
        yield f"{INDENT * depth}{label}... nested more than {MAX_DEPTH} deep"
    elif kind == "map":
        yield from _map(walk, label, depth)
    elif kind == "array":
        yield from _array(walk, label, depth)
    else:
        field = label.removesuffix(": ")
        yield f"{INDENT * depth}{label}{shown(walk.unpacker.unpack(), field)}"


def _map(walk: _Walk, label: str, depth: int) -> Iterator[str]:
    length = walk.unpacker.read_map_header()
    yield f"{INDENT * depth}{label}map of {length}"
    for _ in range(length):
        if _container(walk):
            walk.pass_over()
            name = "(a container as key)"
        else:
            key = walk.unpacker.unpack()
            name = shown_text(key) if isinstance(key, str) else shown(key)
        yield from _value(walk, f"{name}: ", depth + 1)


def _array(walk: _Walk, label: str, depth: int) -> Iterator[str]:
    length = walk.unpacker.read_array_header()
    yield f"{INDENT * depth}{label}array of {length}"
    for index in range(length):
        if index < MAX_ITEMS:
            yield from _value(walk, f"[{index}] ", depth + 1)
        else:
            walk.pass_over()
    if length > MAX_ITEMS:
        yield f"{INDENT * (depth + 1)}... and {length - MAX_ITEMS} more"


def _container(walk: _Walk) -> str:
    """What the next value is: "map", "array", or "" for anything else."""
    position = walk.unpacker.tell()
    first = walk.data[position] if position < len(walk.data) else 0
    if 0x80 <= first <= 0x8F or first in (0xDE, 0xDF):
        return "map"
    return "array" if 0x90 <= first <= 0x9F or first in (0xDC, 0xDD) else ""


def shown(value: object, field: str = "") -> str:
    """One value that is no container, on one line."""
    match value:
        case str():
            return _quoted(value)
        case bytes() if field in ARRAYS and len(value) % np.dtype(ARRAYS[field]).itemsize == 0:
            return _shown_array(value, ARRAYS[field])
        case bytes():
            return f"{len(value)} bytes {_shown_bytes(value)}"
        case msgpack.ExtType():
            return f"extension {value.code}, {len(value.data)} bytes {_shown_bytes(value.data)}"
        case _:
            return shown_text(repr(value))


def shown_text(text: str) -> str:
    """The beginning of a text with everything escaped that a terminal would act upon."""
    cut = text[:MAX_SHOWN_CHARS]
    escaped = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in cut)
    return escaped + ("..." if len(text) > len(cut) else "")


def _quoted(text: str) -> str:
    length = f" ({len(text)} characters)" if len(text) > MAX_SHOWN_CHARS else ""
    return f'"{shown_text(text)}"{length}'


def _shown_bytes(value: bytes) -> str:
    try:
        return _quoted(value.decode())
    except UnicodeDecodeError:
        return value[:MAX_SHOWN_BYTES].hex(" ") + (" ..." if len(value) > MAX_SHOWN_BYTES else "")


def _shown_array(value: bytes, dtype: str) -> str:
    numbers = np.frombuffer(value, dtype)
    listed = ", ".join(f"{number:.4g}" if dtype == "<f4" else str(number) for number in numbers[:MAX_SHOWN_NUMBERS])
    return f"{len(value)} bytes, {len(numbers)} {numbers.dtype.name} [{listed}" + (
        ", ...]" if len(numbers) > MAX_SHOWN_NUMBERS else "]"
    )
