"""Bytes <-> records. Decoding is typed and bounded, and its errors name the field."""

from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from mrl.errors import RecordError

SCHEMA = 2
MAX_MESSAGE_BYTES = 8 * 1024 * 1024

Buffer = bytes | bytearray | memoryview
"""Bytes, owned or a view."""

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()


def encode(record: msgspec.Struct) -> bytes:
    """Encode a record with msgpack: one map with string keys, and a `type` tag where several kinds share a channel."""
    return _encoder.encode(record)


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return a reusable typed decoder for `kind`, a Struct or a union of tagged Structs."""
    return msgspec.msgpack.Decoder(kind)


def decode(data: Buffer, using: msgspec.msgpack.Decoder[T], *, max_bytes: int = MAX_MESSAGE_BYTES) -> T:
    """Decode one record.

    Raises RecordError for oversize, truncated or malformed bytes; the message names the field (`$.answers[3].reward`).
    """
    if len(data) > max_bytes:
        raise RecordError(f"message of {len(data)} bytes exceeds the limit of {max_bytes} bytes")
    try:
        return using.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RecordError(f"not a valid record: {error}") from error


def pack_array(values: npt.ArrayLike, dtype: str) -> bytes:
    """Return a flat array as raw little-endian bytes; `dtype` is 'i4', 'f4' or 'u1'."""
    return np.ascontiguousarray(values, dtype="<" + dtype).tobytes()


def unpack_array(data: bytes, dtype: str) -> npt.NDArray[Any]:
    """Return the flat array that the raw bytes hold, as a read-only view.

    Raises RecordError when the length is no multiple of the item size.
    """
    item_bytes = np.dtype("<" + dtype).itemsize
    if len(data) % item_bytes:
        raise RecordError(f"{len(data)} bytes are not a whole number of {dtype} items")
    return np.frombuffer(data, dtype="<" + dtype)
