"""Bytes that a rank holds and sends while it trains without data, phase by phase."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fake_ranks.told import told
from mrl.memory_plan.pass_memory import LiveBytes

PLACING, BETWEEN = "placing", "between"
C10D, FUNCTIONAL = torch.ops.c10d, torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class Sent:
    """One collective, with the bytes that each of its ranks sends on in a ring."""

    kind: str
    num_bytes: float
    ranks: tuple[int, ...]


@dataclass(slots=True)
class Phase:
    """Time from one note of the learner to the next, with its peak memory and collectives."""

    name: str
    peak_bytes: int = 0
    sent: list[Sent] = field(default_factory=list)


class Watched(LiveBytes):
    """Dispatch mode that answers operations on values, follows storages that FSDP2 resizes, and notes collectives.

    It takes the place of the rank's board, which is told of every phase that begins.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phases = [Phase(PLACING)]

    def note(self, what: str) -> None:
        """End the current phase and begin the next."""
        self.phases[-1].peak_bytes = self.take_peak()
        self.phases.append(Phase(what))

    def live(self) -> None:
        """Do nothing, as part of a board's interface."""

    def take_phases(self) -> list[Phase]:
        """Return the phases since the last call, without the one that was under way then."""
        self.note(BETWEEN)
        taken, self.phases = self.phases[1:-1], self.phases[-1:]
        return taken

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run or answer an operation. Operations on DTensors come again as operations on this rank's shards."""
        if DTensor in types:
            return NotImplemented
        is_placing = self.phases[-1].name == PLACING  # device meshes have values then
        answer = NotImplemented if is_placing else told(func, args)
        if answer is not NotImplemented:
            return answer
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if func in COLLECTIVES:
            self.phases[-1].sent.append(COLLECTIVES[func](args, made))
        elif func.namespace in ("c10d", "_c10d_functional") and func not in SILENT:
            assert is_placing, f"nobody has said what {func} sends"
        return made

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """Follow storages whose size changes without an operation."""
        resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:
            resized = resize(storage, size)
            self._recount(storage)
            return resized

        with patch.object(torch.UntypedStorage, "resize_", resize_and_count):
            yield

    def _recount(self, storage: torch.UntypedStorage) -> None:
        """Count a storage anew that has been counted with another size."""
        key, size = storage._cdata, storage.nbytes()
        if key in self._sizes:
            self._bytes += size - self._sizes[key]
            self._sizes[key] = size
            self._peak = max(self._peak, self._bytes)


def _sent(kind: str, size: int, group: Any) -> Sent:
    """Make the collective of a ring: each rank sends on all but one part of the whole, for an all-reduce twice."""
    group = group if isinstance(group, dist.ProcessGroup) else dist.distributed_c10d._resolve_process_group(group)
    ranks = tuple(dist.get_process_group_ranks(group))
    rounds = 2 if kind == "all-reduce" else 1
    return Sent(kind, rounds * size * (len(ranks) - 1) / len(ranks), ranks)


def _all_gather(args: Any, _made: Any) -> Sent:
    return _sent("all-gather", args[0].nbytes, dist.ProcessGroup.unbox(args[2]))


def _reduce_scatter(args: Any, _made: Any) -> Sent:
    return _sent("reduce-scatter", args[1].nbytes, dist.ProcessGroup.unbox(args[2]))


def _all_reduce(args: Any, _made: Any) -> Sent:
    return _sent("all-reduce", sum(one.nbytes for one in args[0]), dist.ProcessGroup.unbox(args[1]))


def _functional_all_gather(args: Any, made: Tensor) -> Sent:
    return _sent("all-gather", made.nbytes, args[2])


def _functional_all_reduce(args: Any, made: Tensor) -> Sent:
    return _sent("all-reduce", made.nbytes, args[2])


COLLECTIVES: dict[Any, Callable[[Any, Any], Sent]] = {
    C10D._allgather_base_.default: _all_gather,
    C10D._reduce_scatter_base_.default: _reduce_scatter,
    C10D.allreduce_.default: _all_reduce,
    FUNCTIONAL.all_gather_into_tensor.default: _functional_all_gather,
    FUNCTIONAL.all_reduce.default: _functional_all_reduce,
}
"""Collectives of a step and of a publication, with how to count them. Others are errors but in placing, done once."""
SILENT = {FUNCTIONAL.wait_tensor.default}
