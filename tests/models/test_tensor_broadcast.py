"""Buckets of tensors, cut alike on both sides, and the group that carries them."""

import itertools
import socket
from concurrent.futures import ThreadPoolExecutor

import msgspec
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrl.errors import PeerLost, WeightsError
from mrl.models import tensor_broadcast
from mrl.models.tensor_broadcast import (
    BroadcastGroup,
    IncomingTensors,
    buckets_of,
    join,
    open_store,
    receive_tensors,
    size_bytes,
    views,
)
from mrl.models.tensor_file import digest, nowhere, shape_of
from mrl.records.rollouts import BroadcastRendezvous

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.tensor(7.0),
    "c": torch.arange(5, dtype=torch.bfloat16),
    "d": torch.arange(1000, dtype=torch.int64),
}


def meeting_at(store, *, world_size: int = 2, name: str = "a-0.1-1") -> BroadcastRendezvous:
    return BroadcastRendezvous(
        host="127.0.0.1", port=store.port, name=name, backend="gloo", first_rank=1, world_size=world_size
    )


@given(st.lists(st.tuples(st.sampled_from([torch.float32, torch.bfloat16]), st.integers(1, 40)), max_size=30))
def test_buckets_keep_order_and_type_and_fit_unless_they_are_one(kinds):
    """Nothing lost, nothing mixed; a bucket is closed only when the next tensor would not fit."""
    shapes = [shape_of(f"t{i}", torch.empty(n, dtype=dtype)) for i, (dtype, n) in enumerate(kinds)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_broadcast, "BUCKET_BYTES", 64)
        buckets = buckets_of(shapes)

    assert [shape for bucket in buckets for shape in bucket] == shapes
    assert all(len({shape.dtype for shape in bucket}) == 1 for bucket in buckets)
    assert all(len(bucket) == 1 or size_bytes(bucket) <= 64 for bucket in buckets)
    for bucket, after in itertools.pairwise(buckets):
        assert size_bytes([*bucket, after[0]]) > 64 or bucket[0].dtype != after[0].dtype


def test_views_of_a_bucket_are_its_tensors():
    """Names, types, shapes and values, without a copy."""
    tensors = {"a": TENSORS["a"], "b": TENSORS["b"], "c": torch.tensor([8.0, 9.0])}
    shapes = [shape_of(name, tensor) for name, tensor in tensors.items()]
    flat = torch.zeros(size_bytes(shapes), dtype=torch.uint8)

    for shape, view in views(shapes, flat):
        view.copy_(tensors[shape.name])

    assert torch.equal(flat.view(torch.float32), torch.tensor([0.0, 1, 2, 3, 4, 5, 7, 8, 9]))


def test_every_member_gets_the_bytes_of_the_first():
    """Four ranks on loopback; also the last one, to which another than the first may pass them on."""
    shapes = [shape_of(name, tensor) for name, tensor in TENSORS.items()]
    digests = {name: digest(tensor) for name, tensor in TENSORS.items()}
    store = open_store("127.0.0.1")
    meeting = meeting_at(store, world_size=4)

    def take(rank: int) -> dict[str, torch.Tensor]:
        held: dict[str, torch.Tensor] = {}

        def place(name, dtype, shape):
            held[name] = torch.empty(shape, dtype=dtype)
            return held[name]

        receive_tensors(IncomingTensors(msgspec.structs.replace(meeting, first_rank=rank), shapes, digests), place)
        return held

    with ThreadPoolExecutor(3) as threads:
        taking = [threads.submit(take, rank) for rank in (1, 2, 3)]
        group = BroadcastGroup(store, meeting, 0)
        for bucket in buckets_of(shapes):
            group.send(torch.cat([TENSORS[shape.name].reshape(-1).view(torch.uint8) for shape in bucket]))
        received = [one.result(120) for one in taking]

    for held in received:
        assert all(torch.equal(held[name], tensor) for name, tensor in TENSORS.items())


def test_other_bytes_than_were_published_are_refused():
    """The digest of what came is compared with the manifest's."""
    shape, store = shape_of("a", TENSORS["a"]), open_store("127.0.0.1")
    incoming = IncomingTensors(meeting_at(store), [shape], {"a": digest(TENSORS["a"])})

    with ThreadPoolExecutor(1) as threads:
        taking = threads.submit(receive_tensors, incoming, nowhere)
        BroadcastGroup(store, incoming.meeting, 0).send(torch.zeros(24, dtype=torch.uint8))
        with pytest.raises(WeightsError, match="checksum of a differs"):
            taking.result(120)


def test_a_member_that_leaves_or_falls_silent_is_a_lost_peer(monkeypatch):
    """Before the meeting and in mid-broadcast: a bounded wait, an error with the name of the broadcast."""
    monkeypatch.setattr(tensor_broadcast, "STALL_S", 0.5)
    with monkeypatch.context() as patch:
        patch.setattr(tensor_broadcast, "MEET_S", 0.5)
        store = open_store("127.0.0.1")
        with pytest.raises(PeerLost, match=r"a-0\.1-1"):
            BroadcastGroup(store, meeting_at(store), 0)

    second = open_store("127.0.0.1")
    meeting = meeting_at(second, name="a-0.1-2")
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(join, meeting, 1)
        first = BroadcastGroup(second, meeting, 0)
        member = joining.result(120)
        with pytest.raises(PeerLost, match=r"a-0\.1-2"):
            member.receive(torch.zeros(8, dtype=torch.uint8))
    assert first is not None


def test_a_sender_that_takes_the_connection_and_says_nothing_is_a_lost_peer(monkeypatch):
    """As a learner that stands still: the kernel takes the connection for it."""
    monkeypatch.setattr(tensor_broadcast, "MEET_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        meeting = BroadcastRendezvous(
            host="127.0.0.1", port=port, name="a-0.1-1", backend="gloo", first_rank=1, world_size=2
        )
        with pytest.raises(PeerLost, match=rf"broadcast a-0\.1-1: no sender at 127\.0\.0\.1:{port}"):
            join(meeting, 1)


def test_members_meet_on_loopback_alone():
    """Neither the store nor the group listens anywhere else."""
    store = open_store("127.0.0.1")
    meeting = meeting_at(store)
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(join, meeting, 1)
        groups = [BroadcastGroup(store, meeting, 0), joining.result(120)]
        listening = [one.laddr.ip for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"]

    assert groups
    assert set(listening) == {"127.0.0.1"}
