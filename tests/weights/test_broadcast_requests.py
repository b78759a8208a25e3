"""Who meets whom: the core of the broadcasts, by its own clock."""

from typing import Any

from msgspec import structs

from mrl.records.rollouts import BroadcastRendezvous, WeightsRequest
from mrl.records.version import Version
from mrl.weights.broadcast_requests import (
    WINDOW_S,
    BroadcastRequests,
    DueAnswers,
    WaitingWorker,
    backend_of,
    other_nccl,
)

V1, V2 = Version(0, 1), Version(0, 2)
MEETING = BroadcastRendezvous(host="h", port=1, name="m", backend="gloo", first_rank=1, world_size=2)


def request(
    worker: str, *, attempt: int = 1, version: Version = V1, num_ranks: int = 1, gpu: str = ""
) -> WeightsRequest:
    return WeightsRequest(worker=worker, version=version, attempt=attempt, num_ranks=num_ranks, gpu=gpu)


def due(requests: BroadcastRequests, now_s: float, **options: Any) -> DueAnswers:
    chosen: dict[str, Any] = {"newest": V1, "num_workers": 2, "can_send": True, "has_files": False, **options}
    return requests.due(chosen.pop("newest"), now_s, **chosen)


def workers(asking: list[WaitingWorker]) -> list[str]:
    return [one.request.worker for one in asking]


def test_a_broadcast_begins_when_all_have_asked_and_no_later_than_its_window():
    """Two of two: at once. One of two: after the window. Each is answered once."""
    requests = BroadcastRequests()
    requests.ask(b"a", request("a"), 0.0)
    assert due(requests, 0.5 * WINDOW_S).party == []
    requests.ask(b"b", request("b"), 0.5 * WINDOW_S)

    assert workers(due(requests, 0.5 * WINDOW_S).party) == ["a", "b"]
    assert due(requests, 9.0) == DueAnswers([], [], [], [])
    requests.ask(b"a", request("a", attempt=2), 10.0)
    assert due(requests, 10.0 + 0.9 * WINDOW_S).party == []
    assert workers(due(requests, 10.0 + 1.1 * WINDOW_S).party) == ["a"]


def test_who_asks_while_another_broadcast_goes_on_joins_the_next_one():
    """Nobody is answered while the sender is at work; then all at once."""
    requests = BroadcastRequests()
    for index in range(3):
        requests.ask(b"", request(f"w{index}"), float(index))

    assert due(requests, 5.0, can_send=False, num_workers=5).party == []
    assert workers(due(requests, 5.0, num_workers=5).party) == ["w0", "w1", "w2"]


def test_repetitions_change_nothing():
    """A repeated request keeps its place; a new attempt is a new request."""
    requests = BroadcastRequests()
    requests.ask(b"a", request("a"), 0.0)
    requests.ask(b"a", request("a"), 0.09)
    assert workers(due(requests, WINDOW_S).party) == ["a"]

    requests.ask(b"a", request("a", attempt=2), 10.0)
    assert due(requests, 10.0 + 0.9 * WINDOW_S).party == []
    assert workers(due(requests, 11.0).party) == ["a"]


def test_who_asks_again_although_it_was_invited_is_told_the_same_place():
    """Whether the answer was lost or only crossed the question: it begins no other broadcast. Also between versions."""
    requests = BroadcastRequests()
    requests.ask(b"a", request("a"), 0.0)
    (asking,) = due(requests, 1.0).party
    requests.invite(asking, MEETING)
    assert due(requests, 2.0) == DueAnswers([], [], [], [])

    for newest, later in ((V1, b"b"), (None, b"c")):
        requests.ask(later, request("a"), 3.0)
        found = due(requests, 9.0, newest=newest)
        assert [(one.client, meeting) for one, meeting in found.invited] == [(later, MEETING)]
        assert found.party == []
        assert due(requests, 9.0) == DueAnswers([], [], [], [])

    requests.ask(b"a", request("a", attempt=2), 10.0)
    found = due(requests, 11.0)
    assert (workers(found.party), found.invited) == (["a"], [])


def test_who_asks_for_an_older_version_is_told_and_nobody_is_answered_while_one_is_written():
    """Without a newest version requests wait; with another one they are outdated."""
    requests = BroadcastRequests()
    requests.ask(b"a", request("a"), 0.0)
    requests.ask(b"b", request("b", version=V2), 0.0)

    assert due(requests, 9.0, newest=None) == DueAnswers([], [], [], [])
    found = due(requests, 9.0, newest=V2)

    assert (workers(found.outdated), workers(found.party)) == (["a"], ["b"])


def test_readers_wait_for_the_files_and_for_nothing_else():
    """They are no members of a broadcast, and are answered while one goes on, once the files are there."""
    requests = BroadcastRequests()
    requests.ask(b"a", request("a", num_ranks=0), 0.0)
    requests.ask(b"b", request("b", num_ranks=2), 0.0)

    assert requests.wants_files(V1)
    assert not requests.wants_files(V2)
    assert due(requests, 9.0, can_send=False) == DueAnswers([], [], [], [])
    assert workers(due(requests, 9.0, can_send=False, has_files=True).readers) == ["a"]
    assert workers(due(requests, 9.0).party) == ["b"]
    assert not requests.wants_files(V1)


def test_nccl_needs_a_gpu_for_every_member_and_one_version():
    """On a processor, with two members on one GPU, or with another NCCL beside one of them, it is gloo."""

    def party(*gpus: str, nccl: str = "2.30.7") -> list[WaitingWorker]:
        asked = [request(f"w{index}", gpu=gpu) for index, gpu in enumerate(gpus)]
        return [WaitingWorker(b"", structs.replace(one, nccl=nccl if one.gpu else ""), 0.0) for one in asked]

    own = "g0", "2.30.7"
    assert backend_of(party("g1", "g2"), *own) == "nccl"
    assert backend_of(party("g1", ""), *own) == "gloo"
    assert backend_of(party("g1", "g0"), *own) == "gloo"
    assert backend_of(party("g1"), "", "") == "gloo"
    others = party("g1") + party("g2", nccl="2.29.1")
    assert (backend_of(others, *own), other_nccl(others, *own)) == ("gloo", {"2.29.1"})
    assert other_nccl(party("g1", ""), *own) == other_nccl(party("g1", nccl="2.29.1"), "", "") == set()
    for gpus in (("g1", ""), ("g1", "g0"), ("g1", "g1")):  # it goes by gloo anyway
        assert other_nccl(party(*gpus, nccl="2.29.1"), *own) == set()
