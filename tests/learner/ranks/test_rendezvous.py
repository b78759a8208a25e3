"""Ranks of several hosts find each other, once for every life; here they are threads on loopback."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import torch
import torch.distributed as dist

from mrl.errors import ConfigError, PeerLost
from mrl.learner.ranks import rendezvous
from mrl.learner.ranks.host_board import OVER
from mrl.learner.ranks.own_address import GLOO, NCCL
from mrl.learner.ranks.rank_place import LEARNER_HOSTS, LEARNER_PLACE, RankPlace, rank_place
from mrl.learner.ranks.rendezvous import LIFE, RankRendezvous, RendezvousPoint, meet
from mrl.learner.ranks.world import World
from mrl.models.tensor_broadcast import open_store
from mrl.transport.endpoints import ADDRESS, publish_endpoint, read_endpoint

HOSTS = ("a", "b")
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all hosts of the test are; what a meeting writes into the environment goes with the test."""
    monkeypatch.setenv(ADDRESS, "127.0.0.1")
    for name in (GLOO, NCCL):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def point(folder: Path, bound_s: float = PATIENCE_S) -> RendezvousPoint:
    return RendezvousPoint(folder, "ranks-qwen", bound_s, lost_s=5.0)


def comes(threads: ThreadPoolExecutor, folder: Path, host: int) -> Future[RankRendezvous]:
    """The one rank of a host."""
    return threads.submit(meet, RankPlace(host=host, hosts=HOSTS), point(folder))


def test_a_rank_is_numbered_over_all_hosts() -> None:
    """Three ranks on each of two hosts; without a word of hosts it is what torchrun says."""
    told = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", LEARNER_HOSTS: "a,b", LEARNER_PLACE: "1"}
    place = rank_place(told)
    assert (place.rank, place.size, place.is_spread) == (4, 6, True)
    assert [place.told(rank) for rank in (2, 3)] == ["rank 2 on host a", "rank 3 on host b"]
    alone = rank_place({"RANK": "1", "WORLD_SIZE": "2"})
    assert (alone.rank, alone.size, alone.is_spread, alone.told(1)) == (1, 2, False, "rank 1")
    assert (rank_place({}).rank, rank_place({}).size) == (0, 1)


def test_ranks_of_two_hosts_meet_at_a_port_of_the_first_ones_address(
    threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """Whoever comes first; what one writes there the other reads, and nothing listens beyond that address."""
    second, first = comes(threads, tmp_path, 1), comes(threads, tmp_path, 0)
    first.result().keys("room").set("word", "heard")
    assert second.result().keys("room").get("word") == b"heard"
    assert first.result().life == second.result().life
    assert first.result().addresses == {"a": "127.0.0.1", "b": "127.0.0.1"}
    address = read_endpoint(tmp_path, "ranks-qwen")
    listening = {one.laddr for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    assert ("127.0.0.1", int(str(address).rpartition(":")[2])) in listening


def test_a_rank_of_a_later_life_ends_the_one_before_and_joins_the_next(
    threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """It finds the store of that life, whose first rank has not noticed anything yet, and its seat taken."""
    old = comes(threads, tmp_path, 0), comes(threads, tmp_path, 1)
    before = old[0].result()
    again = comes(threads, tmp_path, 1)
    before.keys("board").wait([OVER])
    assert before.keys("board").get(OVER) == b"rank 1 on host b was restarted"
    assert not again.done()
    after = comes(threads, tmp_path, 0)
    assert again.result().life == after.result().life != before.life


def test_who_does_not_come_is_named_with_the_host(tmp_path: Path) -> None:
    """Of two ranks on host b none is there; and a rank there that finds no first one says so."""
    place = RankPlace(local_size=1, hosts=HOSTS)
    with pytest.raises(
        PeerLost, match=r"ranks-qwen did not connect at tcp://127.0.0.1:\d+ .*: rank 1 on host b missing"
    ):
        meet(place, point(tmp_path, 0.3))
    with pytest.raises(PeerLost, match="rank 0 on host a has not published its address"):
        meet(RankPlace(host=1, hosts=HOSTS), point(tmp_path / "other", 0.3))


def test_who_did_not_come_is_named_also_by_ranks_that_the_first_one_left(
    threads: ThreadPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its store goes with it, and the others look for another until their own time is up."""
    has_looked = Event()
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda for_s: (has_looked.set(), time.sleep(for_s)))
    monkeypatch.setattr(rendezvous, "time", clock)
    monkeypatch.setattr(rendezvous, "STORE_S", 1.0)
    store = open_store("127.0.0.1")
    store.set(LIFE, "first")
    dist.PrefixStore("first/seats", store).set("guest/0", "{}")
    publish_endpoint(tmp_path, "ranks-qwen", f"tcp://127.0.0.1:{store.port}")
    second = threads.submit(meet, RankPlace(host=1, hosts=("a", "b", "c")), point(tmp_path, bound_s=10.0))
    assert has_looked.wait(PATIENCE_S)
    del store
    with pytest.raises(PeerLost, match="within 10 s: rank 2 on host c did not connect before rank 0 on host a left"):
        second.result()


def test_other_versions_of_torch_are_told_of_with_both(threads: ThreadPoolExecutor, tmp_path: Path) -> None:
    """The person has to look at the environments of the two hosts."""
    first = comes(threads, tmp_path, 0)
    while not (found := rendezvous._find(point(tmp_path))):
        assert not first.done()
    guest = msgspec.json.encode({"host": "b", "address": "127.0.0.1", "torch": "1.0"}).decode()
    found.keys("seats").set("guest/1", guest)
    with pytest.raises(ConfigError, match=f"got '{torch.__version__} on host a, 1.0 on host b'".replace("+", r"\+")):
        first.result()


def test_a_collective_that_fails_names_the_host_that_it_lacks() -> None:
    """gloo tells of addresses alone; what else goes wrong stays what it is."""
    world = World(0, 2, torch.device("cpu"), addresses={"a": "10.0.0.1", "b": "10.0.0.12"})
    line = r"^a rank on host b is gone: \[pair\.cc:5\] Connection closed by peer \[10\.0"
    with pytest.raises(PeerLost, match=line), world.naming_hosts():
        raise RuntimeError("[pair.cc:5] Connection closed by peer [10.0.0.12]:5. This is typically")
    with pytest.raises(RuntimeError, match="shapes"), world.naming_hosts():
        raise RuntimeError("shapes differ")


def test_a_first_rank_that_takes_the_connection_and_says_nothing_costs_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that stands still: the kernel takes the connection for it."""
    monkeypatch.setattr(rendezvous, "STORE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        publish_endpoint(tmp_path, "ranks-qwen", f"tcp://127.0.0.1:{port}")
        with pytest.raises(PeerLost, match=rf"within 1 s: no answer from 127\.0\.0\.1:{port} within 0\.3 s"):
            meet(RankPlace(host=1, hosts=HOSTS), point(tmp_path, bound_s=1.0))
