"""What takes a broadcast inside an engine that has no mrl, against the sender that learners have."""

import importlib.util
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.engines import vllm_calls
from mrl.engines.vllm_calls import seat_of
from mrl.models import tensor_broadcast
from mrl.models.tensor_broadcast import BroadcastGroup, IncomingTensors, buckets_of, file_store
from mrl.models.tensor_file import digest, shape_of
from mrl.records.rollouts import BroadcastRendezvous
from tests.support.engine_rig import Sender

FILE = Path(__file__).parents[2] / "mrl" / "engines" / "inside" / "broadcast_member.py"
TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.tensor(7.0),
    "c": torch.arange(5, dtype=torch.bfloat16),
    "d": torch.arange(1000, dtype=torch.int64),
    "e": torch.empty(0, 3),
}


@pytest.fixture(scope="module")
def member():
    """The module as the engine imports it: by its file alone."""
    spec = importlib.util.spec_from_file_location("broadcast_member", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def learner(digests: dict[str, str] | None = None) -> Sender:
    """Rank 0, who waits for one member."""
    return Sender(TENSORS, 1, name="a-0.1-1", digests=digests)


def seat(sender: Sender) -> dict[str, Any]:
    """What the member is told."""
    return json.loads(seat_of(sender.incoming))


def test_every_tensor_arrives_in_memory_of_its_own(member):
    """Of every type and shape; vLLM's loader is watched by where a tensor's memory begins."""
    sender = learner()

    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(sender.send)
        received = member.receive(seat(sender))
        assert sending.result(120)

    assert list(received) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor)
        assert member.digest(tensor) == digest(tensor)
    filled = [tensor.untyped_storage().data_ptr() for tensor in received.values() if tensor.numel()]
    assert len(set(filled)) == len(filled)


def test_members_on_one_host_meet_in_a_file(member, tmp_path):
    """Where the learner's end opens it, too."""
    meeting = BroadcastRendezvous(
        host="127.0.0.1", port=0, file=str(tmp_path / "m"), name="m", backend="gloo", first_rank=1, world_size=2
    )
    shapes = [shape_of(name, tensor) for name, tensor in TENSORS.items()]
    incoming = IncomingTensors(meeting, shapes, {name: digest(tensor) for name, tensor in TENSORS.items()})

    def send() -> BroadcastGroup:
        group = BroadcastGroup(file_store(tmp_path / "m"), meeting, 0)
        for bucket in buckets_of(shapes):
            flat = [TENSORS[one.name].reshape(-1).view(torch.uint8) for one in bucket]
            group.send(torch.cat(flat))
        return group

    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(send)
        received = member.receive(json.loads(seat_of(incoming)))
        assert sending.result(120)

    assert {name: digest(tensor) for name, tensor in received.items()} == incoming.digests


def test_other_bytes_than_were_published_are_named(member):
    """A digest that differs, and one that was not published."""
    digests = {name: digest(tensor) for name, tensor in TENSORS.items()} | {"c": "0" * 32}
    del digests["d"]
    sender = learner(digests)

    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(sender.send)
        with pytest.raises(ValueError, match=r"published ones: c, d$"):
            member.receive(seat(sender))
        assert sending.result(120)


def test_nobody_there_and_a_sender_that_goes_cost_a_bounded_time(member, monkeypatch):
    """The bounds are those of the learner's own members."""
    monkeypatch.setattr(vllm_calls, "MEET_S", 1.0)
    monkeypatch.setattr(vllm_calls, "STALL_S", 1.0)
    monkeypatch.setattr(tensor_broadcast, "BUCKET_BYTES", 16)
    with pytest.raises(ConnectionError):
        member.receive(seat(learner()))

    sender = learner()
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(sender.send, buckets=2)
        with pytest.raises(ConnectionError):
            member.receive(seat(sender))
        assert sending.result(120)


def test_a_sender_that_takes_the_connection_and_says_nothing_costs_a_bounded_time(member):
    """As a learner that stands still: the kernel takes the connection for it."""
    told = seat(learner())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ConnectionError, match=rf"no answer from 127\.0\.0\.1:{port} within 0\.5 s"):
            member.receive(told | {"host": "127.0.0.1", "port": port, "file": "", "meet_s": 0.5})
