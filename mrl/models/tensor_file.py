"""Safetensors files written and checked as a stream, each byte touched once while it is in the processor's cache.

The format (https://huggingface.co/docs/safetensors): eight bytes with the length of a JSON header, little-endian; the
header, which gives dtype, shape and byte range of every tensor; the bytes. The safetensors library copies every tensor
before it writes, and maps files to read them, which for weights that change every step costs more than the transfer.
"""

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
import xxhash
from torch import Tensor

from mrl.errors import WeightsError

CHUNK_BYTES = 256 * 1024
MAX_HEADER_BYTES = 100 * 1024 * 1024
ALIGNMENT_BYTES = 64
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TYPES = {name: dtype for dtype, name in DTYPES.items()}


def digest(tensor: Tensor) -> str:
    """XXH3-128 of the tensor's bytes in row-major order, as 32 hex digits.

    It finds what storage, transfer and mistakes do to weights, at the speed of memory. It is no protection from
    somebody who can write into the run folder.
    """
    return xxhash.xxh3_128_hexdigest(_raw(tensor.detach().cpu().contiguous()))


def write_tensors(
    file: BinaryIO, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Write tensors of the CPU as a safetensors file, which is unbuffered; returns name -> digest. Raises OSError.

    `about` goes into the header's metadata.
    """
    file.write(_header(tensors, about or {}))
    return {name: _write_one(file, _raw(tensor.detach().contiguous())) for name, tensor in tensors.items()}


Place = Callable[[str, torch.dtype, list[int]], Tensor | None]
"""(name, dtype, shape) of a tensor in a file -> a contiguous tensor of the CPU like it to read it into, or None."""


def nowhere(name: str, dtype: torch.dtype, shape: list[int]) -> None:
    """A place for tensors that are only to be checked."""


def read_tensors(path: Path, place: Place = nowhere) -> Iterator[tuple[str, str]]:
    """(name, digest) of every tensor in a safetensors file, read into its place.

    Raises WeightsError when the file is none, or is cut.
    """
    buffer = memoryview(bytearray(CHUNK_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            for name, dtype, shape, num_bytes in _entries(path, file):
                target = place(name, dtype, shape)
                yield name, _read_one(path, file, num_bytes, buffer, None if target is None else _raw(target))
            if file.read(1):
                raise WeightsError(f"{path}: there is more in the file than its header says")
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from error


def read_folder(folder: Path, place: Place = nowhere, wanted: Mapping[str, str] | None = None) -> dict[str, str]:
    """Read all safetensors files of a folder into their places; returns name -> digest of its tensors.

    Raises WeightsError when `wanted` names a tensor that is not there, or that has another digest.
    """
    files = sorted(folder.glob("*.safetensors"))
    found = {name: digest for file in files for name, digest in read_tensors(file, place)}
    if not found:
        raise WeightsError(f"{folder}: no *.safetensors to load")
    check_digests(found, wanted or {}, where=str(folder))
    return found


def check_digests(found: Mapping[str, str], wanted: Mapping[str, str], *, where: str) -> None:
    """Raises WeightsError when `wanted` names a tensor that was not found, or that has another digest."""
    for name, digest in wanted.items():
        if name not in found:
            raise WeightsError(f"{where}: lacks {name}, which was published")
        if found[name] != digest:
            raise WeightsError(f"{where}: checksum of {name} differs from what was published")


def copy_bytes(source: Tensor, target: Tensor) -> str:
    """Copy a tensor's bytes, in row-major order, into as many; both contiguous on the CPU. Returns their digest."""
    taken, given = _raw(source), _raw(target)
    hashing = xxhash.xxh3_128()
    for start in range(0, len(taken), CHUNK_BYTES):
        chunk = given[start : start + CHUNK_BYTES]
        chunk[:] = taken[start : start + CHUNK_BYTES]
        hashing.update(chunk)
    return hashing.hexdigest()


def _header(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt", **about}}
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT_BYTES)
    return struct.pack("<Q", len(text)) + text


def _write_one(file: BinaryIO, raw: memoryview) -> str:
    hashing = xxhash.xxh3_128()
    for start in range(0, len(raw), CHUNK_BYTES):
        chunk = raw[start : start + CHUNK_BYTES]
        hashing.update(chunk)
        while chunk:
            chunk = chunk[file.write(chunk) :]
    return hashing.hexdigest()


def _entries(path: Path, file: BinaryIO) -> list[tuple[str, torch.dtype, list[int], int]]:
    """(name, dtype, shape, bytes) in the order of the file. Raises WeightsError unless tensors lie without gaps."""
    try:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{length} bytes long")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        ranges = sorted((*map(int, entry["data_offsets"]), name) for name, entry in header.items())
        entries = [
            (name, TYPES[header[name]["dtype"]], list(map(int, header[name]["shape"])), end - begin)
            for begin, end, name in ranges
        ]
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise WeightsError(f"{path}: no safetensors header: {error}") from error
    for name, dtype, shape, num_bytes in entries:
        if num_bytes != math.prod(shape) * dtype.itemsize:
            raise WeightsError(f"{path}: {name} has {num_bytes} bytes, which {dtype} {shape} does not need")
    if [begin for begin, _, _ in ranges] != [0, *(end for _, end, _ in ranges)][: len(ranges)]:
        raise WeightsError(f"{path}: its tensors do not lie one behind the other")
    return entries


def _read_one(path: Path, file: BinaryIO, num_bytes: int, buffer: memoryview, target: memoryview | None) -> str:
    hashing = xxhash.xxh3_128()
    done = 0
    while done < num_bytes:
        size = min(num_bytes - done, CHUNK_BYTES)
        chunk = buffer[:size] if target is None else target[done : done + size]
        got = file.readinto(chunk)  # type: ignore[attr-defined]
        if not got:
            raise WeightsError(f"{path}: {num_bytes - done} bytes are missing at its end")
        hashing.update(chunk[:got])
        done += got
    return hashing.hexdigest()


def _raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor of the CPU."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
