"""Copies of a model's versions, in the number format of the engines, made while the model does not change.

Every rank of a learner copies its part of the tensors, by several threads on a CPU, into memory from which engines of
its host read them, or from which they are written to a disk while training goes on. Only the XXH3 digest of a tensor
is computed: on a CPU as its bytes are copied, on a GPU beside training.

A rank may keep the same tensors on its device, for engines to open: then the copy of the model is made there, and
memory of the host is filled from it beside training.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import structlog
import torch
from torch import Tensor

from mrl.models.memory_file import MemoryFile, SharedMemory, SharedTensors
from mrl.models.parameters import TensorSource
from mrl.models.tensor_broadcast import size_bytes, views
from mrl.models.tensor_file import DTYPES, MOST_THREADS, TYPES, TensorShape, copy_tensor, digest

GATHERED_BYTES = 512 * 1024**2
"""Most bytes of gathered tensors that wait to be copied, beside one more tensor."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Staged:
    """One rank's part of a version."""

    file: MemoryFile
    names: Sequence[str]
    """Names of its tensors, in the order of the file."""
    digests: dict[str, Future[str]] = field(default_factory=dict)
    """Name -> digest, once it is known; in the file a tensor is whole by then."""
    shared: SharedTensors | None = None
    """Copies of the tensors on the rank's device; they last as long as the file, and are claimed with it."""


