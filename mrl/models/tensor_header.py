"""The header of a safetensors file, which says what the file holds and how long it is; no tensor is read whole."""

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MAX_HEADER_BYTES = 100_000_000
"""As the format has it."""
FINER = {"F32": "<f4", "F16": "<f2"}
"""Formats of numbers that bfloat16 may not hold -> numpy's name."""
LOOKED_AT_BYTES = 1 << 14
"""Of a matrix; numbers that were never in bfloat16 are told by the first few."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a file of tensors says of itself."""

    file_bytes: int
    """That it has when it is whole."""
    num_elements: int
    """Of all tensors together."""


def read_header(file: Path) -> TensorHeader:
    """The header of `file`. Raises ValueError with what is wrong with it, OSError."""
    start, tensors = _described(file)
    end = elements = 0
    try:
        for tensor in tensors.values():
            end = max(end, int(tensor["data_offsets"][1]))
            elements += math.prod(int(size) for size in tensor["shape"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ValueError(f"its header is damaged ({type(error).__name__})") from error
    return TensorHeader(start + end, elements)


def finer_than_bfloat16(file: Path) -> str:
    """The name of a matrix in `file` of whose first numbers bfloat16 does not hold all; "" where there is none.

    `file` is whole, as `read_header` says.
    """
    start, tensors = _described(file)
    with file.open("rb") as stream:
        for name, tensor in tensors.items():
            begin, end = tensor["data_offsets"]
            if tensor["dtype"] not in FINER or len(tensor["shape"]) < 2:
                continue
            stream.seek(start + begin)
            numbers = np.frombuffer(stream.read(min(end - begin, LOOKED_AT_BYTES)), FINER[tensor["dtype"]])
            if (numbers.astype("<f4").view("<u4") & 0xFFFF).any():
                return name
    return ""


def _described(file: Path) -> tuple[int, dict[str, Any]]:
    """Where the data of `file` begin, and its tensors by name. Raises ValueError, OSError."""
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
    return 8 + length, header
