"""Tensors on a learner's GPU, opened by CUDA IPC in an engine's own environment, where mrl is not installed.

The other end is `SharedMemory` in `mrl.models.memory_file`, which also says why the CUDA driver is called. Written from
the driver's documentation; it has run on a CPU alone, where the memory is a file without a name.
"""

import ctypes
import json
import math
import mmap
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

SUFFIX = ".gpu"
TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
TYPES["BOOL"] = torch.bool
PEER_ACCESS = 1


class SharedTensor(NamedTuple):
    """A tensor in opened memory."""

    memory: "OpenMemory"
    dtype: torch.dtype
    shape: list[int]
    start: int

    def here(self) -> torch.Tensor:
        """Return a copy on the engine's device."""
        copy = torch.empty(self.shape, dtype=self.dtype, device=self.memory.device)
        self.memory.read(self.start, copy.reshape(-1).view(torch.uint8))
        return copy

    def pieces(self, room: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the tensor's bytes in order; each piece lies in `room` until the next is asked for."""
        end = self.start + math.prod(self.shape) * self.dtype.itemsize
        for start in range(self.start, end, len(room)):
            piece = room[: end - start]
            self.memory.read(start, piece)
            yield piece

    def digest(self, room: torch.Tensor) -> str:
        """XXH3-128 of the tensor's bytes, which pass through `room` on the host."""
        hashing = xxhash.xxh3_128()
        for piece in self.pieces(room):
            hashing.update(piece.numpy().data)
        return hashing.hexdigest()


class OpenMemory:
    """Memory of another process, which can be read until `close`."""

    def __init__(self, gpu: str, handle: str, num_bytes: int, device: torch.device) -> None:
        """Raises OSError, ValueError when the memory cannot be opened from this device."""
        self.device = device
        if (device.type == "cuda") != bool(gpu):
            raise OSError(f"the tensors are on {gpu or 'the host'}, but are needed on {device}")
        if device.type == "cpu":
            with Path(handle).open("rb") as file:
                mapped = mmap.mmap(file.fileno(), num_bytes, flags=mmap.MAP_PRIVATE)
            self._mapped = torch.frombuffer(mapped, dtype=torch.uint8)
            return
        self._enter()
        self._address, self._stream = ctypes.c_uint64(), torch.cuda.Stream(device)
        its = _IpcHandle.from_buffer_copy(bytes.fromhex(handle))
        call_driver("cuIpcOpenMemHandle_v2", ctypes.byref(self._address), its, ctypes.c_uint(PEER_ACCESS))

    def read(self, start: int, target: torch.Tensor) -> None:
        """Copy bytes from offset `start` of the memory into `target`, and wait until they are there."""
        if self.device.type == "cpu":
            target.copy_(self._mapped[start : start + len(target)])
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        there, here = ctypes.c_uint64(self._address.value + start), ctypes.c_uint64(target.data_ptr())
        queue = ctypes.c_void_p(self._stream.cuda_stream)
        call_driver("cuMemcpyAsync", here, there, ctypes.c_size_t(len(target)), queue)
        self._stream.synchronize()

    def close(self) -> None:
        """End reading."""
        if self.device.type == "cuda":
            self._enter()
            call_driver("cuIpcCloseMemHandle", self._address)

    def _enter(self) -> None:
        """Make torch's context the driver's current one in the calling thread, since any thread may close."""
        torch.cuda.set_device(self.device)
        torch.cuda.mem_get_info(self.device)


class OpenVersion:
    """The tensors of a published version on its learner's GPUs."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Open the tensors of `folder`; `tensors` is empty where they lie in files alone.

        They are sorted by name, so that those of a module follow each other, whichever ranks published them.
        Raises OSError, ValueError when they cannot be opened.
        """
        self.tensors: dict[str, SharedTensor] = {}
        self._memories = ExitStack()
        files = sorted(folder.glob("*.safetensors"))
        if not all(file.with_suffix(SUFFIX).exists() for file in files):
            return
        try:
            for file in files:
                self._open(json.loads(file.with_suffix(SUFFIX).read_bytes()), device)
            self.tensors = dict(sorted(self.tensors.items()))  # vLLM holds tensors until a module is whole
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End reading. Raises OSError, RuntimeError when a memory cannot be closed; the others are closed then, too."""
        self.tensors.clear()
        self._memories.close()

    def _open(self, told: dict[str, Any], device: torch.device) -> None:
        memory, start = OpenMemory(told["gpu"], told["handle"], told["num_bytes"], device), 0
        self._memories.callback(memory.close)
        for one in told["tensors"]:
            tensor = SharedTensor(memory, TYPES[one["dtype"]], one["shape"], start)
            self.tensors[one["name"]] = tensor
            start += math.prod(tensor.shape) * tensor.dtype.itemsize


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle of the CUDA driver."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


def call_driver(function: str, *arguments: Any) -> None:
    """Call a function of the CUDA driver. Raises OSError with the name of its error code."""
    driver = ctypes.CDLL("libcuda.so.1")
    if code := getattr(driver, function)(*arguments):
        said = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(said))
        raise OSError(f"{function}: {said.value.decode() if said.value else code}")
