"""While the first rank waits for a batch the others hear of it, so that nobody takes the wait for a stall."""

import queue
import threading
from types import SimpleNamespace
from typing import Any

import torch

from mrl.learner import training_loop as loop
from mrl.learner.ranks.learner_turn import LearnerTurn
from mrl.learner.references import CanaryReferences
from mrl.learner.training_loop import STILL_WAITING, Learner, Milestones
from mrl.models.row_attention import use_row_attention
from mrl.records.version import Version


class Rank:
    """One of two that share a queue in place of a process group; notes what it is at."""

    size, device = 2, torch.device("cpu")

    def __init__(self, channel: "queue.Queue[bytes]", *, is_first: bool) -> None:
        self._channel, self.is_first = channel, is_first
        self.at: list[str] = []
        self.heard: list[bytes] = []

    def note(self, what: str) -> None:
        self.at.append(what)

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        self.note("order")
        if self.is_first:
            self._channel.put(data or b"")
            return data or b""
        self.heard.append(self._channel.get(timeout=120.0))
        return self.heard[-1]


def test_the_other_ranks_are_told_that_the_batch_is_still_awaited(tiny_model, monkeypatch) -> None:
    """At every look for groups here, where no time lies between two words; all ranks note the same in one order."""
    monkeypatch.setattr(loop, "SAY_SO_S", -1.0)
    channel: queue.Queue[bytes] = queue.Queue()
    ranks = [Rank(channel, is_first=True), Rank(channel, is_first=False)]

    def prepare(step: int, rng: Any, stopping: Any) -> None:
        for _ in range(3):
            assert not stopping()

    quiet = SimpleNamespace(doing=lambda *about: None, beat=lambda: None, tell=lambda: None, check=lambda: None)
    quiet.publishing, quiet.progress = lambda progress: None, 0
    batches = SimpleNamespace(prepare=prepare)
    first = SimpleNamespace(allocator=quiet, telemetry=quiet, evaluations=quiet, batches=batches, intake=quiet)
    model = tiny_model()
    use_row_attention(model)
    learners = [
        Learner(
            SimpleNamespace(model=model, precision="float32", kernel="chunked", context=None, world=rank),  # type: ignore[arg-type]
            Milestones(10, 0),
            Version(0, 0),
            first if rank.is_first else None,  # type: ignore[arg-type]
            None,
            seed=1,
            canary=CanaryReferences(SimpleNamespace(precision="float32"), [[3, 5, 9, 2, 7]]),  # type: ignore[arg-type]
            publisher=quiet,  # type: ignore[arg-type]
            turn=LearnerTurn(rank, quiet),  # type: ignore[arg-type]
        )
        for rank in ranks
    ]
    other = threading.Thread(target=learners[1]._step, args=(lambda: False,))
    other.start()
    assert not learners[0]._step(lambda: False)
    other.join(120.0)

    assert ranks[1].heard == [STILL_WAITING] * 3 + [b""]
    assert ranks[0].at == ranks[1].at == ["forming a batch", "order"] * 4
