"""The files of a model folder that hold its weights, and their headers. Of tensors at most the beginning is read."""

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format."""
FINER = {"F32": "<f4", "F16": "<f2"}
"""Number formats whose values bfloat16 may not hold -> numpy's name of the format."""
LOOKED_AT_BYTES = 1 << 14
"""Bytes read of a matrix: a few numbers show that it was never in bfloat16."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def files_of_weights(folder: Path) -> list[Path]:
    """Return the safetensors files that the index names, else the file with the usual name, else all.

    A folder may have its weights twice: Mistral's have `consolidated.safetensors` beside them, with names of its own.
    """
    files = sorted(folder.glob("*.safetensors"))
    try:
        named = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        named = {WEIGHTS}
    return [file for file in files if file.name in named] or files


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Sizes and dtypes that the header of a safetensors file tells."""

    file_bytes: int
    """Bytes of the whole file, header included."""
    num_elements: int
    """Elements of all tensors together."""
    dtypes: dict[str, str]
    """Tensor -> its dtype in the words of safetensors: "BF16"."""


def read_header(file: Path) -> TensorHeader:
    """Read the header of `file`. Raises ValueError that says what is wrong with it, OSError."""
    start, tensors = _described(file)
    end, elements, dtypes = 0, 0, dict[str, str]()
    try:
        for name, tensor in tensors.items():
            end = max(end, int(tensor["data_offsets"][1]))
            elements += math.prod(int(size) for size in tensor["shape"])
            dtypes[name] = str(tensor["dtype"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ValueError(f"its header is damaged ({type(error).__name__})") from error
    return TensorHeader(start + end, elements, dtypes)


def finer_than_bfloat16(file: Path) -> str:
    """Return the name of a matrix in `file` with numbers, among its first, that bfloat16 does not hold; "" for none.

    `file` has to be whole: as long as `read_header` says.
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


def header_in(stream: BinaryIO) -> dict[str, Any]:
    """Read the header of an open file, from its start up to the tensors' bytes; return tensor -> its description.

    Raises ValueError that says what is wrong with it, OSError.
    """
    size = os.fstat(stream.fileno()).st_size
    if size < 8:
        raise ValueError(f"{size} bytes, too few for a header")
    (length,) = struct.unpack("<Q", stream.read(8))
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise ValueError(f"its header would have {length:,} bytes")
    if length + 8 > size:
        raise ValueError(f"truncated within its header, after {size:,} bytes")
    try:
        header = json.loads(stream.read(length))
    except (ValueError, RecursionError) as error:
        raise ValueError("its header is not JSON") from error
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    header.pop("__metadata__", None)
    return header


def _described(file: Path) -> tuple[int, dict[str, Any]]:
    """Return the offset of the data in `file`, and the described tensors by name. Raises ValueError, OSError."""
    with file.open("rb") as stream:
        header = header_in(stream)
        return stream.tell(), header
