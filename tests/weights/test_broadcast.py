"""The learner's end of broadcasts: what it does in which order, and what is left when a place to meet cannot be had."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mrl.errors import RoleFailed
from mrl.models.parameters import named_weights, plain_sources
from mrl.models.tensor_broadcast import IncomingTensors, receive_each
from mrl.models.tensor_file import digest, read_folder
from mrl.records.rollouts import WeightsNotice, WeightsRequest, WeightsRoute
from mrl.records.version import Version
from mrl.transport.endpoints import ADDRESS
from mrl.weights import broadcast
from mrl.weights.broadcast import BroadcastPublisher
from mrl.weights.canary import canary_sequences, make_canary
from mrl.weights.manifest import read_manifest
from mrl.weights.publish import Publisher

CANARY = canary_sequences(64)


class Learner:
    """A publisher with one version, and the words of workers."""

    def __init__(self, folder: Path, model, *, meets_in: Path | None = None, host: str = "127.0.0.1") -> None:
        self.files = Publisher(folder, "a")
        self.publisher = BroadcastPublisher(self.files, host=host, meets_in=meets_in)
        self.model = model

    def publish(self, step: int) -> WeightsNotice:
        version = Version(0, step)
        path = self.publisher.publish_weights(
            named_weights(self.model).items(), version, make_canary(self.model, CANARY)
        )
        self.notice = WeightsNotice(version=version, manifest_path=str(path))
        return self.notice

    def ask(self, worker: str, *, num_ranks: int, attempt: int = 1) -> None:
        request = WeightsRequest(worker=worker, version=self.notice.version, attempt=attempt, num_ranks=num_ranks)
        self.publisher.ask(worker.encode(), request)

    def answers(self, count: int) -> dict[bytes, WeightsRoute]:
        """As many answers, in the order in which they come."""
        found: dict[bytes, WeightsRoute] = {}
        deadline_s = time.monotonic() + 120.0
        while len(found) < count:
            assert time.monotonic() < deadline_s, f"{len(found)} of {count} answers came"
            found |= dict(self.publisher.answers(self.notice, num_workers=1))
        return found

    def receive(self, route: WeightsRoute) -> dict[str, str]:
        """Take part in the broadcast; name -> digest of what came."""
        manifest = read_manifest(Path(self.notice.manifest_path))
        assert route.meeting is not None
        incoming = IncomingTensors(route.meeting, manifest.broadcast, manifest.tensors)
        return {name: its_digest for name, _, its_digest in receive_each(incoming)}


@pytest.fixture
def learner(tiny_model, tmp_path) -> Iterator[Learner]:
    """It has published one version."""
    made = Learner(tmp_path, tiny_model(seed=1))
    made.publish(1)
    yield made
    made.publisher.close()


def published(learner: Learner) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in named_weights(learner.model).items()}


def test_a_meeting_does_not_wait_for_files_that_are_written(learner, monkeypatch):
    """Those who meet have a bound; whoever reads has asked at the same moment, and reads afterwards."""
    received, write = threading.Event(), learner.files.publish_weights

    def late(*arguments) -> Path:
        assert received.wait(120.0), "the files came first"
        return write(*arguments)

    monkeypatch.setattr(learner.files, "publish_weights", late)
    learner.ask("reads", num_ranks=0)
    learner.ask("meets", num_ranks=1)

    assert learner.receive(learner.answers(1)[b"meets"]) == published(learner)
    received.set()
    assert Path(learner.answers(1)[b"reads"].folder).is_file()


def test_on_one_host_members_meet_in_a_file_and_no_store_listens(tiny_model, tmp_path, monkeypatch):
    """Version after version, in a folder of their user alone; nothing stays in it."""
    monkeypatch.setattr(broadcast, "open_store", lambda host: pytest.fail("a store at a port"))
    (tmp_path / "private").mkdir(mode=0o700)
    learner = Learner(tmp_path, tiny_model(seed=1), meets_in=tmp_path / "private")
    try:
        for step in (1, 2):
            learner.publish(step)
            learner.ask("meets", num_ranks=1, attempt=step)
            route = learner.answers(1)[b"meets"]
            assert route.meeting is not None
            assert (Path(route.meeting.file).parent, route.meeting.port) == (tmp_path / "private", 0)
            assert learner.receive(route) == published(learner)
    finally:
        learner.publisher.close()
    assert list((tmp_path / "private").iterdir()) == []


def test_over_hosts_members_meet_at_one_address_and_not_at_all_of_them(tiny_model, tmp_path, monkeypatch):
    """At this host's own, by which the others reach it."""
    opened, open_store = [], broadcast.open_store
    monkeypatch.setenv(ADDRESS, "127.0.0.1")
    monkeypatch.setattr(broadcast, "open_store", lambda host: open_store(opened.append(host) or host))
    learner = Learner(tmp_path, tiny_model(seed=1), host="0.0.0.0")
    try:
        learner.publish(1)
        learner.ask("meets", num_ranks=1)
        route = learner.answers(1)[b"meets"]
        assert route.meeting is not None
        assert ([route.meeting.host], learner.receive(route)) == (opened, published(learner))
    finally:
        learner.publisher.close()
    assert opened == ["127.0.0.1"]


