"""An engine serves a version only after its canary has passed."""

import queue
import threading
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from structlog.testing import capture_logs

from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import Sampling
from mrl.errors import EngineLost, WeightsError
from mrl.metrics.telemetry import Telemetry
from mrl.models.parameters import named_weights
from mrl.models.tensor_file import digest, read_folder, shape_of
from mrl.records.codec import decode, encode
from mrl.records.rollouts import Goodbye, GroupsAck, WeightsNotice, WeightsRoute, worker_message_decoder
from mrl.records.version import Version
from mrl.rollout.groups_in_flight import UnprovedGroups
from mrl.rollout.link import WorkerLink
from mrl.rollout.weight_sync import WeightSync
from mrl.rollout.weight_updates import Installed, Missed, Refused, WeightUpdater, install
from mrl.rollout.worker_counters import WorkerTotals
from mrl.weights.canary import canary_sequences
from mrl.weights.manifest import read_manifest
from mrl.weights.publish import Publisher, remove

CANARY = canary_sequences(64)


@pytest.fixture
def engine(tiny_model, tmp_path) -> EmbeddedEngine:
    """An engine that serves nothing yet."""
    tiny_model(seed=2).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return EmbeddedEngine(tmp_path / "model", Sampling(1.0, 4, (1,)), device="cpu", max_running=8)


def publish(folder: Path, model, step: int) -> Path:
    return Publisher(folder, "a").publish(model, Version(0, step), CANARY)


def lie(manifest_path: Path, **changes: object) -> None:
    manifest = msgspec.structs.replace(read_manifest(manifest_path), **changes)
    manifest_path.write_bytes(msgspec.json.encode(manifest))


def test_a_published_version_is_served_with_a_canary_gap_of_nothing(tiny_model, engine, tmp_path):
    """Publish, install: the engine computes what the learner computes and names the version."""
    installed = install(engine, publish(tmp_path, tiny_model(seed=1), 3), Version(0, 3))

    assert engine.version == Version(0, 3)
    assert installed.gap.mean_nats <= installed.gap.max_nats < 1e-6


def lying_canary(tiny_model, tmp_path: Path) -> tuple[Path, Path]:
    """A version, and another one whose canary belongs to the first, one optimizer step away."""
    honest, near = tiny_model(seed=1), tiny_model(seed=1)
    good = publish(tmp_path / "good", honest, 3)
    for tensor in named_weights(near).values():
        tensor.data += 1e-3 * (tensor.data.abs() > 0)
    lying = publish(tmp_path / "lying", near, 4)
    lie(lying, canary=read_manifest(good).canary)
    return good, lying


def test_weights_that_are_not_what_the_learner_scored_are_not_served(tiny_model, engine, tmp_path, monkeypatch):
    """Where nobody can tell what bytes the engine holds; a restart cures it."""
    good, lying = lying_canary(tiny_model, tmp_path)
    monkeypatch.setattr(engine, "checksums", lambda: None)
    install(engine, good, Version(0, 3))

    with pytest.raises(EngineLost, match="canary"):
        install(engine, lying, Version(0, 4))

    engine.restart()
    assert engine.version is None
    install(engine, good, Version(0, 3))
    assert engine.version == Version(0, 3)


def test_where_every_byte_is_right_a_canary_that_is_off_is_warned_of(tiny_model, engine, tmp_path):
    """And counted."""
    _, lying = lying_canary(tiny_model, tmp_path)
    totals = WorkerTotals(0.0)

    with capture_logs() as logs:
        totals.installed(install(engine, lying, Version(0, 4)))

    assert engine.version == Version(0, 4)
    (warning,) = (entry for entry in logs if entry["log_level"] == "warning")
    assert "all weight bytes match" in warning["event"]
    assert totals.values(1.0)["weights/canary_warnings"] == 1


def test_log_probabilities_that_are_not_numbers_are_never_served(tiny_model, engine, tmp_path, monkeypatch):
    """Whatever the bytes are."""
    monkeypatch.setattr(engine, "score", lambda ids: [[float("nan")] * (len(row) - 1) for row in ids])

    with pytest.raises(EngineLost, match="NaN or infinite"):
        install(engine, publish(tmp_path, tiny_model(seed=1), 4), Version(0, 4))


@pytest.mark.parametrize(("told", "count"), [(None, 1), ({}, 1), ("all", 0)])
def test_a_version_that_only_the_canary_could_prove_and_could_not_see_is_counted(
    tiny_model, engine, tmp_path, monkeypatch, told, count
):
    """The step before moved nothing: the engine may serve either, and is believed."""
    path = publish(tmp_path, tiny_model(seed=1), 3)
    canary = read_manifest(path).canary
    lie(path, canary=msgspec.structs.replace(canary, previous=canary.logprobs))
    if told != "all":
        monkeypatch.setattr(engine, "checksums", lambda: told)
    totals = WorkerTotals(0.0)

    with capture_logs() as logs:
        totals.installed(install(engine, path, Version(0, 3)))

    assert sum("cannot tell this version" in entry["event"] for entry in logs) == count
    assert totals.values(1.0)["weights/versions_not_told"] == count


