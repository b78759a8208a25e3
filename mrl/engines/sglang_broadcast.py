"""A broadcast into an SGLang server (routes of 0.5.23), bucket by bucket, and its check by this process.

Seen on SGLang 0.5.23 on a CPU with gloo: each process of the server is a rank; a call receives one bucket and loads it
at once. SGLang itself would wait for half an hour in a group that has come apart. So a call without an answer means a
lost server; an answer with an error means that no weights, or only some, were changed.
"""

from mrl.engines.http import Http, HttpFailure
from mrl.engines.server_backend import HalfUpdated
from mrl.engines.tensor_folder import TensorSums, served_name
from mrl.errors import PeerLost
from mrl.models.tensor_broadcast import MEET_S, STALL_S, IncomingTensors, buckets_of, receive_each
from mrl.models.tensor_file import TYPES
from mrl.records.rollouts import BroadcastRendezvous

MARGIN_S = 10.0
"""Seconds of a call for its work beside waiting for other members."""


async def meet(http: Http, meeting: BroadcastRendezvous) -> None:
    """Let the server's processes join the group of the broadcast. Raises PeerLost, HttpFailure."""
    body = {
        "master_address": meeting.host,
        "master_port": meeting.port,
        "rank_offset": meeting.first_rank + 1,
        "world_size": meeting.world_size,
        "group_name": meeting.name,
        "backend": f"cpu:{meeting.backend}",  # with the plain name torch would make, and await, a group for GPUs, too
    }
    try:
        await http.post("/init_weights_update_group", body, within_s=MEET_S + MARGIN_S)
        await http.post("/begin_weight_update", {})
    except HttpFailure as failure:
        if not failure.status:
            raise
        raise PeerLost(f"broadcast {meeting.name}: {failure}") from failure


async def load(http: Http, incoming: IncomingTensors, label: str) -> None:
    """Let the server receive and load all buckets; the version is named `label` with the last bucket.

    Raises HalfUpdated, HttpFailure.
    """
    buckets = buckets_of(incoming.tensors)
    try:
        for number, bucket in enumerate(buckets, 1):
            body = {
                "names": [tensor.name for tensor in bucket],
                "dtypes": [str(TYPES[tensor.dtype]).removeprefix("torch.") for tensor in bucket],
                "shapes": [tensor.shape for tensor in bucket],
                "group_name": incoming.meeting.name,
                "load_format": "flattened_bucket",
                "flush_cache": number == len(buckets),
            }
            body |= {"weight_version": label} if number == len(buckets) else {}
            await http.post("/update_weights_from_distributed", body, within_s=STALL_S + MARGIN_S)
        await http.post("/end_weight_update", {})
    except HttpFailure as failure:
        if not failure.status:
            raise
        raise HalfUpdated(f"broadcast {incoming.meeting.name}: {failure}") from failure


async def leave(http: Http, name: str) -> None:
    """Let the server leave the group of a broadcast. Raises HttpFailure."""
    await http.post("/destroy_weights_update_group", {"group_name": name})


async def give_up(http: Http, name: str) -> None:
    """End an update and leave the group, as far as the server has begun them. Raises HttpFailure where it is silent."""
    for route, body in (("/end_weight_update", {}), ("/destroy_weights_update_group", {"group_name": name})):
        try:
            await http.post(route, body)
        except HttpFailure as failure:
            if not failure.status:
                raise


def witness_broadcast(incoming: IncomingTensors, dtype: str) -> TensorSums:
    """Receive the broadcast in this process as well, a bucket at a time, and check its digests.

    Return the hashes that the server, which computes in `dtype`, has to report. Raises PeerLost, WeightsError.
    """
    sums = TensorSums(dtype)
    for name, tensor, its_digest in receive_each(incoming):
        sums.add(served_name(name), name, tensor, its_digest)
    return sums
