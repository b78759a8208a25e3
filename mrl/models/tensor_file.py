"""Safetensors files written and checked as a stream, each byte touched once while it is in the processor's cache.

The format (https://huggingface.co/docs/safetensors): eight bytes with the length of a JSON header, little-endian; the
header, which gives dtype, shape and byte range of every tensor; the bytes. The safetensors library copies every tensor
before it writes, and maps files to read them, which for weights that change every step costs more than the transfer.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import torch
import xxhash
from torch import Tensor

from mrl.errors import WeightsError
from mrl.models.tensor_header import files_of_weights, header_in

CHUNK_BYTES = 1024 * 1024
FROM_GPU_BYTES = 64 * 1024 * 1024
"""Bytes of a GPU's tensor that are in main memory at once while the tensor is hashed."""
ALIGNMENT_BYTES = 64
MAX_REASON_CHARS = 200
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
MOST_THREADS = 8
"""Threads that read one folder, at most: more of them would wait for the same memory."""


class TensorShape(msgspec.Struct, frozen=True):
    """Name, type and shape of a tensor, told before its bytes; `dtype` is safetensors' name of the type."""

    name: str
    dtype: str
    shape: list[int]

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * TYPES[self.dtype].itemsize


def shape_of(name: str, tensor: Tensor) -> TensorShape:
    """Return name, type and shape of a tensor."""
    return TensorShape(name, DTYPES[tensor.dtype], list(tensor.shape))


def digest(tensor: Tensor) -> str:
    """Return the XXH3-128 of the tensor's bytes in row-major order, as 32 hex digits.

    A digest finds what storage, transfer and mistakes do to weights, at the speed of memory. It is no protection from
    somebody who can write into the run folder.
    """
    return digests({"": tensor})[""]


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return name -> `digest`. Tensors on a GPU are read on a stream of their own, after the work that was queued there
    before.
    """
    streams = {one.device: torch.cuda.Stream(one.device) for one in tensors.values() if one.is_cuda}
    for device, stream in streams.items():
        stream.wait_stream(torch.cuda.current_stream(device))
    room = torch.empty(FROM_GPU_BYTES, dtype=torch.uint8, pin_memory=True) if streams else None
    found = {}
    for name, tensor in tensors.items():
        if room is None or not tensor.is_cuda:
            found[name] = xxhash.xxh3_128_hexdigest(_raw(tensor.detach().contiguous()))
            continue
        with torch.cuda.stream(streams[tensor.device]):
            found[name] = _digest_by_way_of(room, tensor.detach(), streams[tensor.device].synchronize)
    return found


def _digest_by_way_of(room: Tensor, tensor: Tensor, wait: Callable[[], object]) -> str:
    """Return the digest of a tensor on a GPU: it comes into `room` piece by piece, and a piece is there after each
    `wait`.
    """
    hashing = xxhash.xxh3_128()
    for piece in tensor.contiguous().reshape(-1).view(torch.uint8).split(room.numel()):
        room[: piece.numel()].copy_(piece, non_blocking=True)
        wait()
        hashing.update(_raw(room[: piece.numel()]))
    return hashing.hexdigest()


def write_tensors(
    file: BinaryIO, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Write tensors of the CPU to an unbuffered `file` as safetensors; return name -> digest. Raises OSError.

    `about` goes into the header's metadata.
    """
    shapes = [shape_of(name, tensor) for name, tensor in tensors.items()]
    _write_all(file, memoryview(header_of(shapes, about or {})))
    return {name: _write_one(file, _raw(tensor.detach().contiguous())) for name, tensor in tensors.items()}


Place = Callable[[str, torch.dtype, list[int]], Tensor | None]
"""(name, dtype, shape) of a stored tensor -> the contiguous tensor like it to read it into, of the CPU when it comes
from a file, or None."""


def nowhere(name: str, dtype: torch.dtype, shape: list[int]) -> None:
    """Give no place: tensors are only checked."""


def read_tensors(path: Path, place: Place = nowhere) -> Iterator[tuple[str, str]]:
    """Yield (name, digest) of every tensor in a safetensors file, read into its place.

    Raises WeightsError when the file is no safetensors file, or is cut off.
    """
    with ExitStack() as closing:
        for stored in _open(path, closing):
            yield stored.name, _read_one(stored, place(stored.name, stored.dtype, stored.shape))


def read_folder(folder: Path, place: Place = nowhere, wanted: Mapping[str, str] | None = None) -> dict[str, str]:
    """Read the weights of a folder into their places; return name -> digest.

    As many threads as torch has read them, at most MOST_THREADS. All tensors have their places before the first is
    read. Raises WeightsError when `wanted` names a tensor that is not there, or that has another digest.
    """
    with ExitStack() as closing:
        listed = [stored for path in files_of_weights(folder) for stored in _open(path, closing)]
        if not listed:
            raise WeightsError(f"{folder}: no *.safetensors files to load")
        places = [place(stored.name, stored.dtype, stored.shape) for stored in listed]
        threads = closing.enter_context(ThreadPoolExecutor(min(MOST_THREADS, torch.get_num_threads())))
        digests = list(threads.map(_read_one, listed, places))
    found = {stored.name: its_digest for stored, its_digest in zip(listed, digests, strict=True)}
    check_digests(found, wanted or {}, where=str(folder))
    return found