def test_an_engine_that_kept_one_old_tensor_is_found_out(tiny_model, engine, tmp_path, monkeypatch):
    """A half-applied update: one tensor of one layer is still the old one, 1e-6 away, which no canary could see."""
    old, new = tiny_model(seed=1), tiny_model(seed=1)
    with torch.no_grad():
        new.model.layers[0].mlp.up_proj.weight += 1e-6
    path = publish(tmp_path, new, 4)
    stale = {name: digest(tensor) for name, tensor in named_weights(old).items()}
    assert len(set(stale.values()) - set(read_manifest(path).tensors.values())) == 1
    monkeypatch.setattr(engine, "checksums", lambda: stale)

    with pytest.raises(EngineLost, match=r"weights differ from version.*layers\.0\.mlp\.up_proj"):
        install(engine, path, Version(0, 4))


@pytest.mark.parametrize("error", [WeightsError("the folder is gone"), ValueError("shapes")])
def test_weights_that_are_loaded_and_cannot_be_proved_are_no_good(tiny_model, engine, tmp_path, monkeypatch, error):
    """To refuse them would be wrong: the engine serves them by now, and nobody would ever prove them."""

    def fail() -> None:
        raise error

    monkeypatch.setattr(engine, "checksums", fail)

    with pytest.raises(EngineLost, match=f"could not be verified: {error}"):
        install(engine, publish(tmp_path, tiny_model(seed=1), 4), Version(0, 4))


