"""Versions copied out of a model, in the number format of the engines, while it does not change.

Every rank of a learner copies its part of the tensors, by several threads on a CPU, into memory from which engines of
its host read them, or from which they are written to a disk while training goes on. One XXH3 of a tensor is all that
is computed of it: on a CPU as its bytes are copied, on a GPU beside training.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from mrl.models.memory_file import MemoryFile
from mrl.models.parameters import TensorSource
from mrl.models.tensor_file import DTYPES, MOST_THREADS, TYPES, TensorShape, copy_tensor, digest

GATHERED_BYTES = 512 * 1024**2
"""Of gathered tensors that wait to be copied, beside one more."""


@dataclass(frozen=True, slots=True)
class Staged:
    """What one rank has of a version."""

    file: MemoryFile
    names: Sequence[str]
    """Of its tensors, in the order of the file."""
    digests: dict[str, Future[str]] = field(default_factory=dict)
    """By name, as they become known."""


class Staging:
    """The part of one rank. Files that nobody reads any more are written over."""

    def __init__(self, name: str, *, dtype: str, rank: int, num_ranks: int, pinned: bool, num_kept: int) -> None:
        """Floating-point tensors become `dtype`, if it is given; the newest `num_kept` files stay as they are."""
        self._name, self._rank, self._num_ranks = name, rank, num_ranks
        self._dtype: torch.dtype | None = getattr(torch, dtype) if dtype else None
        self._pinned, self._num_kept = pinned, num_kept
        self._files: list[MemoryFile] = []
        """In the order in which they were written."""
        self._threads = ThreadPoolExecutor(min(MOST_THREADS, max(2, torch.get_num_threads())), "staging")

    @torch.no_grad()
    def take(self, sources: Sequence[TensorSource]) -> Staged:
        """Copy this rank's part; all ranks take the same sources. The file is claimed until it is released.

        Raises DeviceError when the host lacks memory.
        """
        shapes = self._own_shapes(sources)
        file = self._free_file()
        views = file.lay_out(shapes)
        staged, waiting = Staged(file, list(views)), deque[tuple[Future[str], int]]()
        for source in sources:
            whole = source.whole()
            if source.name not in views:
                continue
            view = views[source.name]
            if whole.is_cuda:
                view.copy_(whole.to(view.dtype), non_blocking=True)
                continue
            staged.digests[source.name] = self._threads.submit(copy_tensor, whole, view)
            waiting.append((staged.digests[source.name], whole.nbytes))
            while sum(nbytes for _, nbytes in waiting) > GATHERED_BYTES:
                waiting.popleft()[0].result()
        if len(staged.digests) < len(views):
            torch.cuda.synchronize()
            staged.digests.update({name: self._threads.submit(digest, view) for name, view in views.items()})
        else:
            for its_digest in staged.digests.values():
                its_digest.result()
        return staged

    def close(self) -> None:
        """Give the memory back once its readers have ended."""
        self._threads.shutdown()
        while self._files:
            self._files.pop().close()

    def _own_shapes(self, sources: Sequence[TensorSource]) -> list[TensorShape]:
        """Those of this rank, dealt so that all ranks have about as much to copy; wide types first: all are aligned."""
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
        for file in self._files[: len(self._files) - self._num_kept]:
            if file.claim():
                self._files.remove(file)
                break
        else:
            file = MemoryFile(self._name, pinned=self._pinned)
            assert file.claim(), "nobody knows it yet"
        self._files.append(file)
        return file
