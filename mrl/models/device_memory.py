"""A device that is not there, or has too little memory: one line with a cure in place of torch's own words."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mrl.errors import DeviceError

TOLD = re.compile(r"out of memory|can't allocate memory|cannot allocate memory|ALLOC_FAILED", re.IGNORECASE)
"""What torch says on a CPU, and CUDA's libraries say, where there is no class for it."""
MAX_SHOWN_CHARS = 160
PLAN = "`mrl check CONFIG` shows what each process needs"


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
