"""Broadcast of weights over a process group that lives for one update: rank 0 sends, all others receive the same bytes.

Tensors travel in buckets: consecutive tensors of one type, their bytes end to end. Sender and receivers cut the same
list into the same buckets. Every wait of a member has a bound, so a member that dies or stops costs the others that
time and the group; it never hangs them. The group is apart from torch's default group: a process may be in both.

The names of the keys by which members find each other are those of `torch.distributed.new_group`, so that an inference
server that makes its group from torch's own functions can be a member (SGLang's `/init_weights_update_group`). The NCCL
path is written from torch's documentation and has not run.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.errors import PeerLost
from mrl.models.tensor_file import TYPES, Place, TensorShape, check_digests, copy_tensor, digest
from mrl.records.rollouts import BroadcastRendezvous
from mrl.transport.endpoints import own_host

T = TypeVar("T")
BUCKET_BYTES = 16 * 1024 * 1024
MEET_S = 20.0
"""Longest wait in seconds until all members have met."""
STALL_S = 20.0
"""Longest wait in seconds for one bucket."""
CPU = torch.device("cpu")
BLOCKING_NCCL = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""Without these torch ends the process when an operation of NCCL takes too long."""


def in_buckets(items: Iterable[T], shape_of_item: Callable[[T], TensorShape]) -> Iterator[list[T]]:
    """Yield buckets of consecutive tensors of one type: at most BUCKET_BYTES together, or one tensor alone. Takes the
    items one by one.
    """
    bucket: list[T] = []
    filled_bytes, dtype = 0, ""
    for item in items:
        shape = shape_of_item(item)
        if bucket and (shape.dtype != dtype or filled_bytes + shape.num_bytes > BUCKET_BYTES):
            yield bucket
            bucket, filled_bytes = [], 0
        bucket.append(item)
        filled_bytes, dtype = filled_bytes + shape.num_bytes, shape.dtype
    if bucket:
        yield bucket


def buckets_of(tensors: Sequence[TensorShape]) -> list[list[TensorShape]]:
    """Return the buckets in which these tensors travel."""
    return list(in_buckets(tensors, lambda tensor: tensor))


def size_bytes(bucket: Sequence[TensorShape]) -> int:
    """Return the bytes of all tensors of a bucket."""
    return sum(tensor.num_bytes for tensor in bucket)


def views(bucket: Sequence[TensorShape], flat: Tensor) -> Iterator[tuple[TensorShape, Tensor]]:
    """Yield the tensors of a bucket as views of its bytes."""
    start = 0
    for tensor in bucket:
        part = flat[start : start + tensor.num_bytes]
        yield tensor, part.view(TYPES[tensor.dtype]).view(tensor.shape)
        start += tensor.num_bytes


@dataclass(frozen=True, slots=True)
class BroadcastRanks:
    """Ranks that one engine takes in a broadcast."""

    num_ranks: int
    gpu: str = ""
    """Unique id of the GPU, where the engine has a single rank that could use NCCL; else empty."""
    nccl: str = ""
    """NCCL version of that rank's process."""


@dataclass(frozen=True, slots=True)
class IncomingTensors:
    """A version that is about to be broadcast: where its ranks meet, its tensors and their digests."""

    meeting: BroadcastRendezvous
    tensors: Sequence[TensorShape]
    digests: Mapping[str, str]
    """Name of a tensor -> its `mrl.models.tensor_file.digest`."""


class BroadcastGroup:
    """One member's end of a broadcast's process group; all members have met once it is made."""

    def __init__(
        self, store: dist.Store, meeting: BroadcastRendezvous, rank: int, *, device: torch.device = CPU
    ) -> None:
        """Wait for all members; NCCL works on this `device`. Raises PeerLost when not all members are there in time."""
        self._what = f"broadcast {meeting.name}"
        with self._bounded():
            keys = dist.PrefixStore(meeting.name, store)
            if meeting.backend == "nccl":
                self._device = device
                torch.cuda.set_device(device)  # of this thread
                self._group: Any = _nccl(_named(keys, meeting.name, "cuda"), rank, meeting.world_size)
            else:
                self._device = CPU
                self._group = _gloo(_named(keys, meeting.name, "cpu"), rank, meeting)

    def send(self, flat: Tensor) -> None:
        """Send bytes of the CPU to all other members. Raises PeerLost."""
        with self._bounded():
            self._group.broadcast([flat.to(self._device)], _from_first()).wait()

    def receive(self, flat: Tensor) -> None:
        """Fill `flat`, bytes of the CPU, with the bytes that rank 0 sends. Raises PeerLost."""
        with self._bounded():
            arrived = flat.to(self._device)
            self._group.broadcast([arrived], _from_first()).wait()
            if arrived is not flat:
                flat.copy_(arrived)

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # torch has no error class for a member that is gone or late
            raise PeerLost(f"{self._what}: {' '.join(str(error).split())[:300]}") from error


