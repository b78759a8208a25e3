"""Memory of a process that other processes of its user on its host open: safetensors files, and the same tensors on a
GPU.

A file has no name in a file system: it needs no room in /dev/shm, and is gone with the last process that has it open,
however that process ends. Its limit is the memory of the host, or of its control group. Memory that is there already
takes bytes several times faster than new memory, so each version is written into the file of an earlier one.

Memory on a GPU is opened by CUDA IPC, through functions of the driver, which are the same in every environment
(https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html). Torch's own way has private functions, and pickle.
CUDA IPC has not run on a GPU; its twin on a CPU is again a file without a name.
"""

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import structlog
import torch
from torch import Tensor

from mrl.errors import DeviceError, WeightsError
from mrl.host_memory import free_memory_bytes
from mrl.models.device_memory import PLAN
from mrl.models.tensor_broadcast import gpu_id, views
from mrl.models.tensor_file import TYPES, Place, TensorShape, check_digests, digests, header_of

SHARED = ".gpu"
"""Suffix of the file beside a file of tensors that says where the same tensors lie on a GPU."""
IPC_PAGE_BYTES = 2 * 1024**2
"""An allocation of whole pages of this size is shared alone: else the driver would share other memory with it."""
PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: the process that opens the memory may use another GPU."""
GB = 1e9
CURE = f'set rollout.weights_in = "disk", use engines that compute in bfloat16, or add memory; {PLAN}'

log = structlog.get_logger()


class MemoryFile:
    """A file whose tensors are views of this process's memory."""

    def __init__(self, name: str, *, pinned: bool = False) -> None:
        """Make an empty file. `pinned` lets a GPU copy into it by itself, where CUDA allows that. Raises OSError."""
        self._name, self._descriptor = name, os.memfd_create(name)
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")
        """Path of the open file, as other processes see it."""
        self._pinned, self._mapped = pinned, np.empty(0, np.uint8)

    def lay_out(self, shapes: Sequence[TensorShape]) -> dict[str, Tensor]:
        """Make the file one of tensors of these shapes; return name -> tensor, to be written to.

        Raises DeviceError when the host lacks memory.
        """
        header = np.frombuffer(header_of(shapes), np.uint8)
        size_bytes = header.size + sum(shape.num_bytes for shape in shapes)
        if size_bytes != self._mapped.size:
            self._resize(size_bytes)
        self._mapped[: header.size] = header
        flat = torch.from_numpy(self._mapped)[header.size :]
        return {shape.name: view for shape, view in views(shapes, flat)}

    def claim(self) -> bool:
        """Lock the file for writing; return False where a reader holds it (`mrl.weights.read_lock`). Until `release` no
        reader can hold it.
        """
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Let the file be read."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file. A process that has it open keeps it; the tensors stay until nobody uses them."""
        self._unpin()
        os.close(self._descriptor)

    def _resize(self, size_bytes: int) -> None:
        self._unpin()
        free_bytes = free_memory_bytes() + self._mapped.size
        self._mapped = np.empty(0, np.uint8)
        if size_bytes > free_bytes:  # the kernel would grant it, and then kill some process for it
            raise self._lacking(size_bytes, f"{free_bytes / GB:.2f} GB free")
        try:
            os.ftruncate(self._descriptor, size_bytes)
            os.posix_fallocate(self._descriptor, 0, size_bytes)  # else a lack of memory would be a signal, later
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
        wanted = f"{size_bytes / GB:.2f} GB"
        return DeviceError(
            f"not enough memory for {self._name}", where="memory of this host", got=got, wanted=wanted, cure=CURE
        )

    def _unpin(self) -> None:
        if self._pinned and self._mapped.size:
            torch.cuda.cudart().cudaHostUnregister(self._mapped.ctypes.data)


class SharedTensors(msgspec.Struct, frozen=True):
    """Tensors that lie end to end in memory on a device, and the handle by which other processes open it."""

    gpu: str
    """Unique id of the GPU; empty for memory of the host."""
    handle: str
    """Handle of CUDA IPC as hex digits, or the path of the memory of the host."""
    num_bytes: int
    tensors: list[TensorShape]


