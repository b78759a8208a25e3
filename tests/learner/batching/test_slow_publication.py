"""While a version is on its way to its folder, workers that wait for it are not taken for some that stand still."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mrl.errors import PeerLost
from mrl.learner.asynchronous_batching import await_groups
from mrl.learner.training_loop import Learner
from mrl.learner.worker_activity import WaitBounds
from mrl.models.parameters import plain_sources
from mrl.records.rollouts import WeightsNotice, WorkRequest
from mrl.records.version import Version
from mrl.weights.manifest import Canary
from mrl.weights.publish import Publisher

NUM_PIECES, PIECE_S = 20, 0.12
BOUNDS = WaitBounds(data_timeout_s=1.2, first_word_s=1.2, loading_s=1.2)


@pytest.fixture
def publishes(tmp_path, monkeypatch):
    """Begins a version whose bytes come to a slow disk; `ends` says whether they ever all do."""
    release, publishers = threading.Event(), []

    def make(intake, *, ends: bool) -> Publisher:
        def copy(source: str, target: Path) -> None:
            with Path(target).open("wb", buffering=0) as file:
                for _ in range(NUM_PIECES):
                    file.write(bytes(1000))
                    time.sleep(PIECE_S)
                assert ends or release.wait(120.0)

        monkeypatch.setattr("mrl.weights.publish.shutil.copyfile", copy)
        publisher = Publisher(tmp_path / "weights", "a")
        publishers.append(publisher)
        sources = plain_sources({"w": torch.ones(9)}.items())
        publisher.begin(
            sources,
            Version(0, 0),
            Canary([], [], []),
            lambda path: intake.announce(WeightsNotice(version=Version(0, 0), manifest_path=str(path))),
        )
        return publisher

    yield make
    release.set()
    for publisher in publishers:
        publisher.finish()
        publisher.close()


@pytest.mark.parametrize("ends", [True, False])
def test_a_learner_waits_as_long_as_its_version_gets_on(make_books, publishes, telemetry, ends):
    """Twice as long as workers may do nothing; once no more bytes come, or all have, no longer than that."""
    intake = make_books().intake
    publisher = publishes(intake, ends=ends)
    first = SimpleNamespace(allocator=SimpleNamespace(beat=lambda: None), evaluations=None, intake=intake)
    stopping = Learner._telling_of_life(SimpleNamespace(_publisher=publisher), first, lambda: False)  # type: ignore[arg-type]

    def a_worker_asks() -> None:
        intake._answer(WorkRequest(worker="w", max_groups=0, holding=[]))

    began_s = time.monotonic()
    with pytest.raises(PeerLost, match=r"nothing was sampled, judged, published or loaded for 1\.2 s"):
        await_groups(intake, 0, stopping, a_worker_asks, telemetry, bounds=BOUNDS)

    assert time.monotonic() - began_s > NUM_PIECES * PIECE_S + 1.1
    assert (intake._notice is not None) == ends
    assert (publisher.progress > 0) != ends
