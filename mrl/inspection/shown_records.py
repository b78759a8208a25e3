"""A record of the exchange as lines for a person: nothing in them that a terminal would act upon."""

from collections.abc import Iterator

import msgspec
import numpy as np
from rich.pretty import pretty_repr

from mrl.errors import RecordError
from mrl.records.codec import decode
from mrl.records.experience import experience_decoder

MAX_SHOWN_CHARS = 160
MAX_SHOWN_BYTES = 32
"""Of what is no record."""
MAX_DEPTH = 24
MAX_ITEMS = 32
WIDTH = 120
ARRAYS = {"byte_lengths": "<i4", "token_ids": "<i4", "logprobs": "<f4", "special": "u1"}
"""Fields of `mrl.records.experience` that are arrays in bytes."""


def record_lines(body: bytes, *, found: str) -> Iterator[str]:
    """An encoded record; `found` says where it is. Of one that is not what its type demands, the error and its head."""
    yield f"{len(body)} bytes, {found}"
    try:
        record = decode(body, experience_decoder)
    except RecordError as error:
        yield f"as a record: {shown_text(str(error))}"
        yield f"{body[:MAX_SHOWN_BYTES].hex(' ')}{' ...' if len(body) > MAX_SHOWN_BYTES else ''}"
        return
    yield f"as a record: whole, {type(record).__name__}"
    tree = _with_numbers(msgspec.to_builtins(record, builtin_types=(bytes,)))
    shown = pretty_repr(
        tree, max_width=WIDTH, max_depth=MAX_DEPTH, max_length=MAX_ITEMS, max_string=MAX_SHOWN_CHARS, expand_all=True
    )
    yield from shown.splitlines()


def shown_text(text: str) -> str:
    """The beginning of a text with everything escaped that a terminal would act upon."""
    cut = text[:MAX_SHOWN_CHARS]
    escaped = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in cut)
    return escaped + ("..." if len(text) > len(cut) else "")


def _with_numbers(value: object, field: str = "") -> object:
    """The tree with the numbers of arrays in place of their bytes."""
    match value:
        case dict():
            return {name: _with_numbers(item, name) for name, item in value.items()}
        case list():
            return [_with_numbers(item) for item in value]
        case bytes() if field in ARRAYS and len(value) % np.dtype(ARRAYS[field]).itemsize == 0:
            return np.frombuffer(value, ARRAYS[field]).tolist()
    return value
