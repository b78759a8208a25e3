"""Weights by broadcast, from a learner's publisher over a real link into real engines; and what when it fails."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from structlog.testing import capture_logs

from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import Sampling
from mrl.errors import PeerLost
from mrl.learner.intake import Intake
from mrl.learner.ledger import SamplingLimits, WorkLedger
from mrl.models import tensor_broadcast
from mrl.models.parameters import named_weights
from mrl.models.tensor_broadcast import BroadcastRanks
from mrl.records.rollouts import WeightsNotice
from mrl.records.version import Version
from mrl.rollout import weight_updates
from mrl.rollout.link import WorkerLink
from mrl.rollout.weight_updates import Installed, NotOffered, Route, install
from mrl.transport.background import BackgroundClient
from mrl.transport.client_socket import ClientSocket
from mrl.transport.grants import Grant
from mrl.transport.keys import create_keys, load_client_keys
from mrl.transport.server import ServerSocket
from mrl.weights import broadcast
from mrl.weights.broadcast import BroadcastPublisher
from mrl.weights.canary import canary_sequences, make_canary
from mrl.weights.publish import Publisher

CANARY = canary_sequences(64)


class Site:
    """A learner's end, and as many workers as are asked for."""

    def __init__(self, folder: Path, model) -> None:
        self.folder, self.model = folder, model
        self.keys = create_keys(folder / "keys", [Grant("worker", "a")])
        self.server = ServerSocket(self.keys)
        self.publisher = BroadcastPublisher(Publisher(folder / "weights", "a"), host="127.0.0.1")
        ledger = WorkLedger(SamplingLimits(2, 2, 1, 100), lambda position: f"p{position}", Version(0, 0))
        self.intake = Intake(self.server, ledger, courier=self.publisher)
        self.clients: list[BackgroundClient] = []
        self.notice: WeightsNotice | None = None

    def publish(self, step: int) -> WeightsNotice:
        """Another version, in which every tensor differs from the one before."""
        with torch.no_grad():
            for tensor in named_weights(self.model).values():
                tensor.mul_(1.0 + 1e-3)
        version = Version(0, step)
        path = self.publisher.publish_weights(
            named_weights(self.model).items(), version, make_canary(self.model, CANARY)
        )
        self.notice = WeightsNotice(version=version, manifest_path=str(path))
        self.intake.announce(self.notice)
        return self.notice

    def worker(self, index: int = 0) -> "Worker":
        link = WorkerLink(f"worker/a/{index}")
        own = load_client_keys(self.keys.folder, Grant("worker", "a"))
        socket = ClientSocket(own, lambda: self.server.address, identity=f"worker/a/{index}")
        client = BackgroundClient(socket, on_message=link.on_message, on_tick=link.on_tick)
        self.clients.append(client)
        link.open(client.post, client.restart)
        engine = EmbeddedEngine(self.folder / "model", Sampling(1.0, 4, (1,)), device="cpu", max_running=4)
        return Worker(self, link, engine)

    def close(self) -> None:
        for client in self.clients:
            client.close(0.2)
        self.intake.close()
        self.publisher.close()


class Worker:
    """A worker's link and engine."""

    def __init__(self, site: Site, link: WorkerLink, engine: EmbeddedEngine) -> None:
        self.site, self.link, self.engine = site, link, engine

    def follow(self, notice: WeightsNotice | None = None) -> Installed:
        notice = notice or self.site.notice
        assert notice is not None
        return install(self.engine, Path(notice.manifest_path), notice.version, link=self.link)

    def become_known(self) -> None:
        """Until the learner has heard of this worker."""
        while self.link.notice is None:
            self.link.take_work(1, timeout_s=1.0)

    def holds(self, model) -> bool:
        held = dict(self.engine._model.named_parameters())
        return all(torch.equal(tensor, held[name]) for name, tensor in model.named_parameters())


@pytest.fixture
def site(tiny_model, tmp_path, monkeypatch) -> Iterator[Site]:
    """Short bounds, and small buckets so that there are many."""
    monkeypatch.setattr(tensor_broadcast, "BUCKET_BYTES", 4096)
    monkeypatch.setattr(tensor_broadcast, "MEET_S", 60.0)
    tiny_model(seed=2).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    made = Site(tmp_path, tiny_model(seed=1))
    yield made
    made.close()


def files_of(site: Site) -> list[Path]:
    return sorted((site.folder / "weights").glob("*/model.safetensors"))


def test_engines_serve_what_was_broadcast_and_nothing_is_written(site):
    """Version after version: the engine holds the learner's bytes, its canary fits, and no tensor touched a disk."""
    worker = site.worker()

    for step in range(1, 5):
        site.publish(step)
        installed = worker.follow()

        assert (installed.route, installed.version) == (Route.BROADCAST, Version(0, step))
        assert installed.gap.max_nats < 1e-6
        assert worker.engine.version == Version(0, step)
        assert worker.holds(site.model)
    assert files_of(site) == []


def test_an_engine_with_another_nccl_is_sent_weights_by_gloo_and_the_log_names_both(site, monkeypatch):
    """Once for each version of NCCL; learner and engine say theirs as if they had a GPU each."""
    monkeypatch.setattr(broadcast, "gpu_id", lambda device: "GPU-0")
    monkeypatch.setattr(broadcast, "nccl_version", lambda device: "2.30.7")
    worker = site.worker()
    monkeypatch.setattr(worker.engine, "broadcast_seats", lambda: BroadcastRanks(1, "GPU-1", "2.29.1"))
    with capture_logs() as lines:
        for step in (1, 2):
            site.publish(step)
            assert worker.follow().route is Route.BROADCAST
            assert worker.holds(site.model)
    told = [(line["learner"], line["engines"]) for line in lines if "by gloo" in line["event"]]
    assert told == [("2.30.7", ["2.29.1"])]