class Staging:
    """Copies one rank's part of every version. Files that no engine reads any more are written over."""

    def __init__(
        self,
        name: str,
        *,
        dtype: str,
        rank: int,
        num_ranks: int,
        pinned: bool,
        num_kept: int,
        shares_on: torch.device | None = None,
    ) -> None:
        """Floating-point tensors become `dtype`, if it is given; the newest `num_kept` files stay as they are.

        Tensors are kept on the device `shares_on` as well, if it is given.
        """
        self._name, self._rank, self._num_ranks = name, rank, num_ranks
        self._dtype: torch.dtype | None = getattr(torch, dtype) if dtype else None
        self._pinned, self._num_kept, self._shares_on = pinned, num_kept, shares_on
        self._shared: dict[MemoryFile, SharedMemory] = {}
        """File -> memory on the device with the same tensors."""
        self._files: list[MemoryFile] = []
        """Files in the order in which they were written."""
        self._threads = ThreadPoolExecutor(
            min(MOST_THREADS, max(2, torch.get_num_threads())), "staging", initializer=_use, initargs=(shares_on,)
        )

    @torch.no_grad()
    def take(self, sources: Sequence[TensorSource]) -> Staged:
        """Copy this rank's part; all ranks pass the same sources. The file is claimed until it is released.

        Raises DeviceError when the host lacks memory.
        """
        shapes = self._own_shapes(sources)
        file = self._free_file()
        targets = file.lay_out(shapes)
        if (shared := self._beside(file, shapes)) is not None:
            return self._take_by_way_of(shared, sources, shapes, file=file, targets=targets)
        staged, waiting = Staged(file, list(targets)), deque[tuple[Future[str], int]]()
        for source in sources:
            whole = source.whole()
            if source.name not in targets:
                continue
            target = targets[source.name]
            if whole.is_cuda:
                target.copy_(whole.to(target.dtype), non_blocking=True)
                continue
            staged.digests[source.name] = self._threads.submit(copy_tensor, whole, target)
            waiting.append((staged.digests[source.name], whole.nbytes))
            while sum(nbytes for _, nbytes in waiting) > GATHERED_BYTES:
                waiting.popleft()[0].result()
        if len(staged.digests) < len(targets):
            torch.cuda.synchronize()
            staged.digests.update({name: self._threads.submit(digest, target) for name, target in targets.items()})
        else:
            for its_digest in staged.digests.values():
                its_digest.result()
        return staged

    def close(self) -> None:
        """Give the memory back once its readers have ended."""
        self._threads.shutdown()
        self._unshare()
        for file in self._files:
            file.close()
        self._files.clear()

    def _unshare(self) -> None:
        """Give back memory on the device that no engine reads; the rest goes with this process."""
        for file, shared in self._shared.items():
            if file.claim():
                shared.close()
                file.release()
        self._shared.clear()

    def _take_by_way_of(
        self,
        shared: SharedMemory,
        sources: Sequence[TensorSource],
        shapes: Sequence[TensorShape],
        *,
        file: MemoryFile,
        targets: Mapping[str, Tensor],
    ) -> Staged:
        """Copy this rank's part on the device, and begin to bring it from there into the file."""
        parts = {shape.name: part for shape, part in views(shapes, shared.flat)}
        for source in sources:
            whole = source.whole()
            if source.name in parts:
                parts[source.name].copy_(whole)
        if shared.flat.is_cuda:
            torch.cuda.current_stream(shared.flat.device).synchronize()
        brought = {name: self._threads.submit(_bring, part, targets[name]) for name, part in parts.items()}
        return Staged(file, list(targets), brought, shared.described(shapes))

    def _beside(self, file: MemoryFile, shapes: Sequence[TensorShape]) -> SharedMemory | None:
        """Return memory on the device for the tensors of this file; None where there is none."""
        if self._shares_on is None or not shapes or file in self._shared:
            return self._shared.get(file)
        if len(self._shared) > self._num_kept:
            log.info("a version is published through host memory only: engines still read older versions on the GPU")
            return None
        try:
            self._shared[file] = _shared_memory(size_bytes(shapes), self._shares_on)
        except OSError as error:
            log.warning(
                "weights are published through host memory only: the GPU cannot share memory", reason=str(error)
            )
            self._shares_on = None
            self._unshare()
        return self._shared.get(file)

    def _own_shapes(self, sources: Sequence[TensorSource]) -> list[TensorShape]:
        """Return the shapes of this rank's tensors, wide types first, so that all are aligned.

        Tensors are dealt so that all ranks have about as much to copy.
        """
        shapes = [self._shape_of(source) for source in sources]
        filled_bytes = [0] * self._num_ranks
        own: set[str] = set()
        for shape in sorted(shapes, key=lambda one: one.num_bytes, reverse=True):
            rank = filled_bytes.index(min(filled_bytes))
            filled_bytes[rank] += shape.num_bytes
            if rank == self._rank:
                own.add(shape.name)
        mine = [shape for shape in shapes if shape.name in own]
        return sorted(mine, key=lambda one: TYPES[one.dtype].itemsize, reverse=True)

    def _shape_of(self, source: TensorSource) -> TensorShape:
        like = source.like
        dtype = self._dtype if self._dtype is not None and like.is_floating_point() else like.dtype
        return TensorShape(source.name, DTYPES[dtype], list(like.shape))

    def _free_file(self) -> MemoryFile:
        unkept = self._files[: len(self._files) - self._num_kept]
        for file in sorted(unkept, key=lambda one: one not in self._shared):
            if file.claim():
                self._files.remove(file)
                break
        else:
            file = MemoryFile(self._name, pinned=self._pinned)
            assert file.claim(), "a new file is free"
        self._files.append(file)
        return file


def _shared_memory(num_bytes: int, device: torch.device) -> SharedMemory:
    """Allocate shared memory on a device. Raises OSError without room, even once torch's cache is given back."""
    try:
        return SharedMemory(num_bytes, device)
    except OSError:
        torch.cuda.empty_cache()
        return SharedMemory(num_bytes, device)


def _use(device: torch.device | None) -> None:
    """Set the GPU of a new thread: on the first one the end of `torch.cuda.stream` would make a context."""
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)


def _bring(part: Tensor, target: Tensor) -> str:
    """Copy a tensor from the device, beside the arithmetic there; return its digest."""
    with torch.cuda.stream(torch.cuda.Stream(part.device) if part.is_cuda else None):
        return copy_tensor(part, target)
