"""A record of the exchange as lines for a person, without anything that a terminal would act upon."""

from collections.abc import Iterator

import msgspec
import numpy as np
from rich.pretty import pretty_repr

from mrl.errors import RecordError
from mrl.records.codec import decode
from mrl.records.experience import experience_decoder

MAX_SHOWN_CHARS = 160
MAX_SHOWN_BYTES = 32
"""Bytes shown of a body that is no valid record."""
MAX_DEPTH = 24
MAX_ITEMS = 32
WIDTH = 120
ARRAYS = {"byte_lengths": "<i4", "token_ids": "<i4", "logprobs": "<f4", "special": "u1"}
"""Field of `mrl.records.experience` that holds an array as bytes -> NumPy type of its elements."""


def record_lines(body: bytes, *, found: str) -> Iterator[str]:
    """Yield the lines of an encoded record; `found` says where it is. Of an invalid one, its error and first bytes."""
    yield f"{len(body)} bytes, {found}"
    try:
        record = decode(body, experience_decoder)
    except RecordError as error:
        yield f"invalid record: {shown_text(str(error))}"
        yield f"{body[:MAX_SHOWN_BYTES].hex(' ')}{' ...' if len(body) > MAX_SHOWN_BYTES else ''}"
        return
    yield f"valid record: {type(record).__name__}"
    tree = _with_numbers(msgspec.to_builtins(record, builtin_types=(bytes,)))
    shown = pretty_repr(
        tree, max_width=WIDTH, max_depth=MAX_DEPTH, max_length=MAX_ITEMS, max_string=MAX_SHOWN_CHARS, expand_all=True
    )
    yield from shown.splitlines()


def shown_text(text: str) -> str:
    """Return the beginning of a text, with everything escaped that a terminal would act upon."""
    cut = text[:MAX_SHOWN_CHARS]
    escaped = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in cut)
    return escaped + ("..." if len(text) > len(cut) else "")


def _with_numbers(value: object, field: str = "") -> object:
    """Return the tree with the numbers of arrays in place of their bytes."""
    match value:
        case dict():
            return {name: _with_numbers(item, name) for name, item in value.items()}
        case list():
            return [_with_numbers(item) for item in value]
        case bytes() if field in ARRAYS and len(value) % np.dtype(ARRAYS[field]).itemsize == 0:
            return np.frombuffer(value, ARRAYS[field]).tolist()
    return value