def test_workers_that_ask_together_meet_in_one_broadcast_and_latecomers_get_their_own(site):
    """Three workers, one group of four ranks; a fourth that comes later is served as well."""
    workers = [site.worker(index) for index in range(4)]
    site.publish(1)
    for worker in workers[:3]:
        worker.become_known()

    with ThreadPoolExecutor(3) as threads:
        routes = [future.result() for future in [threads.submit(worker.follow) for worker in workers[:3]]]
    late = workers[3].follow()

    assert {installed.route for installed in (*routes, late)} == {Route.BROADCAST}
    assert all(worker.holds(site.model) for worker in workers)


def test_a_member_that_never_comes_costs_the_others_a_bound_and_then_they_read_files(site, monkeypatch):
    """Two ask, one is gone before it meets: the other falls back to files, and the next broadcast works again."""
    monkeypatch.setattr(tensor_broadcast, "MEET_S", 1.0)
    monkeypatch.setattr(tensor_broadcast, "STALL_S", 2.0)
    gone, stays = site.worker(0), site.worker(1)
    notice = site.publish(1)
    gone.become_known()
    stays.become_known()
    with ThreadPoolExecutor(1) as threads:
        told = threads.submit(gone.link.ask_weights, notice.version, num_ranks=1, within_s=120.0)
        installed = stays.follow()
        assert told.result() is not None

    assert installed.route is Route.FILES_INSTEAD
    assert stays.holds(site.model)
    assert len(files_of(site)) == 1
    monkeypatch.setattr(tensor_broadcast, "MEET_S", 60.0)
    monkeypatch.setattr(tensor_broadcast, "STALL_S", 60.0)
    site.publish(2)
    assert stays.follow().route is Route.BROADCAST


def test_bytes_that_change_on_their_way_are_found_and_the_files_are_read(site, monkeypatch):
    """One flipped bit in one bucket: the digests differ, nothing of it is served, the version comes in files."""
    worker = site.worker()
    site.publish(1)
    receive = tensor_broadcast.BroadcastGroup.receive

    def flipped(self, flat: torch.Tensor) -> None:
        receive(self, flat)
        flat[17] ^= 1

    monkeypatch.setattr(tensor_broadcast.BroadcastGroup, "receive", flipped)

    assert worker.follow().route is Route.FILES_INSTEAD
    assert worker.holds(site.model)


def test_a_version_that_is_not_the_newest_any_more_is_not_offered(site):
    """The worker is told at once, and serves on what it serves."""
    worker = site.worker()
    site.publish(1)
    worker.follow()
    old = site.publish(2)
    site.publish(3)

    with pytest.raises(NotOffered, match=r"0\.2 is no longer the newest"):
        worker.follow(old)

    assert worker.engine.version == Version(0, 1)
    assert worker.follow().version == Version(0, 3)


def test_a_learner_that_answers_nothing_costs_a_bound(site, monkeypatch):
    """A learner that is away: no broadcast, no files, no hang; the served version stays."""
    monkeypatch.setattr(weight_updates, "ROUTE_S", 0.2)
    worker = site.worker()
    site.publish(1)
    worker.follow()
    notice = site.publish(2)
    site.intake.close()

    with pytest.raises(NotOffered, match="no answer"):
        worker.follow(notice)

    assert worker.engine.version == Version(0, 1)


def test_the_end_of_a_worker_does_not_wait_for_a_learner(site):
    """Whoever waits for an answer is woken when the link ends."""
    worker = site.worker()
    notice = site.publish(1)
    site.intake.close()

    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(worker.link.ask_weights, notice.version, num_ranks=1, within_s=3600.0)
        worker.link.end()
        assert asked.result(120.0) is None


def test_the_learner_overwrites_nothing_that_is_being_sent(site, monkeypatch):
    """While a version is on its way the learner publishes two more: the engine gets the first one whole."""
    worker = site.worker()
    first = site.publish(1)
    values = {name: tensor.clone() for name, tensor in site.model.named_parameters()}
    send = tensor_broadcast.BroadcastGroup.send
    published: list[int] = []

    def publishing(self, flat: torch.Tensor) -> None:
        if not published:
            published.extend([2, 3])
            for step in (2, 3):
                site.publish(step)
        send(self, flat)

    monkeypatch.setattr(tensor_broadcast.BroadcastGroup, "send", publishing)

    assert worker.follow(first).route is Route.BROADCAST
    held = dict(worker.engine._model.named_parameters())
    assert all(torch.equal(values[name], held[name]) for name in values)
    assert worker.follow().version == Version(0, 3)
    assert worker.holds(site.model)


def test_nobody_at_the_meeting_place_is_an_expected_loss(site, monkeypatch):
    """The learner died after its answer: the connection is refused, which is no more than a lost peer."""
    monkeypatch.setattr(tensor_broadcast, "MEET_S", 0.5)
    worker = site.worker()
    site.publish(1)
    seats = worker.engine.broadcast_seats()
    route = worker.link.ask_weights(Version(0, 1), num_ranks=seats.num_ranks, within_s=120.0)
    assert route is not None
    meeting = route.meeting
    assert meeting is not None

    with pytest.raises(PeerLost, match="no sender at"):
        tensor_broadcast.join(msgspec.structs.replace(meeting, port=9), 1)
