"""A device that is not there, or has too little memory: one line with a cure in place of torch's own words.

And the way of tensors between a device that others need too, and main memory.
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
"""What torch says on a CPU, and CUDA's libraries say, where there is no class for it."""
MAX_SHOWN_CHARS = 160
PLAN = "`mrl check CONFIG` shows what each process needs"
LARGE_BYTES, MAPPED_BYTES = 2 << 20, 32 << 20
"""Tensors of the first size are locked where they begin with a page, as in large pages they do. From the second on they
are anyway: malloc maps each of them apart."""
FREED_S, LOOK_S = 30.0, 0.1
"""How long the driver may take to give back the memory of a process that was killed, and how often it is looked for."""

log = structlog.get_logger()


def check_device(device: str) -> None:
    """Raises DeviceError unless torch can compute on `device`, "cpu" or "cuda" with or without a number."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        what = "torch sees no GPU" if torch.backends.cuda.is_built() else "this torch was built without CUDA"
        cure = 'device = "cpu", or make the GPU visible to a torch with CUDA'
        raise DeviceError(what, got=device, wanted="a GPU", cure=cure)


def lacks_memory(error: BaseException) -> bool:
    """Whether it says that memory does not suffice, of a device or of the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and TOLD.search(str(error)) is not None


@contextmanager
def enough_memory(during: str, *, where: str, cure: str) -> Iterator[None]:
    """Raises DeviceError with this cure when memory runs out inside, "out of memory " and `during`."""
    try:
        yield
    except (RuntimeError, OSError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        told = " ".join(str(error).split())[:MAX_SHOWN_CHARS] or type(error).__name__
        raise DeviceError(f"out of memory {during}", where=where, got=told, cure=cure) from error


class OffDevice:
    """Tensors whose memory leaves their device and comes back, bit for bit; they stay the same tensors meanwhile.

    What shares memory goes once. Between `leave` and `come_back` none of them may be read. The copies of a GPU's lie in
    locked memory, which is kept for the next time.
    """

    def __init__(self) -> None:
        self._away: list[tuple[torch.UntypedStorage, _Copy]] = []
        self._kept: list[_Copy] = []

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Take them to main memory, and free theirs. Only once before `come_back`."""
        assert not self._away, "they are away"
        local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        found = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in local)}
        # Memory that others own, as numpy does, stays on a CPU; on a GPU torch would say that it cannot be freed.
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
        """Take them back to their device. Raises torch's error where it stays too full for them."""
        storages = [storage for storage, _ in self._away]
        for storage, copy in self._away:
            _grow(storage, copy.held.nbytes)
            _bytes_of(storage).copy_(copy.held, non_blocking=True)
        _settle(storages)
        self._kept = [copy for storage, copy in self._away if storage.device.type == "cuda"]
        self._away = []


class _Copy:
    """Main memory for what a storage holds."""

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
    """Keep the pages of large tensors where they are as long as `holder` lives, so that a GPU can read them itself.

    One that might share a page with another one is left as it is.
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
    with suppress(RuntimeError):  # CUDA tells the next kernel of what failed here, and then forgets it
        torch.zeros((), device="cuda").add_(1)
    log.warning("main memory cannot be locked: copies to a GPU take longer", tensors=len(own_pages) - len(locked))


def _unlock(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
