"""Which files of a model folder hold its weights, and what their headers say of them; no tensor is read."""

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path

MAX_HEADER_BYTES = 100_000_000
"""As the format has it."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def files_of_weights(folder: Path) -> list[Path]:
    """The safetensors files of the index that are there, else the one that has the usual name, else all.

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
    """What a file of tensors says of itself."""

    file_bytes: int
    """That it has when it is whole."""
    num_elements: int
    """Of all tensors together."""
    dtypes: dict[str, str]
    """Of each tensor, as safetensors calls it: "BF16"."""


def read_header(file: Path) -> TensorHeader:
    """The header of `file`. Raises ValueError with what is wrong with it, OSError."""
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
    end, elements, dtypes = 0, 0, dict[str, str]()
    try:
        for name, tensor in header.items():
            end = max(end, int(tensor["data_offsets"][1]))
            elements += math.prod(int(size) for size in tensor["shape"])
            dtypes[name] = str(tensor["dtype"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ValueError(f"its header is damaged ({type(error).__name__})") from error
    return TensorHeader(8 + length + end, elements, dtypes)