@pytest.mark.parametrize(("kept", "share"), [(0, 0.0), (1, 0.5), (2, 1.0)])
def test_an_update_says_how_much_of_the_bytes_was_compared(tiny_model, engine, tmp_path, monkeypatch, kept, share):
    """What an engine cannot tell of some tensors is no proof of the others."""
    path = publish(tmp_path, tiny_model(seed=1), 3)
    digests = list(read_manifest(path).tensors.items())
    told = dict(digests[: kept * len(digests) // 2])
    monkeypatch.setattr(engine, "checksums", lambda: told)

    assert install(engine, path, Version(0, 3)).compared_share == pytest.approx(share, abs=1 / len(digests))


def test_the_embedded_engine_says_what_it_holds(tiny_model, engine, tmp_path):
    """Its digests are those of the manifest, all of them."""
    path = publish(tmp_path, tiny_model(seed=1), 3)
    install(engine, path, Version(0, 3))

    assert engine.checksums() == read_manifest(path).tensors


def test_a_torn_file_leaves_the_served_version(tiny_model, engine, tmp_path):
    """An update that cannot be read changes nothing."""
    install(engine, publish(tmp_path, tiny_model(seed=1), 3), Version(0, 3))
    torn = publish(tmp_path, tiny_model(seed=1), 4)
    torn.with_name("model.safetensors").write_bytes(b"torn")

    with pytest.raises(WeightsError, match="invalid safetensors header"):
        install(engine, torn, Version(0, 4))

    assert engine.version == Version(0, 3)


def test_a_manifest_of_another_version_is_refused(tiny_model, engine, tmp_path):
    """What the learner announced and what the manifest describes must be the same version."""
    path = publish(tmp_path, tiny_model(seed=1), 3)

    with pytest.raises(WeightsError, match=r"describes version 0\.3, wanted 0\.4"):
        install(engine, path, Version(0, 4))

    assert engine.version is None


def test_updates_follow_the_newest_version_one_at_a_time(tiny_model, engine, tmp_path):
    """The outcome of each is told once; what is served already is not loaded again."""
    updates = WeightUpdater(engine, Telemetry("worker/a/0", "a", lambda record: True))
    torn = publish(tmp_path, tiny_model(seed=1), 3)
    torn.with_name("model.safetensors").write_bytes(b"torn")
    good = publish(tmp_path, tiny_model(seed=1), 4)

    def follow(path: Path, step: int) -> Installed | Refused | None:
        notice = WeightsNotice(version=Version(0, step), manifest_path=str(path))
        return updates.follow(notice, to_its_end=True)

    refused, installed = follow(torn, 3), follow(good, 4)

    assert isinstance(refused, Refused)
    assert isinstance(installed, Installed)
    assert (refused.version, installed.version) == (Version(0, 3), Version(0, 4))
    assert follow(good, 4) is None
    updates.close()


@pytest.mark.parametrize(
    ("told", "outcome"), [("of this version", Refused), ("of a newer one", Missed), ("goodbye", Missed)]
)
@pytest.mark.parametrize("lost", ["pruned", "in a process that has ended"])
def test_a_version_that_has_gone_is_refused_only_while_it_is_wanted(
    tiny_model, engine, tmp_path, monkeypatch, told, outcome, lost
):
    """A slow worker finds it pruned, or its learner at the end of its steps; a word of that has long come."""
    monkeypatch.setattr("mrl.rollout.weight_updates.TOLD_S", 0.0)
    path, link = publish(tmp_path, tiny_model(seed=1), 3), WorkerLink("worker/a/0")
    link.open(lambda body: None, lambda: None)
    notice = WeightsNotice(version=Version(0, 3), manifest_path=str(path))
    newest = WeightsNotice(version=Version(0, 4), manifest_path="") if told == "of a newer one" else notice
    link.on_message(encode(GroupsAck(tickets=[], weights=newest)))
    if told == "goodbye":
        link.on_message(encode(Goodbye(role="learner")))
    if lost == "pruned":
        remove(path)
    else:
        (file,) = path.parent.glob("*.safetensors")
        file.unlink()
        file.symlink_to("/proc/self/fd/987654")
    updates = WeightUpdater(engine, Telemetry("worker/a/0", "a", lambda record: True), link=link)

    found = updates.follow(notice, to_its_end=True)

    assert type(found) is outcome
    assert found.version == notice.version
    assert engine.version is None
    updates.close()


def test_a_version_that_was_pruned_before_the_word_of_a_newer_one_came_is_not_refused(
    tiny_model, engine, tmp_path, monkeypatch
):
    """A fast learner is two steps ahead of what a worker has heard; the newer one is taken as soon as it is told."""
    old, link, now_s = publish(tmp_path, tiny_model(seed=1), 3), WorkerLink("worker/a/0"), [0.0]
    tries: list[Version] = []
    link.open(lambda body: None, lambda: None)
    told = [WeightsNotice(version=Version(0, 3), manifest_path=str(old))]
    remove(old)
    told.append(WeightsNotice(version=Version(0, 4), manifest_path=str(publish(tmp_path, tiny_model(seed=2), 4))))
    updates, totals = (
        WeightUpdater(engine, Telemetry("worker/a/0", "a", lambda record: True), link=link),
        WorkerTotals(0.0),
    )
    following = WeightSync(
        engine,
        updates,
        link,
        unproved=UnprovedGroups(),
        totals=totals,
        max_staleness_versions=2,
        clock=lambda: now_s[0],
    )
    monkeypatch.setattr(updates, "_install", lambda *told: tries.append(told[2]) or install(*told, link=link))

    link.on_message(encode(GroupsAck(tickets=[], weights=told[0])))
    for _ in range(3):
        following.follow(to_the_end=True)
    assert tries == [Version(0, 3)], "and tried again after a pause"
    now_s[0] = 60.0
    following.follow(to_the_end=True)
    assert len(tries) == 2

    link.on_message(encode(GroupsAck(tickets=[], weights=told[1])))
    following.follow(to_the_end=True)
    assert engine.version == Version(0, 4)
    assert totals.weights_refused == 0
    updates.close()


def test_a_worker_that_finds_no_version_at_all_is_refused_them_however_fast_newer_ones_come(
    tiny_model, engine, tmp_path, monkeypatch
):
    """One that cannot see the learner's memory would otherwise wait for a word of each, and never tell of it."""
    link, now_s = WorkerLink("worker/a/0"), [0.0]
    link.open(lambda body: None, lambda: None)
    monkeypatch.setattr("mrl.rollout.weight_updates.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    updates, outcomes = WeightUpdater(engine, Telemetry("worker/a/0", "a", lambda record: True), link=link), []
    for step in range(3, 7):
        path = publish(tmp_path, tiny_model(seed=step), step)
        if step < 6:
            path.unlink()
        notice = WeightsNotice(version=Version(0, step), manifest_path=str(path))
        link.on_message(encode(GroupsAck(tickets=[], weights=notice)))
        outcomes.append(type(updates.follow(notice, to_its_end=True)))
        now_s[0] += 6.0
    assert outcomes == [Missed, Missed, Refused, Installed]
    updates.close()


def test_an_update_that_is_abandoned_has_ended(tiny_model, engine, tmp_path, monkeypatch):
    """The engine that is started anew afterwards is not written over by it."""
    updates, score = WeightUpdater(engine, Telemetry("worker/a/0", "a", lambda record: True)), engine.score
    notice = WeightsNotice(version=Version(0, 3), manifest_path=str(publish(tmp_path, tiny_model(seed=1), 3)))
    proving, release, ended = threading.Event(), threading.Event(), []

    def held_up(token_ids):
        proving.set()
        assert release.wait(120.0)
        ended.append(True)
        return score(token_ids)

    monkeypatch.setattr(engine, "score", held_up)
    assert updates.follow(notice) is None
    assert proving.wait(120.0)
    later = threading.Timer(0.1, release.set)
    later.start()

    updates.abandon()

    assert ended == [True]
    assert updates.follow(notice) is None, "its outcome is nobody's business any more"
    later.join()
    updates.close()


@pytest.mark.parametrize("moment", ["load", "score", "checksums"])
def test_a_version_that_is_pruned_while_it_is_taken_stays_as_it_is_until_it_is_proved(
    tiny_model, engine, tmp_path, monkeypatch, moment
):
    """Its files are written over by no later version: some engines compare with them what they hold."""
    publisher, model = Publisher(tmp_path, "a", in_memory=True, keep=1), tiny_model(seed=1)
    path, other = publisher.publish(model, Version(0, 3), CANARY), tiny_model(seed=2)
    done, were_same = getattr(engine, moment), []

    def while_it_is_pruned(*arguments):
        found = done(*arguments)
        for step in (4, 5):
            publisher.publish(other, Version(0, step), CANARY)
        were_same.append(read_folder(path.parent) == read_manifest(path).tensors)
        return found

    monkeypatch.setattr(engine, moment, while_it_is_pruned)
    install(engine, path, Version(0, 3))
    assert were_same == [True]

    publisher.publish(other, Version(0, 6), CANARY)
    assert not path.exists(), "nobody holds it any more"
    publisher.close()


def test_an_update_that_waits_for_the_learner_is_abandoned_at_once(tiny_model, engine, tmp_path, monkeypatch):
    """The engine is lost, so an offer would be of no use; the next one is waited for again."""
    monkeypatch.setattr("mrl.rollout.weight_updates.ROUTE_S", 3600.0)
    model, link = tiny_model(seed=1), WorkerLink("worker/a/0")
    path = publish(tmp_path, model, 3)
    lie(path, broadcast=[shape_of(name, tensor) for name, tensor in named_weights(model).items()])
    asked: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    link.open(asked.put, lambda: None)
    updates = WeightUpdater(engine, Telemetry("worker/a/0", "a", lambda record: True), link=link)
    notice = WeightsNotice(version=Version(0, 3), manifest_path=str(path))
    assert updates.follow(notice) is None
    asked.get(timeout=120.0)

    updates.abandon()

    assert updates.follow(notice) is None
    request = decode(asked.get(timeout=120.0), worker_message_decoder)
    later = threading.Timer(0.1, link.on_message, [encode(WeightsRoute(attempt=request.attempt, weights=notice))])
    later.start()
    outcome = updates.follow(notice, to_its_end=True)
    assert isinstance(outcome, Missed)
    assert "no longer the newest" in outcome.reason
    later.join()
    updates.close()


def test_the_end_of_a_worker_does_not_wait_for_an_engine_that_hangs(tiny_model, engine, tmp_path, monkeypatch):
    """It is closed, which wakes whoever waits in it."""
    closed = threading.Event()

    def hang(folder, version, digests) -> None:
        assert closed.wait(120.0)
        raise EngineLost("the engine is closed")

    monkeypatch.setattr("mrl.rollout.weight_updates.CLOSE_S", 0.05)
    monkeypatch.setattr(engine, "load", hang)
    monkeypatch.setattr(engine, "close", closed.set)
    updates = WeightUpdater(engine, Telemetry("worker/a/0", "a", lambda record: True))
    path = publish(tmp_path, tiny_model(seed=1), 3)
    assert updates.follow(WeightsNotice(version=Version(0, 3), manifest_path=str(path))) is None

    updates.close()

    assert closed.is_set()


def test_weights_that_a_learner_took_with_it_are_tried_once(tmp_path, monkeypatch):
    """Its worker goes on, for peers that ask for scores, until the run ends: hours of a try and a line every 50 ms."""
    engine, link, tries = SimpleNamespace(version=Version(0, 2)), WorkerLink("worker/a/0"), []
    link.open(lambda body: None, lambda: None)
    notice = WeightsNotice(version=Version(0, 3), manifest_path=str(tmp_path / "gone" / "manifest.json"))
    link.on_message(encode(GroupsAck(tickets=[], weights=notice)))
    link.on_message(encode(Goodbye(role="learner")))
    updates = WeightUpdater(engine, Telemetry("worker/a/0", "a", lambda record: True), link=link)
    following = WeightSync(
        engine,
        updates,
        link,
        unproved=UnprovedGroups(),
        totals=WorkerTotals(0.0),
        max_staleness_versions=2,
        clock=lambda: 1e9,
    )
    monkeypatch.setattr(updates, "_install", lambda *told: tries.append(told) or install(*told, link=link))

    for _ in range(5):
        following.follow(to_the_end=True)

    assert len(tries) == 1
    following.begin_anew()
    following.follow(to_the_end=True)
    assert len(tries) == 2
    updates.close()
