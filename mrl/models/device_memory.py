"""Errors of one line with a cure, for a device that is not there or lacks memory; and `OffDevice`, which moves tensors
between main memory and a device that others need too.
"""

import mmap
import re
import time
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import structlog
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mrl.errors import DeviceError

TOLD = re.compile(r"out of memory|can't allocate memory|cannot allocate memory|ALLOC_FAILED", re.IGNORECASE)
"""Words of torch on a CPU, and of CUDA's libraries, for a lack of memory that has no error class."""
MAX_SHOWN_CHARS = 160
PLAN = "`mrl check CONFIG` shows the memory that each process needs"
LARGE_BYTES, MAPPED_BYTES = 2 << 20, 32 << 20
"""Tensors from LARGE_BYTES on are locked where they begin with a page, as in large pages they do. Tensors from
MAPPED_BYTES on are always locked: malloc maps each of them apart."""
FREED_S, LOOK_S = 30.0, 0.1
"""Longest seconds that the driver may take to give back the memory of a process that was killed, and seconds between
two attempts to get it."""

log = structlog.get_logger()


def check_device(device: str) -> None:
    """Raises DeviceError unless torch can compute on `device`, "cpu" or "cuda" with or without a number."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        what = "torch sees no GPU" if torch.backends.cuda.is_built() else "this torch was built without CUDA"
        cure = 'set device = "cpu", or make the GPU visible to a torch built with CUDA'
        raise DeviceError(what, got=device, wanted="a GPU", cure=cure)


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that memory of a device or of the host does not suffice."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and TOLD.search(str(error)) is not None


@contextmanager
def enough_memory(during: str, *, where: str, cure: str) -> Iterator[None]:
    """Raises DeviceError "out of memory `during`" with this cure when memory runs out inside."""
    try:
        yield
    except (RuntimeError, OSError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        told = " ".join(str(error).split())[:MAX_SHOWN_CHARS] or type(error).__name__
        raise DeviceError(f"out of memory {during}", where=where, got=told, cure=cure) from error


class OffDevice:
    """Tensors whose memory leaves their device and comes back, bit for bit; they stay the same tensor objects
    meanwhile.

    Memory that several tensors share moves once. Between `leave` and `come_back` no tensor may be read. The copies of a
    GPU's tensors lie in locked memory, which is kept for the next time.
    """

    def __init__(self) -> None:
        self._away: list[tuple[torch.UntypedStorage, _Copy]] = []
        self._kept: list[_Copy] = []

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors to main memory, and free theirs. Only once before `come_back`."""
        assert not self._away, "the tensors are away already"
        local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        found = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in local)}
        # On a CPU, memory that others own, such as numpy's, stays; on a GPU torch would say that it cannot be freed.
        own = [storage for storage in found.values() if storage.device.type != "cpu" or storage.resizable()]
        storages = [storage for storage in own if storage.nbytes()]
        kept: defaultdict[int, list[_Copy]] = defaultdict(list)
        for copy in self._kept:
            kept[copy.held.nbytes].append(copy)
        self._kept = []
        for storage in storages:
            same = kept[storage.nbytes()]
            copy = same.pop() if same else _Copy(storage)
            copy.held.copy_(_bytes_of(storage), non_blocking=True)
            self._away.append((storage, copy))
        _settle(storages)
        for storage in storages:
            storage.resize_(0)
        _empty_cache(storages)

    def come_back(self) -> None:
        """Copy the tensors back to their device. Raises torch's error where it stays too full for them."""
        storages = [storage for storage, _ in self._away]
        for storage, copy in self._away:
            _grow(storage, copy.held.nbytes)
            _bytes_of(storage).copy_(copy.held, non_blocking=True)
        _settle(storages)
        self._kept = [copy for storage, copy in self._away if storage.device.type == "cuda"]
        self._away = []


class _Copy:
    """Main memory for the bytes of one storage."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.held = torch.empty(storage.nbytes(), dtype=torch.uint8)
        if storage.device.type == "cuda":
            lock_pages([self.held], holder=self)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _grow(storage: torch.UntypedStorage, num_bytes: int) -> None:
    until_s = time.monotonic() + FREED_S
    while True:
        try:
            storage.resize_(num_bytes)
            return
        except torch.OutOfMemoryError:
            if time.monotonic() > until_s:
                raise
        torch.cuda.empty_cache()
        time.sleep(LOOK_S)


def _settle(storages: Sequence[torch.UntypedStorage]) -> None:
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.synchronize(device)


def _empty_cache(storages: Sequence[torch.UntypedStorage]) -> None:
    if any(storage.device.type == "cuda" for storage in storages):
        torch.cuda.empty_cache()


def lock_pages(tensors: Sequence[Tensor], *, holder: object) -> None:
    """Lock the pages of large tensors in main memory as long as `holder` lives, so that a GPU can read them itself.

    A tensor that might share a page with another one is not locked.
    """
    if not tensors or not torch.cuda.is_available():
        return
    own_pages = [
        tensor
        for tensor in tensors
        if tensor.nbytes >= MAPPED_BYTES or (tensor.nbytes >= LARGE_BYTES and not tensor.data_ptr() % mmap.PAGESIZE)
    ]
    cuda = torch.cuda.cudart()
    locked = [tensor for tensor in own_pages if not int(cuda.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))]
    weakref.finalize(holder, _unlock, locked).atexit = False
    if len(locked) == len(own_pages):
        return
    with suppress(RuntimeError):  # CUDA reports the failure once more to the next kernel, and then forgets it
        torch.zeros((), device="cuda").add_(1)
    log.warning("cannot lock main memory: copies to the GPU will be slower", tensors=len(own_pages) - len(locked))


def _unlock(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
