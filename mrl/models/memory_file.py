"""A safetensors file in the memory of a process, which every process of its host and its user can open by its path.

It has no name in a file system: it needs no room in /dev/shm, and is gone with the last process that has it open,
however that ends. What limits it is the memory of the host, or of its control group. Memory that is there already takes
bytes several times faster than new memory, so a file is written over by one version after another.
"""

import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import structlog
import torch
from torch import Tensor

from mrl.errors import DeviceError
from mrl.host_memory import free_memory_bytes
from mrl.models.device_memory import PLAN
from mrl.models.tensor_file import TYPES, TensorShape, header_of

GB = 1e9
CURE = f'fewer copies (rollout.weights_in = "disk"), engines that compute in bfloat16, or more memory; {PLAN}'

log = structlog.get_logger()


class MemoryFile:
    """A file whose tensors are views of this process's memory."""

    def __init__(self, name: str, *, pinned: bool = False) -> None:
        """`pinned` lets a GPU copy into it by itself, where CUDA allows that. Raises OSError."""
        self._name, self._descriptor = name, os.memfd_create(name)
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")
        """Of the open file, as other processes see it."""
        self._pinned, self._mapped = pinned, np.empty(0, np.uint8)

    def lay_out(self, shapes: Sequence[TensorShape]) -> dict[str, Tensor]:
        """Make it a file of tensors of these shapes; returns name -> tensor, to be written to.

        Raises DeviceError when the host lacks memory.
        """
        header = np.frombuffer(header_of(shapes), np.uint8)
        size_bytes = header.size + sum(shape.num_bytes for shape in shapes)
        if size_bytes != self._mapped.size:
            self._resize(size_bytes)
        self._mapped[: header.size] = header
        views, start = {}, header.size
        flat = torch.from_numpy(self._mapped)
        for shape in shapes:
            part = flat[start : start + shape.num_bytes]
            views[shape.name] = part.view(TYPES[shape.dtype]).view(shape.shape)
            start += shape.num_bytes
        return views

    def claim(self) -> bool:
        """Whether nobody holds it (`mrl.weights.read_lock`); then nobody can until it is released."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Let it be read."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Whoever has it open keeps it; the tensors stay until nobody has them."""
        self._unpin()
        os.close(self._descriptor)

    def _resize(self, size_bytes: int) -> None:
        self._unpin()
        free_bytes = free_memory_bytes() + self._mapped.size
        self._mapped = np.empty(0, np.uint8)
        if size_bytes > free_bytes:  # the kernel would grant it, and then kill somebody for it
            raise self._lacking(size_bytes, f"{free_bytes / GB:.2f} GB free")
        try:
            os.ftruncate(self._descriptor, size_bytes)
            os.posix_fallocate(self._descriptor, 0, size_bytes)  # else memory that lacks is a signal, later
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            self._mapped = np.frombuffer(mmap.mmap(self._descriptor, size_bytes, flags=flags), np.uint8)
        except OSError as error:
            raise self._lacking(size_bytes, f"{error.strerror}; {free_bytes / GB:.2f} GB free") from error
        if self._pinned:
            code = int(torch.cuda.cudart().cudaHostRegister(self._mapped.ctypes.data, size_bytes, 0))
            if code:
                log.warning("weights are copied from the GPU through unpinned memory, which is slower", cuda_error=code)
                self._pinned = False

    def _lacking(self, size_bytes: int, got: str) -> DeviceError:
        wanted = f"{size_bytes / GB:.2f} GB more"
        return DeviceError(f"no room for {self._name}", where="memory of this host", got=got, wanted=wanted, cure=CURE)

    def _unpin(self) -> None:
        if self._pinned and self._mapped.size:
            torch.cuda.cudart().cudaHostUnregister(self._mapped.ctypes.data)