def test_nobody_is_invited_while_files_are_written(learner, monkeypatch):
    """A meeting would begin only behind them."""
    written, write, begun = threading.Event(), learner.files.publish_weights, threading.Event()

    def slow(*arguments) -> Path:
        begun.set()
        assert written.wait(120.0)
        return write(*arguments)

    monkeypatch.setattr(learner.files, "publish_weights", slow)
    learner.ask("reads", num_ranks=0)
    learner.ask("meets", num_ranks=1)
    learner.receive(learner.answers(1)[b"meets"])
    assert begun.wait(120.0)

    learner.ask("late", num_ranks=1)
    assert learner.publisher.answers(learner.notice, num_workers=1) == []
    written.set()
    found = learner.answers(2)

    assert Path(found[b"reads"].folder).is_file()
    assert learner.receive(found[b"late"]) == published(learner)


def test_without_a_place_to_meet_nobody_is_invited_and_nothing_is_kept_in_use(learner, monkeypatch):
    """As when no file can be opened any more; whoever asks again later is served."""
    open_store, failures = broadcast.open_store, [OSError(24, "Too many open files")]

    def fails(host: str):
        if failures:
            raise failures.pop()
        return open_store(host)

    monkeypatch.setattr(broadcast, "open_store", fails)
    learner.ask("meets", num_ranks=1)
    route = learner.answers(1)[b"meets"]
    assert (route.meeting, route.folder) == (None, "")
    newest = learner.publisher._held.newest()
    assert newest is not None
    assert newest.users == 0

    learner.ask("meets", num_ranks=1, attempt=2)
    assert learner.receive(learner.answers(1)[b"meets"]) == published(learner)


def test_the_last_version_is_written_and_outlives_whoever_published_it(learner, tmp_path):
    """Announced when it is whole, by a manifest that needs nobody to send it."""
    told: list[Path] = []
    learner.model.lm_head.weight.data.mul_(2.0)
    sources, canary = plain_sources(named_weights(learner.model).items()), make_canary(learner.model, CANARY)
    learner.publisher.begin(sources, Version(0, 2), canary, told.append, lasts=True)
    learner.publisher.finish()
    learner.publisher.close()
    learner.files.close()

    assert told == [tmp_path / "0.2" / "manifest.json"]
    manifest = read_manifest(told[0])
    assert manifest.broadcast == []
    assert read_folder(told[0].parent) == manifest.tensors == published(learner)


def test_a_last_version_that_cannot_be_written_ends_the_learner(learner, monkeypatch):
    """In place of a line in a log: nobody would have it."""

    def full(*arguments) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(learner.files, "publish_weights", full)
    sources, canary = plain_sources(named_weights(learner.model).items()), make_canary(learner.model, CANARY)
    learner.publisher.begin(sources, Version(0, 2), canary, lasts=True)
    with pytest.raises(RoleFailed, match=r"the last version, 0\.2, cannot be written: .*No space"):
        learner.publisher.finish()


def test_an_invitation_that_was_lost_is_given_again(learner):
    """The worker asks again within a second; the others of its meeting wait for it no longer than that."""
    learner.ask("meets", num_ranks=1)
    lost = learner.answers(1)[b"meets"]
    learner.ask("meets", num_ranks=1)
    again = learner.answers(1)[b"meets"]

    assert again == lost
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(learner.receive, again).result(120.0) == published(learner)
