"""Header of a safetensors file: how many elements and bytes the file should have. No tensor is read."""

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path

MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Sizes that the header of a safetensors file tells."""

    file_bytes: int
    """Bytes of the whole file, header included."""
    num_elements: int
    """Elements of all tensors together."""


def read_header(file: Path) -> TensorHeader:
    """Read the header of `file`. Raises ValueError that says what is wrong with it, OSError."""
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size < 8:
            raise ValueError(f"{size} bytes")
        (length,) = struct.unpack("<Q", stream.read(8))
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise ValueError(f"it would have a header of {length:,} bytes")
        if length + 8 > size:
            raise ValueError(f"cut off within its header, after {size:,} bytes")
        header = json.loads(stream.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    header.pop("__metadata__", None)
    end = elements = 0
    try:
        for tensor in header.values():
            end = max(end, int(tensor["data_offsets"][1]))
            elements += math.prod(int(size) for size in tensor["shape"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ValueError(f"its header is damaged ({type(error).__name__})") from error
    return TensorHeader(8 + length + end, elements)
