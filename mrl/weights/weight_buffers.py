"""The newest version of a learner in its host's memory, for engines to take while the learner trains on.

There are two sets of buckets: while one of them is sent, the next version goes into the other.
"""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mrl.models.tensor_broadcast import in_buckets, size_bytes, views
from mrl.models.tensor_file import TensorShape, copy_tensor, shape_of
from mrl.records.version import Version
from mrl.weights.manifest import Canary


@dataclass
class VersionBuffer:
    """Tensors of one version; they are not written to while they have `users`."""

    version: Version
    canary: Canary
    buckets: list[tuple[list[TensorShape], Tensor]] = field(default_factory=list)
    """Tensors of each bucket, and its bytes."""
    digests: dict[str, str] = field(default_factory=dict)
    users: int = 0

    @property
    def tensors(self) -> list[TensorShape]:
        """All tensors in their order."""
        return [tensor for bucket, _ in self.buckets for tensor in bucket]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of each tensor."""
        for bucket, flat in self.buckets:
            yield from ((tensor.name, view) for tensor, view in views(bucket, flat))


class WeightBuffers:
    """Buffers that the training thread writes and the sending thread reads; `take` never waits for a reader."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sets: list[VersionBuffer] = []
        self._newest: VersionBuffer | None = None

    def take(self, weights: Iterable[tuple[str, Tensor]], version: Version, canary: Canary) -> VersionBuffer:
        """Copy a version as its tensors come, and make it the newest; one bucket is in memory beside the copy.

        Until that is done there is no newest version.
        """
        with self._lock:
            self._newest = None
            free = next((held for held in self._sets if not held.users), None)
            self._sets = [held for held in self._sets if held is not free]
        fresh = VersionBuffer(version, canary)
        self._fill(fresh, weights, [flat for _, flat in free.buckets] if free else [])
        with self._lock:
            self._sets.append(fresh)
            self._newest = fresh
        return fresh

    def newest(self) -> VersionBuffer | None:
        """Return the newest version, None while it is written. It may be written over unless it is in use."""
        with self._lock:
            return self._newest

    def use(self, version: Version) -> VersionBuffer | None:
        """Return the newest version if it is this one, with its tensors kept as they are until `release`; else None."""
        with self._lock:
            if self._newest is None or self._newest.version != version:
                return None
            self._newest.users += 1
            return self._newest

    def release(self, held: VersionBuffer) -> None:
        """End one use of a version."""
        with self._lock:
            held.users -= 1

    def _fill(self, held: VersionBuffer, weights: Iterable[tuple[str, Tensor]], spare: list[Tensor]) -> None:
        named = ((shape_of(name, tensor), tensor.detach().cpu().contiguous()) for name, tensor in weights)
        for gathered in in_buckets(named, lambda one: one[0]):
            self._keep(held, gathered, spare)

    def _keep(self, held: VersionBuffer, gathered: list[tuple[TensorShape, Tensor]], spare: list[Tensor]) -> None:
        bucket = [shape for shape, _ in gathered]
        number = len(held.buckets)
        flat = spare[number] if number < len(spare) else torch.empty(0, dtype=torch.uint8)
        if len(flat) != size_bytes(bucket):
            flat = torch.empty(size_bytes(bucket), dtype=torch.uint8)
        for (shape, tensor), (_, target) in zip(gathered, views(bucket, flat), strict=True):
            held.digests[shape.name] = copy_tensor(tensor, target)
        held.buckets.append((bucket, flat))