class SharedMemory:
    """Bytes on a device that other processes can open. They go with this process, or when it closes them."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Allocate and share bytes. Raises OSError where the device has no room, or its driver does not share it."""
        self.num_bytes, self._device = num_bytes, device
        if device.type == "cpu":
            descriptor = os.memfd_create("shared tensors")
            os.ftruncate(descriptor, num_bytes)
            self._address, self._handle = descriptor, f"/proc/{os.getpid()}/fd/{descriptor}"
            self.flat = torch.from_numpy(np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8))
            """[num_bytes] uint8, to be written to."""
            return
        address, handle = ctypes.c_uint64(), _IpcHandle()
        _enter(device)
        # apart from torch's allocator: where memory grows in place (expandable segments) CUDA IPC cannot share it
        whole_pages = -(-num_bytes // IPC_PAGE_BYTES) * IPC_PAGE_BYTES
        call_driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(whole_pages))
        self._address = address.value
        try:
            call_driver("cuIpcGetMemHandle", ctypes.byref(handle), address)
        except OSError:
            self.close()
            raise
        self._handle = bytes(handle).hex()
        self.flat = torch.as_tensor(_OnGpu(self._address, num_bytes), device=device)
        if self.flat.data_ptr() != self._address:
            self.close()
            raise OSError(f"torch copied the memory on {device} instead of sharing it")

    def described(self, tensors: Sequence[TensorShape]) -> SharedTensors:
        """Return what other processes need to open this memory and find these tensors in it."""
        return SharedTensors(gpu_id(self._device), self._handle, self.num_bytes, list(tensors))

    def close(self) -> None:
        """Free the memory; nobody may use it any more."""
        if self._device.type == "cpu":
            os.close(self._address)
            return
        _enter(self._device)
        call_driver("cuMemFree_v2", ctypes.c_uint64(self._address))


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class _OnGpu:
    """GPU memory in the form of which torch makes a tensor."""

    def __init__(self, address: int, num_bytes: int) -> None:
        about = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        self.__cuda_array_interface__ = about


def call_driver(function: str, *arguments: object) -> None:
    """Call a function of the CUDA driver. Raises OSError with the name of any answer but success."""
    driver = ctypes.CDLL("libcuda.so.1")
    if code := getattr(driver, function)(*arguments):
        said = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(said))
        raise OSError(f"{function}: {said.value.decode() if said.value else code}")


def _enter(device: torch.device) -> None:
    """Make the driver's functions use the context in which torch uses this GPU."""
    torch.cuda.set_device(device)
    torch.cuda.mem_get_info(device)


def shared_tensors(folder: Path) -> list[SharedTensors]:
    """Return where the tensors of a published version lie on GPUs; empty where they lie in files alone.

    Raises WeightsError for files that cannot be read as such descriptions.
    """
    files = sorted(folder.glob("*.safetensors"))
    told = [file.with_suffix(SHARED) for file in files if file.with_suffix(SHARED).exists()]
    try:
        found = [msgspec.json.decode(path.read_bytes(), type=SharedTensors) for path in told]
    except (OSError, msgspec.DecodeError) as error:
        raise WeightsError(f"{folder}: cannot read the description of tensors on a GPU: {error}") from error
    for one in found:
        if sum(tensor.num_bytes for tensor in one.tensors) != one.num_bytes:
            raise WeightsError(f"{folder}: the sizes of tensors on a GPU do not add up to the size of their memory")
    return found if len(told) == len(files) else []


def read_shared(
    shared: Sequence[SharedTensors], place: Place, wanted: Mapping[str, str], device: torch.device
) -> dict[str, str]:
    """Copy tensors to their places on `device`; return name -> digest of the copies.

    Raises OSError where the memory cannot be opened, WeightsError when `wanted` has other tensors or digests.
    """
    found: dict[str, Tensor] = {}
    for one in shared:
        with _opened(one, device) as copy:
            start = 0
            for shape in one.tensors:
                target = place(shape.name, TYPES[shape.dtype], shape.shape)
                assert target is not None, "every tensor has a place"
                copy(start, target)
                found[shape.name] = target
                start += shape.num_bytes
    digests_found = digests(found)
    check_digests(digests_found, wanted, where="tensors on a GPU")
    return digests_found


@contextmanager
def _opened(shared: SharedTensors, device: torch.device) -> Iterator[Callable[[int, Tensor], None]]:
    """Open shared memory; give a function that copies the bytes from a position on into a contiguous tensor on
    `device`, and waits for it. Raises OSError.

    `mrl/engines/inside/shared_memory.py` does the same in an engine's own environment.
    """
    if (device.type == "cuda") != bool(shared.gpu):
        raise OSError(f"the tensors are on {shared.gpu or 'the host'}, but are needed on {device}")
    if not shared.gpu:
        with Path(shared.handle).open("rb") as file:
            mapped = np.frombuffer(mmap.mmap(file.fileno(), shared.num_bytes, prot=mmap.PROT_READ), np.uint8)
        yield lambda start, target: np.copyto(_bytes_of(target), mapped[start : start + target.nbytes])
        return
    _enter(device)
    address, stream = ctypes.c_uint64(), torch.cuda.Stream(device)
    try:
        handle = _IpcHandle.from_buffer_copy(bytes.fromhex(shared.handle))
    except ValueError as error:
        raise OSError(f"invalid CUDA IPC handle: {error}") from error
    call_driver("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(PEER_ACCESS))

    def copy(start: int, target: Tensor) -> None:
        stream.wait_stream(torch.cuda.current_stream(device))
        there, here = ctypes.c_uint64(address.value + start), ctypes.c_uint64(target.data_ptr())
        queue = ctypes.c_void_p(stream.cuda_stream)
        call_driver("cuMemcpyAsync", here, there, ctypes.c_size_t(target.nbytes), queue)
        stream.synchronize()

    try:
        yield copy
    finally:
        call_driver("cuIpcCloseMemHandle", address)


def _bytes_of(tensor: Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()