def numbered(device: str) -> torch.device:
    """Return a device with its number; "cuda" becomes the calling thread's current GPU."""
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)


def gpu_id(device: torch.device) -> str:
    """Return the unique id of a GPU, empty for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def nccl_version(device: torch.device) -> str:
    """Return the NCCL version of this process, such as "2.30.7"; empty for the CPU."""
    return ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else ""


def open_store(host: str) -> dist.TCPStore:
    """Open the store by which members find each other, on a free port of `host`. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listening:  # torch itself would listen on all addresses
        port = listening.getsockname()[1]
        patience = timedelta(seconds=MEET_S)
        store = dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=patience, master_listen_fd=listening.fileno()
        )
        listening.detach()
        return store


def store_at(host: str, port: int, *, patience_s: float) -> dist.TCPStore:
    """Connect to the store that another process has opened; `patience_s` bounds this, and later waits for keys.

    Raises RuntimeError. Where the other process stands still, its kernel takes the connection, and torch would wait for
    its first answer without end. So a thread of its own waits, and is left behind.
    """
    connected: Future[dist.TCPStore] = Future()
    patience = timedelta(seconds=patience_s)

    def connect() -> None:
        try:
            connected.set_result(dist.TCPStore(host, port, is_master=False, timeout=patience, wait_for_workers=False))
        except RuntimeError as error:
            connected.set_exception(error)

    threading.Thread(target=connect, name="store", daemon=True).start()
    try:
        return connected.result(patience_s)
    except TimeoutError:
        raise RuntimeError(f"no answer from {host}:{port} within {patience_s:g} s") from None


def file_store(path: Path) -> dist.FileStore:
    """Open the store by which members on one host find each other: a file in a folder that only their user can read. A
    port would be open to every user.

    Raises RuntimeError when it cannot be made.
    """
    store = dist.FileStore(str(path))
    store.set_timeout(timedelta(seconds=MEET_S))
    return store


def join(meeting: BroadcastRendezvous, rank: int, *, device: torch.device = CPU) -> BroadcastGroup:
    """Join a broadcast as a receiver. Raises PeerLost."""
    try:
        if meeting.file:
            store: dist.Store = file_store(Path(meeting.file))
        else:
            store = store_at(meeting.host, meeting.port, patience_s=MEET_S)
    except RuntimeError as error:
        raise PeerLost(
            f"broadcast {meeting.name}: no sender at {meeting.file or f'{meeting.host}:{meeting.port}'}"
        ) from error
    return BroadcastGroup(store, meeting, rank, device=device)


def receive_tensors(incoming: IncomingTensors, place: Place, *, device: torch.device = CPU) -> dict[str, str]:
    """Receive a version into its places, by NCCL over `device`; return name -> digest of the tensors that came.

    Raises PeerLost when the group comes apart, WeightsError when other tensors came than were published. In both cases
    some places have been written to.
    """
    found: dict[str, str] = {}
    for tensor, view in _arriving(incoming, device):
        target = place(tensor.name, TYPES[tensor.dtype], tensor.shape)
        found[tensor.name] = digest(view) if target is None else copy_tensor(view, target)
    check_digests(found, incoming.digests, where=incoming.meeting.name)
    return found


def receive_each(incoming: IncomingTensors) -> Iterator[tuple[str, Tensor, str]]:
    """Yield (name, value, digest) of each tensor; a value lasts until the next. Raises PeerLost, WeightsError."""
    found: dict[str, str] = {}
    for tensor, view in _arriving(incoming, CPU):
        found[tensor.name] = digest(view)
        yield tensor.name, view, found[tensor.name]
    check_digests(found, incoming.digests, where=incoming.meeting.name)


def _arriving(incoming: IncomingTensors, device: torch.device) -> Iterator[tuple[TensorShape, Tensor]]:
    """Yield tensors as they arrive, as views of a buffer that the next bucket overwrites."""
    group = join(incoming.meeting, incoming.meeting.first_rank, device=device)
    buffer = torch.empty(0, dtype=torch.uint8)
    for bucket in buckets_of(incoming.tensors):
        if size_bytes(bucket) > len(buffer):
            buffer = torch.empty(size_bytes(bucket), dtype=torch.uint8)
        arrived = buffer[: size_bytes(bucket)]
        group.receive(arrived)
        yield from views(bucket, arrived)


def _named(keys: dist.Store, name: str, device: str) -> dist.Store:
    return dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{name}/", keys))


def _gloo(store: dist.Store, rank: int, meeting: BroadcastRendezvous) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=STALL_S)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_host(meeting.host))]
    return dist.ProcessGroupGloo(store, rank, meeting.world_size, options)


def _nccl(store: dist.Store, rank: int, world_size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=STALL_S)
    before = {name: os.environ.get(name) for name in BLOCKING_NCCL}
    os.environ.update(BLOCKING_NCCL)  # read when the group is made; other groups of the process keep theirs
    try:
        return dist.ProcessGroupNCCL(store, rank, world_size, options)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _from_first() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return options