def check_digests(found: Mapping[str, str], wanted: Mapping[str, str], *, where: str) -> None:
    """Raises WeightsError when `wanted` names a tensor that was not found, or that has another digest."""
    for name, digest in wanted.items():
        if name not in found:
            raise WeightsError(f"{where}: published tensor {name} is missing")
        if found[name] != digest:
            raise WeightsError(f"{where}: checksum of {name} differs from the published one")


def copy_tensor(source: Tensor, target: Tensor) -> str:
    """Copy `source` into `target`, a contiguous tensor of the CPU, rounded to its type; return the digest of `target`
    then.

    Each part is hashed while it is in the processor's cache.
    """
    raw, flat, values = _raw(target), target.reshape(-1), source.detach().reshape(-1)
    hashing = xxhash.xxh3_128()
    size = target.element_size()
    for start in range(0, flat.numel(), CHUNK_BYTES // size):
        end = min(start + CHUNK_BYTES // size, flat.numel())
        flat[start:end].copy_(values[start:end])
        hashing.update(raw[start * size : end * size])
    return hashing.hexdigest()


def header_of(shapes: Iterable[TensorShape], about: Mapping[str, str] | None = None) -> bytes:
    """Return the header of a safetensors file of such tensors, its length first; `about` goes into its metadata."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(about or {})}}
    offset = 0
    for one in shapes:
        header[one.name] = {
            "dtype": one.dtype,
            "shape": one.shape,
            "data_offsets": [offset, offset + one.num_bytes],
        }
        offset += one.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT_BYTES)
    return struct.pack("<Q", len(text)) + text


def _write_one(file: BinaryIO, raw: memoryview) -> str:
    hashing = xxhash.xxh3_128()
    for start in range(0, len(raw), CHUNK_BYTES):
        chunk = raw[start : start + CHUNK_BYTES]
        hashing.update(chunk)
        _write_all(file, chunk)
    return hashing.hexdigest()


def _write_all(file: BinaryIO, data: memoryview) -> None:
    while data:  # an unbuffered file may take only a part of the data
        data = data[file.write(data) :]


class _Stored(NamedTuple):
    """A tensor in an open file."""

    path: Path
    descriptor: int
    name: str
    dtype: torch.dtype
    shape: list[int]
    start: int
    num_bytes: int


def _open(path: Path, closing: ExitStack) -> list[_Stored]:
    """Return the tensors of a file, in their order, which stays open until `closing` ends. Raises WeightsError."""
    try:
        file = closing.enter_context(path.open("rb", buffering=0))
        entries = _entries(path, file)
        start, listed = file.tell(), []
        for name, dtype, shape, num_bytes in entries:
            listed.append(_Stored(path, file.fileno(), name, dtype, shape, start, num_bytes))
            start += num_bytes
        if os.fstat(file.fileno()).st_size > start:
            raise WeightsError(f"{path}: the file is longer than its header says")
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from error
    return listed


def _entries(path: Path, file: BinaryIO) -> list[tuple[str, torch.dtype, list[int], int]]:
    """Return (name, dtype, shape, bytes) of each tensor in the order of the file. Raises WeightsError unless they lie
    without gaps.
    """
    try:
        header: Any = header_in(file)
        ranges = sorted((*map(int, entry["data_offsets"]), name) for name, entry in header.items())
        entries = [
            (name, TYPES[header[name]["dtype"]], list(map(int, header[name]["shape"])), end - begin)
            for begin, end, name in ranges
        ]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise WeightsError(f"{path}: invalid safetensors header: {str(error)[:MAX_REASON_CHARS]}") from error
    for name, dtype, shape, num_bytes in entries:
        if num_bytes < 0 or num_bytes != math.prod(shape) * dtype.itemsize:
            raise WeightsError(f"{path}: {name} has {num_bytes} bytes, which does not match {dtype} {shape}")
    if [begin for begin, _, _ in ranges] != [0, *(end for _, end, _ in ranges)][: len(ranges)]:
        raise WeightsError(f"{path}: its tensors are not stored contiguously")
    return entries


def _read_one(stored: _Stored, target: Tensor | None) -> str:
    """Read a stored tensor, into `target` where there is one; return its digest. Raises WeightsError."""
    room = memoryview(bytearray(min(CHUNK_BYTES, stored.num_bytes))) if target is None else _raw(target)
    hashing = xxhash.xxh3_128()
    done = 0
    while done < stored.num_bytes:
        start = 0 if target is None else done
        chunk = room[start : start + min(stored.num_bytes - done, CHUNK_BYTES)]
        try:
            got = os.preadv(stored.descriptor, [chunk], stored.start + done)
        except OSError as error:
            raise WeightsError(f"{stored.path}: cannot be read: {error.strerror}") from error
        if not got:
            raise WeightsError(f"{stored.path}: the file is truncated: {stored.num_bytes - done} bytes are missing")
        hashing.update(chunk[:got])
        done += got
    return hashing.hexdigest()


def _raw(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor of the CPU, which shares their memory."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
