"""A member of a broadcast of weights in an engine's own environment, where mrl is not installed.

The other end is `mrl.models.tensor_broadcast`; names of keys in the store and the order of bytes are the same here.
"""

import threading
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import xxhash


def receive(seat: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Receive all tensors of a broadcast, each in memory of its own.

    `seat` is made by `mrl.engines.vllm_calls.seat_of`. Raises ConnectionError when the members do not meet or a member
    is gone or late, ValueError when other bytes came than were published, RuntimeError for want of memory.
    """
    buckets = [
        {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in bucket}
        for bucket in seat["buckets"]
    ]
    buffer = torch.empty(max(map(_num_bytes, buckets), default=0), dtype=torch.uint8)
    try:
        group = _join(seat)
        for bucket in buckets:
            _fill(group, bucket, buffer[: _num_bytes(bucket)])
    except RuntimeError as error:  # torch has no kind of its own for a member that is gone or late
        raise ConnectionError(" ".join(str(error).split())[:300]) from error
    tensors = {name: tensor for bucket in buckets for name, tensor in bucket.items()}
    wrong = [name for name, tensor in tensors.items() if digest(tensor) != seat["digests"].get(name)]
    if wrong:
        raise ValueError(f"checksums of received weights differ from the published ones: {', '.join(wrong[:5])}")
    return tensors


def digest(tensor: torch.Tensor) -> str:
    """XXH3-128 of the bytes of a tensor on the CPU in row-major order, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _join(seat: dict[str, Any]) -> Any:
    patience = timedelta(seconds=seat["meet_s"])
    if seat["file"]:
        store: dist.Store = dist.FileStore(seat["file"])
        store.set_timeout(patience)
    else:
        store = _store_at(seat["host"], seat["port"], patience)
    for prefix in (seat["name"], f"{seat['name']}/", "cpu/"):
        store = dist.PrefixStore(prefix, store)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=seat["stall_s"])
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=seat["own_host"])]
    return dist.ProcessGroupGloo(store, seat["rank"], seat["world_size"], options)


def _store_at(host: str, port: int, patience: timedelta) -> dist.Store:
    """Connect to the learner's store. Raises RuntimeError.

    Where the learner stands still, its kernel takes the connection, and torch would wait for its first answer without
    end. So a thread of its own waits, and is left behind.
    """
    connected: Future[dist.TCPStore] = Future()

    def connect() -> None:
        try:
            connected.set_result(dist.TCPStore(host, port, is_master=False, timeout=patience))
        except RuntimeError as error:
            connected.set_exception(error)

    threading.Thread(target=connect, name="store", daemon=True).start()
    try:
        return connected.result(patience.total_seconds())
    except TimeoutError:
        raise RuntimeError(f"no answer from {host}:{port} within {patience.total_seconds():g} s") from None


def _fill(group: Any, bucket: dict[str, torch.Tensor], flat: torch.Tensor) -> None:
    """Receive the bytes of a bucket from rank 0 into `flat`, and copy them into its tensors."""
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([flat], options).wait()
    parts = flat.split([tensor.nbytes for tensor in bucket.values()])
    for tensor, part in zip(bucket.values(), parts, strict=True):
        tensor.reshape(-1).view(torch.uint8).copy_(part)


def _num_bytes(bucket: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in bucket.values())
