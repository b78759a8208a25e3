"""The process group of one policy's learner. No group ever spans two policies."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mrl.config.run_folder import local_folder
from mrl.errors import PeerLost
from mrl.learner.ranks.host_board import HostBoard
from mrl.learner.ranks.rank_place import RankPlace, rank_place
from mrl.learner.ranks.rendezvous import RendezvousPoint, meet
from mrl.learner.ranks.watchdog import ActivityBoard, ProgressBoard, StallWatch


class World:
    """This rank among the ranks of one learner; also valid for a single process."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        board: ActivityBoard | None = None,
        *,
        addresses: Mapping[str, str] = MappingProxyType({}),
        patience: timedelta | None = None,
    ) -> None:
        """The `board` shows this rank's activity to the others. `addresses` are those of several hosts, by name.

        Collectives wait for so much `patience`; None: for as long as torch lets them.
        """
        self.rank, self.size, self.device, self.patience = rank, size, device, patience
        self._addresses = addresses
        self._board = board
        self._watch: StallWatch | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks to the other roles."""
        return self.rank == 0

    def note(self, what: str) -> None:
        """Note the activity that begins now. All ranks note the same ones in the same order."""
        if self._board:
            self._board.note(what)

    def watch(self, *, bound_s: float, slow_bound_s: float) -> None:
        """Watch for stalls of the ranks: in one this process ends, with a reason that names the awaited rank.

        On a GPU only the reason is logged, and NCCL ends the process.
        """
        if self._board:
            ends = self.device.type != "cuda"
            self._watch = StallWatch(self._board, bound_s=bound_s, slow_bound_s=slow_bound_s, ends=ends)

    def sum_gradients(self, model: nn.Module) -> None:
        """Add the gradients of all ranks, in place; a parameter without gradient counts as zero."""
        if self.size == 1:
            return
        self.note("gradient all-reduce")
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        for parameter, total in zip(parameters, flat.split([g.numel() for g in gradients]), strict=True):
            parameter.grad = total.view_as(parameter)

    def sum_values(self, values: Tensor) -> Tensor:
        """Return the element-wise sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def max_values(self, values: Tensor) -> Tensor:
        """Return the element-wise maximum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank; the same answer on all."""
        return bool(self.max_values(torch.tensor(float(flag), device=self.device)))

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Return the bytes that the first rank passes; the others pass None. An empty message means: stop."""
        if self.size == 1:
            return data or b""
        # The first rank has nothing to wait for here but the others; they may wait long for it to form a batch.
        self.note("broadcasting the step" if self.is_first else "receiving the step")
        length = torch.tensor([len(data or b"")], dtype=torch.int64, device=self.device)
        dist.broadcast(length, 0)
        buffer = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        if self.is_first and data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if len(buffer):
            dist.broadcast(buffer, 0)
        return buffer.cpu().numpy().tobytes()

    @contextmanager
    def naming_hosts(self) -> Iterator[None]:
        """Have a failed collective inside name the host that it lacks: PeerLost in place of torch's own error."""
        try:
            yield
        except RuntimeError as error:
            gone = [host for host, address in self._addresses.items() if f"[{address}]" in str(error)]
            if not gone:
                raise
            raise PeerLost(f"a rank on host {gone[0]} is gone: {str(error).partition('. ')[0]}") from error

    def part(self, stopping: Callable[[], bool]) -> None:
        """End together, once all is done and the group is closed: ranks of other hosts wait for the first rank's word.

        Raises PeerLost when the first rank is lost before: the others are needed again.
        """
        if isinstance(self._board, HostBoard) and (reason := self._board.end_together(stopping)):
            raise PeerLost(reason)

    def close(self) -> None:
        """Leave the process group."""
        if self._watch:
            self._watch.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Self:
        """Return itself: it has joined its group already."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Leave the process group, and speak to ranks of other hosts no more.

        A rank that fails alone leaves a group of NCCL as it is: torch would wait there for the other ranks, which wait
        for this one (`ProcessGroupNCCL::shutdown`), and no reason would be told. They are ended once this process is.
        """
        if error is None or self.device.type != "cuda":
            self.close()
        elif self._watch:
            self._watch.close()
        if isinstance(self._board, HostBoard):
            self._board.close()


def join_world(device_kind: str, *, timeout_s: float, point: RendezvousPoint | None = None) -> World:
    """Join the process group that torchrun and the supervisor describe; without them, be a group of one.

    Ranks of one host meet in a file, which needs no listener, where the environment names a folder for it. Ranks of
    several hosts meet at the `point`. Raises PeerLost, ConfigError as `meet`.
    """
    place = rank_place(os.environ)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if device_kind == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    patience = timedelta(seconds=timeout_s)
    if place.is_spread:
        assert point is not None, "ranks of several hosts need a place to meet"
        met = meet(place, point)
        _init(met.keys("ranks"), place, device, patience)
        board = HostBoard(lambda: met.another("board"), place, lost_s=point.lost_s)
        return World(place.rank, place.size, device, board, addresses=met.addresses, patience=patience)
    if place.size > 1:
        _init(_file_store(place.size, patience), place, device, patience)
    return World(place.rank, place.size, device, _board(place.rank, place.size), patience=patience)


def _init(store: dist.Store | None, place: RankPlace, device: torch.device, patience: timedelta) -> None:
    """Initialise torch.distributed over a `store`; without one torch reads the environment."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if store is None:
        dist.init_process_group(backend, timeout=patience)
    else:
        store.set_timeout(patience)
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=patience)


def _board(rank: int, size: int) -> ProgressBoard | None:
    path = _meeting_file("progress") if size > 1 else None
    return ProgressBoard(path, rank, size) if path else None


def _meeting_file(kind: str) -> Path | None:
    """Return a file that all ranks of this life of the learner share; None where the environment names no folder."""
    folder, life = local_folder(), os.environ.get("TORCHELASTIC_RUN_ID")
    return folder / f"{life}.{kind}" if folder and life else None


def _file_store(size: int, patience: timedelta) -> dist.Store | None:
    path = _meeting_file("ranks")
    if path is None:
        return None
    store = dist.FileStore(str(path), size)
    store.set_timeout(patience)
    return store
